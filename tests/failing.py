"""Functions that go wrong after a while."""

from collections.abc import Callable
from typing import Any


def after(calls: int, original: Callable[..., Any], fault: Exception) -> Callable[..., Any]:
    """A function that does what the original does, so many times, and raises the fault from then on."""
    left = [None] * calls

    def fails(*arguments: Any, **more: Any) -> Any:
        if not left:
            raise fault
        left.pop()
        return original(*arguments, **more)

    return fails
