"""Tokenised conversations on disk: a folder of ArrayRecord files, the shards, and what is known about them.

    records-00000.arrayrecord, ...    record i: n_i tokens as little-endian int32, then the loss mask, one bit a
                                      token, first token in the lowest bit, ceil(n_i / 8) bytes; i counts on from
                                      shard to shard, and a shard without records has no file
    lengths.npy                       [records] int32, the n_i
    token_counts.npy                  [2, highest id + 1] int64: how often each token occurs, and how often where
                                      it is supervised
    unused.jsonl                      a line for each row of the source files that gave no record: {"file": ...,
                                      "row": ..., "reason": ..., "detail": ...}, in the order of the files
    manifest.json                     "format", "records", "tokens", "supervised" (tokens), "lengths" (their mean,
                                      percentiles and maximum), "shards", "digest", and how the records were made

A shard's digest is the sha256 over n_i (little-endian int32) and record i, for its i in order; the folder's is the
sha256 over the digests of its shards, as they stand in the manifest.
"""

import bisect
import hashlib
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from array_record.python import (
    array_record_data_source,
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]  # a C++ module
)

from dflash_jax.chat.chat import Encoded
from dflash_jax.errors import UserError

FORMAT = 2  # goes up when a folder of an older one could be misread
LENGTHS, COUNTS, UNUSED, MANIFEST = "lengths.npy", "token_counts.npy", "unused.jsonl", "manifest.json"
PERCENTILES = (50, 90, 99)

# TRAP: only group_size 1 gives random access to single records without decoding their neighbours. Snappy: one
# process writes what all workers make, 41 M tokens a second so; zstd takes 17 % less disk, but stops at 16 M.
WRITING = "group_size:1,snappy"


def shard_name(index: int) -> str:
    return f"records-{index:05d}.arrayrecord"


def pack(row: Encoded) -> bytes:
    """The bytes of a record."""
    if row.tokens.shape != row.loss_mask.shape:
        raise ValueError(f"tokens have shape {row.tokens.shape}, loss_mask {row.loss_mask.shape}")
    return row.tokens.astype("<i4").tobytes() + np.packbits(row.loss_mask, bitorder="little").tobytes()


def packed_size(tokens: int) -> int:
    """Bytes of a record of so many tokens."""
    return 4 * tokens + (tokens + 7) // 8


class ShardWriter:
    """Writes records to one file, which is complete when `close` has returned.

    Raises RuntimeError when the disk refuses.
    """

    def __init__(self, file: pathlib.Path):
        self._file, self._digest = file, hashlib.sha256()
        self._writer: Any | None = None

    def write(self, records: bytes, *, lengths: Sequence[int]) -> None:
        """Append packed records that follow each other; lengths: their tokens."""
        if not lengths:
            return
        writer = self._writer or array_record_module.ArrayRecordWriter(str(self._file), WRITING)
        self._writer, start = writer, 0
        for length in lengths:
            record = records[start : start + packed_size(length)]
            self._digest.update(np.array(length, "<i4").tobytes())
            self._digest.update(record)
            writer.write(record)
            start += len(record)

    def close(self) -> str:
        """Finish the file, if there were records for one; their digest in hex."""
        if self._writer is not None:
            self._writer.close()
        return self._digest.hexdigest()


def write_index(
    directory: pathlib.Path,
    *,
    lengths: np.ndarray,
    counts: np.ndarray,
    shards: Sequence[dict[str, Any]],
    manifest: dict[str, Any],
) -> None:
    """Write what stands beside the shards; unused.jsonl is the caller's.

    lengths: [records], at least one; counts: as in token_counts.npy; shards: {"file", "records", "digest"} of each
    file in order; manifest: entries about how the records were made.
    """
    np.save(directory / LENGTHS, lengths)
    np.save(directory / COUNTS, counts)
    every, supervised = (int(total) for total in counts.sum(axis=1))
    # Lengths that occur, not means of two.
    percentiles = np.percentile(lengths, PERCENTILES, method="inverted_cdf").tolist()
    spread = {f"p{percent}": int(length) for percent, length in zip(PERCENTILES, percentiles, strict=True)}
    totals = {
        "format": FORMAT,
        "records": len(lengths),
        "tokens": every,
        "supervised": supervised,
        "lengths": {"mean": round(every / len(lengths), 1), **spread, "max": int(lengths.max())},
        "shards": list(shards),
        "digest": hashlib.sha256("".join(shard["digest"] for shard in shards).encode()).hexdigest(),
    }
    content = json.dumps(totals | manifest, indent=2, ensure_ascii=False) + "\n"
    (directory / MANIFEST).write_text(content, encoding="utf-8", errors="backslashreplace")


