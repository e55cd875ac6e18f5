"""Bytes by record id in ArrayRecord files, each written once by one process, and read at random.

    features-00000.arrayrecord    an entry for each record, uncompressed
    features-00000.json           {"records": their ids in order, "bytes": the file's size}

The JSON file is written when the other is whole. One without the other is what a process left that was killed, or
a person who deleted a damaged file: its records count as missing.
"""

import collections
import contextlib
import functools
import json
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]  # a C++ module

from dflash_jax.errors import UserError

SHARD_BYTES = 256 * 2**20  # what a kill may lose
QUEUE_BYTES = 256 * 2**20  # what may wait for the disk in host memory
READ_THREADS = 8
OPEN_FILES = 256  # open at a time for reading; many systems allow a process 1024
ENTRIES, INDEX, UNFINISHED = ".arrayrecord", ".json", ".half"


def shard_file(directory: pathlib.Path, number: int, suffix: str) -> pathlib.Path:
    """One of the files of a shard."""
    return directory / f"features-{number:05d}{suffix}"


class Shards:
    """The entries of a folder. `close` ends the threads that read them."""

    def __init__(self, directory: pathlib.Path):
        self._directory = directory
        self._places: dict[int, tuple[int, int]] = {}  # record id -> number of its shard, place in it
        self._pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="feature reader")
        self._reader = functools.lru_cache(maxsize=OPEN_FILES)(self._open)
        self.next_number = 0

    @classmethod
    def open(cls, directory: pathlib.Path) -> Self:
        """Raises UserError for a file that is not as it was written."""
        shards = cls(directory)
        for index in sorted(directory.glob(f"features-[0-9]*{INDEX}")):
            if index.with_suffix(ENTRIES).exists():
                shards.add(int(index.stem.rpartition("-")[2]))
        return shards

    def add(self, number: int) -> None:
        """Make the entries of a whole shard known."""
        index, entries = (shard_file(self._directory, number, suffix) for suffix in (INDEX, ENTRIES))
        try:
            content = json.loads(index.read_text())
            records, size = [int(record_id) for record_id in content["records"]], int(content["bytes"])
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(index, repr(error)) from None
        if entries.stat().st_size != size:
            raise damaged(entries, f"it has {entries.stat().st_size} bytes, {index.name} says {size}")
        self._places.update((record_id, (number, place)) for place, record_id in enumerate(records))
        self.next_number = max(self.next_number, number + 1)

    def __contains__(self, record_id: int) -> bool:
        return record_id in self._places

    @property
    def record_ids(self) -> set[int]:
        """The records that have an entry."""
        return set(self._places)

    def file_of(self, record_id: int) -> pathlib.Path:
        """The file with a record's entry."""
        return shard_file(self._directory, self._places[record_id][0], ENTRIES)

    def read(self, record_ids: Iterable[int]) -> dict[int, bytes]:
        """The entries of records that all have one; several shards are read at a time.

        Raises UserError, naming the file, where one is damaged.
        """
        wanted: dict[int, list[tuple[int, int]]] = {}
        for record_id in record_ids:
            number, place = self._places[record_id]
            wanted.setdefault(number, []).append((record_id, place))
        parts = self._pool.map(self._read, wanted, wanted.values())
        return {record_id: content for part in parts for record_id, content in part}

    def close(self) -> None:
        """End the threads and close the files."""
        self._pool.shutdown()
        self._reader.cache_clear()

    def _read(self, number: int, wanted: list[tuple[int, int]]) -> list[tuple[int, bytes]]:
        try:
            contents = self._reader(number).read([place for _, place in wanted])
        except (RuntimeError, ValueError, IndexError) as error:
            raise damaged(shard_file(self._directory, number, ENTRIES), str(error)) from error
        return [(record_id, content) for (record_id, _), content in zip(wanted, contents, strict=True)]

    def _open(self, number: int) -> array_record_module.ArrayRecordReader:
        file = shard_file(self._directory, number, ENTRIES)
        # What lies behind an entry in the file is not what is read next.
        return array_record_module.ArrayRecordReader(str(file), "readahead_buffer_size:0")


