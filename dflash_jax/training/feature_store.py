"""Target states of records on disk, as far as a bound on their size allows; what is there is never replaced.

    FOLDER/<first 16 digits of the address>/meta.json     what the states are of: `Content`
                                            lock          held by the process that may write; its id
                                            features-*    an entry for each record: features [n, T * E], then last
                                                          [n, E] where the objective compares with the target

The address is a sha256 over `Content`, so that no other target, taps or data can be taken for this one. States
keep the dtype in which the target computes (bfloat16 for a bfloat16 target, float32 for a float32 one): rounded
ones would train another drafter than computed ones do.
"""

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import pathlib
import sys
from collections.abc import Iterable
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from dflash_jax.errors import UserError
from dflash_jax.objective.objective import TargetStates
from dflash_jax.training.feature_shards import Shards, ShardWriter, damaged, remove_unfinished

META, LOCK = "meta.json", "lock"


@dataclasses.dataclass(frozen=True)
class Content:
    """What states are of. target, data: their digests; name: of the target, for people; dtype: of the states;
    features_width, last_width: channels of a token, T * E and E; last_width is 0 without last states."""

    target: str
    name: str
    dtype: str
    taps: tuple[int, ...]
    data: str
    features_width: int
    last_width: int

    @property
    def address(self) -> str:
        """A sha256 over everything but the name: a folder may be moved or renamed."""
        entries = {key: value for key, value in dataclasses.asdict(self).items() if key != "name"}
        return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()

    @property
    def token_bytes(self) -> int:
        """The size of a token's states."""
        return (self.features_width + self.last_width) * jnp.dtype(self.dtype).itemsize


