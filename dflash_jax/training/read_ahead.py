"""Batches read ahead by a thread of their own, so that one that hangs or fails is noticed."""

import queue
import threading
import time
from collections.abc import Generator
from typing import Self

from dflash_jax.batch import Batch

Item = tuple[Batch, int]


class ReadingFault(Exception):
    """The next batch cannot be had; the text says why."""


class StuckReader(ReadingFault):
    """It has not come, and the thread that reads it may never end."""


class ReadAhead:
    """Iterates over (batch, cursor) of a generator, of which up to `depth` wait in memory.

    `ready` says how many, `cursor` how many batches of the plan have been given out. What the generator raises
    comes as a ReadingFault in its place, and `stuck_s` seconds without a batch as a StuckReader. `close` ends the
    thread, unless the generator hangs: then it ends with the process.
    """

    def __init__(self, items: Generator[Item, None, None], *, start: int, depth: int, stuck_s: float):
        """start: the generator's first batch."""
        self.cursor = start
        self._items, self._stuck_s = items, stuck_s
        self._read: queue.Queue[Item | Exception | None] = queue.Queue(depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="read-ahead", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> int:
        """Batches that are read and wait."""
        return self._read.qsize()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        try:
            found = self._read.get(timeout=self._stuck_s)
        except queue.Empty:
            raise StuckReader(f"no batch came for {self._stuck_s:g} s (pipeline.stuck_s)") from None
        if found is None:
            raise StopIteration
        if isinstance(found, Exception):
            raise ReadingFault(f"{type(found).__name__}: {' '.join(str(found).split())}") from found
        self.cursor = found[1]
        return found

    def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        deadline = time.monotonic() + 1.0
        while self._thread.is_alive() and time.monotonic() < deadline:
            while not self._read.empty():
                self._read.get_nowait()
            self._thread.join(timeout=0.01)

    def _fill(self) -> None:
        last: Exception | None = None
        try:
            for item in self._items:
                self._read.put(item)
                if self._closing.is_set():
                    break
            self._items.close()
        except Exception as fault:  # whatever it is, the thread that trains has to hear of it
            last = fault
        if not self._closing.is_set():
            self._read.put(last)