def damaged(file: pathlib.Path, what: str) -> UserError:
    """The error of a file that is not as it was written."""
    return UserError(f"{file} is damaged: {what}. Delete it; the features in it will be computed again.")


def remove_unfinished(directory: pathlib.Path) -> None:
    """Remove what is not half of a whole shard. Only for the process that may write to the folder."""
    for file in directory.glob("features-*"):
        pair = (file.with_suffix(ENTRIES), file.with_suffix(INDEX))
        if file not in pair or not all(part.exists() for part in pair):
            file.unlink()


class ShardWriter:
    """Appends entries to shards, in a thread of its own, beginning with shard `number`.

    finished: told, in that thread, the number of each shard that is whole. fault: why nothing is written any more
    (a full disk, ...), "" while all is well; entries that were not in a whole shard by then are lost.
    """

    def __init__(self, directory: pathlib.Path, *, number: int, finished: Callable[[int], object]):
        self._directory, self._number, self._finished = directory, number, finished
        self._queue: collections.deque[tuple[int, bytes] | None] = collections.deque()  # None: end the shard
        self._queued_bytes, self._closing = 0, False
        self._changed = threading.Condition()
        self._shard: _OpenShard | None = None
        self.fault = ""
        self._thread = threading.Thread(target=self._work, name="feature writer", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether `put` would not have to wait."""
        return self._queued_bytes < QUEUE_BYTES

    def put(self, record_id: int, content: bytes) -> None:
        """Queue an entry as soon as there is room; without effect after a fault."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room or self.fault)
            if not self.fault:
                self._queue.append((record_id, content))
                self._queued_bytes += len(content)
                self._changed.notify_all()

    def end_shard(self) -> None:
        """End the shard after what is queued, so that all of it can be read soon."""
        with self._changed:
            self._queue.append(None)
            self._changed.notify_all()

    def close(self) -> None:
        """Write what is queued, then end the shard and the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        try:
            for item in self._items():
                if item is None:
                    self._finish()
                    continue
                if self._shard is None:
                    self._shard = _OpenShard(self._directory, self._number)
                self._shard.append(*item)
                if self._shard.size >= SHARD_BYTES:
                    self._finish()
            self._finish()
        except (OSError, RuntimeError) as error:  # all that ArrayRecord's writer raises is RuntimeError
            if self._shard is not None:
                self._shard.abandon()
            with self._changed:
                self.fault = str(error)
                self._queue.clear()
                self._queued_bytes = 0
                self._changed.notify_all()

    def _items(self) -> Iterator[tuple[int, bytes] | None]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                item = self._queue.popleft()
                self._queued_bytes -= len(item[1]) if item else 0
                self._changed.notify_all()
            yield item

    def _finish(self) -> None:
        if self._shard is not None:
            self._shard.finish()
            self._shard = None
            self._finished(self._number)
            self._number += 1


class _OpenShard:
    """A shard that is being written."""

    def __init__(self, directory: pathlib.Path, number: int):
        self._entries = shard_file(directory, number, ENTRIES)
        self._records: list[int] = []
        self.size = 0
        # TRAP: only group_size 1 gives random access to single entries without decoding their neighbours.
        self._writer = array_record_module.ArrayRecordWriter(str(self._entries), "group_size:1,uncompressed")

    def append(self, record_id: int, content: bytes) -> None:
        self._writer.write(content)
        self._records.append(record_id)
        self.size += len(content)

    def finish(self) -> None:
        self._writer.close()
        with self._entries.open("rb") as written:
            os.fsync(written.fileno())  # or the index might outlive it when the machine goes down
        content = json.dumps({"records": self._records, "bytes": self._entries.stat().st_size})
        unfinished = self._entries.with_suffix(UNFINISHED)
        unfinished.write_text(content)
        unfinished.rename(self._entries.with_suffix(INDEX))

    def abandon(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # it says once more what went wrong
            self._writer.close()
        for suffix in (UNFINISHED, ENTRIES):
            self._entries.with_suffix(suffix).unlink(missing_ok=True)