class FeatureStore:
    """The states of a data set's records. Inside `with` it takes more, if there is room; before, it can be read.

    lengths: [records] tokens of every record; record_ids: those that take part; limit_bytes: of all states.
    patient: whether `keep` waits for the disk, and a disk that fails is an error. Otherwise a record that the disk
    has no time for is left to a later pass, and a disk that fails is a warning.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        content: Content,
        *,
        lengths: np.ndarray,
        record_ids: np.ndarray,
        limit_bytes: int,
        patient: bool,
    ):
        self.directory = folder / content.address[:16]
        self._content, self._lengths = content, lengths.astype(np.int64)
        self._sizes = self._lengths * content.token_bytes
        self._limit, self._patient = limit_bytes, patient
        self._all = {int(record_id) for record_id in record_ids}
        self._warned, self._lock = False, -1
        self._writer: ShardWriter | None = None
        self._load()

    def __enter__(self) -> Self:
        if not self._full:
            try:
                self._begin()
            except OSError as error:
                self.finish()
                raise UserError(f"data.features_dir: {self.directory} cannot be written ({error})") from None
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.finish()
        finally:
            self._shards.close()

    @property
    def complete(self) -> bool:
        """Whether the states of all records that take part can be read."""
        return self.holds(self._all)

    @property
    def record_counts(self) -> tuple[int, int]:
        """Records that take part: those whose states are on disk or on their way there, and all."""
        return len(self._all) - len(self._missing), len(self._all)

    @property
    def size_bytes(self) -> int:
        """What the states on disk, and those on their way to it, take."""
        return self._size

    @property
    def missing_bytes(self) -> int:
        """What the states that take part and are not there would take."""
        return int(self._sizes[sorted(self._missing)].sum())

    def holds(self, record_ids: Iterable[int]) -> bool:
        """Whether the states of all these records can be read."""
        return all(record_id in self._shards for record_id in record_ids)

    def read(self, record_ids: Iterable[int]) -> dict[int, TargetStates]:
        """The states of records that are all held: read-only arrays [n, ..] of the target's dtype.

        Raises UserError, naming the file, where one is damaged.
        """
        return {
            record_id: self._unpacked(record_id, entry)
            for record_id, entry in self._shards.read(record_ids).items()
        }

    def wants(self, record_id: int) -> bool:
        """Whether `keep` would take the record's states now."""
        writer = self._writer
        if writer is None or self._full or self._failed() or record_id not in self._missing:
            return False
        return self._patient or writer.has_room

    def keep(self, record_id: int, states: TargetStates) -> None:
        """Send the states of a wanted record, host arrays [n, ..], on their way to the disk."""
        assert self._writer is not None
        size = int(self._sizes[record_id])
        if self._size + size > self._limit:
            self._full = True
            self._writer.end_shard()
            return
        parts = [states.features] if states.last is None else list(states)
        entry = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
        if len(entry) != size:
            raise ValueError(f"record {record_id}: {len(entry)} bytes of states, expected {size}")
        self._writer.put(record_id, entry)
        self._missing.discard(record_id)
        self._size += size
        if not self._missing:
            self._writer.end_shard()

    def finish(self) -> None:
        """Wait until all that was kept can be read, and let other processes write."""
        try:
            if self._writer is not None:
                self._writer.close()
                self._failed()
        finally:
            self._writer = None
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def _load(self) -> None:
        self._shards = Shards.open(self.directory)
        held = self._shards.record_ids
        if outside := [record_id for record_id in held if not 0 <= record_id < len(self._sizes)]:
            raise damaged(self._shards.file_of(outside[0]), f"there is no record {outside[0]} in the data")
        self._size = int(self._sizes[sorted(held)].sum())
        self._missing = self._all - held
        smallest = min((int(self._sizes[record_id]) for record_id in self._missing), default=math.inf)
        self._full = self._size + smallest > self._limit  # as it is where nothing is missing

    def _begin(self) -> None:
        """Become the only process that writes, and begin where the last one has ended."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.directory / LOCK)
        remove_unfinished(self.directory)
        meta = self.directory / META
        meta.write_text(
            json.dumps(dataclasses.asdict(self._content) | {"address": self._content.address}, indent=2)
        )
        self._shards.close()
        self._load()  # another process may have written until a moment ago
        self._writer = ShardWriter(self.directory, number=self._shards.next_number, finished=self._shards.add)

    def _failed(self) -> bool:
        """Whether the disk failed; says so once."""
        fault = self._writer.fault if self._writer is not None else ""
        if not fault:
            return False
        if self._patient:
            raise UserError(
                f"features cannot be written to {self.directory}: {fault}. Make room there, and the same command "
                "continues with those that are written; or set data.features=hybrid to do without the rest."
            )
        if not self._warned:
            message = f"warning: no more features are kept in {self.directory}: {fault}. Training goes on."
            print(message, file=sys.stderr, flush=True)
            self._warned = True
        return True

    def _unpacked(self, record_id: int, entry: bytes) -> TargetStates:
        content = self._content
        if len(entry) != self._sizes[record_id]:
            found = f"record {record_id} has {len(entry)} bytes, expected {self._sizes[record_id]}"
            raise damaged(self._shards.file_of(record_id), found)
        values: Any = np.frombuffer(entry, jnp.dtype(content.dtype))  # numpy, where training has jax
        features = self._lengths[record_id] * content.features_width
        return TargetStates(
            values[:features].reshape(-1, content.features_width),
            values[features:].reshape(-1, content.last_width) if content.last_width else None,
        )


def _locked(file: pathlib.Path) -> int:
    """The open lock file, locked; the system unlocks it when this process ends, however it ends."""
    opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(opened, 32).decode().strip()
        os.close(opened)
        raise UserError(
            f"features in {file.parent} are being written by process {holder}; wait for it, or choose another "
            "data.features_dir, or data.features=online"
        ) from None
    except OSError as error:
        os.close(opened)
        raise UserError(
            f"data.features_dir: {file.parent} has no file locks ({error}); choose a folder on another file system"
        ) from None
    os.ftruncate(opened, 0)
    os.write(opened, f"{os.getpid()}\n".encode())
    return opened