class Records:
    """A folder of records, opened for random access: `records[i]` is an Encoded. Safe to read from threads.

    lengths: [records] int32; manifest: the entries of manifest.json; digest: hex, as recorded when written.
    """

    def __init__(self, directory: pathlib.Path, *, lengths: np.ndarray, manifest: dict[str, Any]):
        self.directory, self.lengths, self.manifest = directory, lengths, manifest
        self._shards = [_open_shard(directory / shard["file"], shard["records"]) for shard in manifest["shards"]]
        self._ends = list(itertools.accumulate(map(len, self._shards)))

    @classmethod
    def open(cls, directory: str | pathlib.Path) -> "Records":
        """Raises UserError when a file is missing or unreadable, of another format, or disagrees with another."""
        directory = pathlib.Path(directory)
        _refuse_missing(directory, [MANIFEST])
        manifest = _read_manifest(directory / MANIFEST)
        try:
            _refuse_missing(directory, [LENGTHS, COUNTS, UNUSED, *(shard["file"] for shard in manifest["shards"])])
            said = (manifest["records"], manifest["tokens"])
            lengths = _load(directory / LENGTHS)
            records = cls(directory, lengths=lengths, manifest=manifest)
            is_named = isinstance(records.digest, str)
        except (KeyError, TypeError) as fault:
            raise _damaged(directory / MANIFEST, f"{type(fault).__name__} {fault}") from fault
        found = (len(lengths), int(lengths.sum(dtype=np.int64)))
        if found != said:
            what = f"it holds {found[0]} lengths of {found[1]} tokens, {MANIFEST} says {said[0]} of {said[1]}"
            raise _damaged(directory / LENGTHS, what)
        if records._ends[-1:] != [len(lengths)] or not is_named:
            raise _damaged(directory / MANIFEST, "its shards do not hold as many records as it says, or no digest")
        return records

    @property
    def digest(self) -> str:
        return self.manifest["digest"]

    def token_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """[highest id + 1] int64, twice: occurrences of each token in all, and where it is supervised."""
        every, supervised = _load(self.directory / COUNTS)
        return every, supervised

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, record_id: int) -> Encoded:
        if not 0 <= record_id < len(self):
            raise IndexError(f"record {record_id} of {len(self)}")
        length = int(self.lengths[record_id])
        shard = bisect.bisect_right(self._ends, record_id)
        file = self.directory / self.manifest["shards"][shard]["file"]
        try:
            raw = self._shards[shard][int(record_id) - (self._ends[shard - 1] if shard else 0)]
        except RuntimeError as fault:
            raise _damaged(file, f"record {record_id} is unreadable: {fault}") from fault
        if len(raw) != packed_size(length):
            raise _damaged(file, f"record {record_id} has {len(raw)} bytes for {length} tokens")
        bits = np.frombuffer(raw, np.uint8, offset=4 * length)
        return Encoded(
            np.frombuffer(raw, "<i4", count=length).astype(np.int32),
            np.unpackbits(bits, count=length, bitorder="little").astype(bool),
        )


def _open_shard(file: pathlib.Path, records: int) -> array_record_data_source.ArrayRecordDataSource:
    try:
        shard = array_record_data_source.ArrayRecordDataSource([str(file)])
    except (ValueError, RuntimeError) as fault:
        raise _damaged(file, f"{type(fault).__name__} {fault}") from fault
    if len(shard) != records:
        raise _damaged(file, f"it holds {len(shard)} records, {MANIFEST} says {records}")
    return shard


def _read_manifest(file: pathlib.Path) -> dict[str, Any]:
    try:
        manifest = json.loads(file.read_text("utf-8"))
    except ValueError as fault:
        raise _damaged(file, str(fault)) from fault
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise UserError(
            f"{file}: records of format {found}, and this version reads format {FORMAT}; "
            "prepare the data again into a fresh folder."
        )
    return manifest


def _load(file: pathlib.Path) -> np.ndarray:
    try:
        return np.load(file)
    except (ValueError, EOFError, OSError) as fault:
        raise _damaged(file, f"{type(fault).__name__} {fault}") from fault


def _refuse_missing(directory: pathlib.Path, names: Sequence[str]) -> None:
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise UserError(f"{directory} lacks {', '.join(missing)}; prepare the data again into a fresh folder.")


def _damaged(file: pathlib.Path, what: str) -> UserError:
    return UserError(f"{file} is damaged: {what}. Prepare the data again into a fresh folder.")
