"""Look-ahead: the target mesh works on later batches while the drafter mesh trains on this one.

Dispatch is asynchronous, so one thread that requests work early keeps both meshes busy; two dispatching threads
would hang as soon as several hosts run at different paces.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def look_ahead(items: Iterable[T], depth: int) -> Iterator[tuple[T, Sequence[T]]]:
    """Yield the items in order, each with those requested beyond it: always `depth`, but for the last items."""
    window: collections.deque[T] = collections.deque()
    for item in items:
        window.append(item)
        if len(window) > depth:
            yield window.popleft(), tuple(window)
    while window:
        yield window.popleft(), tuple(window)
