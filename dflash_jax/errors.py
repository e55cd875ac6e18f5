"""What a user can cause: reported as one line with exit status 2, never as a traceback."""

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """A recipe, file, device or argument is wrong; the message names it, what was found and the remedy."""


class HangError(UserError):
    """Something hangs that the end of the process would wait for; so it ends at once, when all is saved."""


@contextlib.contextmanager
def named(key: str) -> Iterator[None]:
    """Put the key before what a UserError says, where it does not stand there yet."""
    try:
        yield
    except UserError as fault:
        if str(fault).startswith(f"{key}:"):
            raise
        raise UserError(f"{key}: {fault}") from fault
