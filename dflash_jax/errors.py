"""What a user can cause: reported as one line with exit status 2, never as a traceback."""


class UserError(Exception):
    """A recipe, file, device or argument is wrong; the message names it, what was found and the remedy."""
