"""A row of the data that is left out, and why: one exception, and the reasons that a report counts by."""

import reprlib
from typing import Any

REASONS = {
    "broken file": "the file cannot be read any further",
    "not UTF-8": "text that is not UTF-8, or half of a surrogate pair",
    "not JSON": "the row is not a JSON text",
    "duplicate key": "an object says the same key twice",
    "not a number": "NaN, Infinity, or a number that is too large",
    "unknown format": "no known format of a row, or two at once",
    "bad message": "a message that no chat template could render",
    "bad tool call": "tool calls or tools that are not as they must be",
    "bad tokens": "token ids, loss mask or labels that cannot be trained on",
    "template": "the chat template refuses the conversation",
    "unverified": "the answer cannot be told apart from the rest of the text with certainty",
    "no answer": "nothing that the drafter could learn",
    "no anchor": "no two trained tokens in a row",
    "too long": "longer than the limit",
}

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlist = _SHORT.maxdict = 12
_SHORT.maxlevel = 3


class UnusedRow(Exception):
    """Why a row is not used. `reason` is a key of REASONS; `detail` says in one line what was found."""

    def __init__(self, reason: str, detail: str) -> None:
        if reason not in REASONS:
            raise ValueError(f"{reason!r} is none of the reasons {sorted(REASONS)}")
        super().__init__(reason, detail)  # both in args, so that it goes between processes
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def shown(value: Any) -> str:
    """The value as an error message shows it: Python's spelling in one line of at most 80 characters."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
