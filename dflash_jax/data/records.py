"""Tokenised conversations on disk: a folder with one ArrayRecord file, the lengths and a manifest.

    records-00000-of-00001.arrayrecord    record i: n_i tokens as little-endian int32, then the loss mask,
                                          one bit a token, first token in the lowest bit, ceil(n_i / 8) bytes
    lengths.npy                           [records] int32, the n_i
    token_counts.npy                      [2, highest id + 1] int64: how often each token occurs, and how
                                          often where it is supervised
    manifest.json                         the caller's entries and "records", "tokens", "digest"

The digest is the sha256 over n_i (little-endian int32) and record i, for all i in order.
"""

import hashlib
import json
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np
from array_record.python import (
    array_record_data_source,
    array_record_module,  # pyright: ignore[reportAttributeAccessIssue]  # a C++ module
)

from dflash_jax.data.chat import Encoded
from dflash_jax.errors import UserError

RECORDS, LENGTHS, MANIFEST = "records-00000-of-00001.arrayrecord", "lengths.npy", "manifest.json"
COUNTS = "token_counts.npy"


def write_records(directory: str | pathlib.Path, rows: Iterable[Encoded], *, manifest: dict[str, Any]) -> None:
    """Write the rows to a folder that appears whole or not at all.

    manifest: JSON entries to keep beside the records (source files, tokenizer, ...).
    Raises UserError when the folder exists already or there is no row.
    """
    directory = pathlib.Path(directory)
    if directory.exists():
        raise UserError(f"{directory} exists already; delete it or write to another folder.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        written = pathlib.Path(scratch) / "records"
        written.mkdir()
        lengths, counts, digest = _write_array_record(written / RECORDS, rows)
        if not len(lengths):
            raise UserError(f"There are no records to write to {directory}; check the conversations and filters.")
        np.save(written / LENGTHS, lengths)
        np.save(written / COUNTS, counts)
        totals = {"records": len(lengths), "tokens": int(lengths.sum(dtype=np.int64)), "digest": digest}
        (written / MANIFEST).write_text(json.dumps(manifest | totals, indent=2) + "\n")
        written.rename(directory)


def _write_array_record(path: pathlib.Path, rows: Iterable[Encoded]) -> tuple[np.ndarray, np.ndarray, str]:
    lengths, digest = [], hashlib.sha256()
    counts = np.zeros((2, 1), np.int64)
    # TRAP: only group_size 1 gives random access to single records without decoding their neighbours.
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    try:
        for row in rows:
            record = _pack(row)
            digest.update(np.array(len(row.tokens), "<i4").tobytes())
            digest.update(record)
            writer.write(record)
            lengths.append(len(row.tokens))
            counts = _add_counts(counts, row)
    finally:
        writer.close()
    return np.array(lengths, np.int32), counts, digest.hexdigest()


def _add_counts(counts: np.ndarray, row: Encoded) -> np.ndarray:
    highest = int(row.tokens.max(initial=0))
    if highest >= counts.shape[1]:
        counts = np.pad(counts, ((0, 0), (0, highest + 1 - counts.shape[1])))
    for line, tokens in zip(counts, (row.tokens, row.tokens[row.loss_mask]), strict=True):
        np.add.at(line, tokens, 1)
    return counts


def _pack(row: Encoded) -> bytes:
    if row.tokens.shape != row.loss_mask.shape:
        raise ValueError(f"tokens have shape {row.tokens.shape}, loss_mask {row.loss_mask.shape}")
    return row.tokens.astype("<i4").tobytes() + np.packbits(row.loss_mask, bitorder="little").tobytes()


class Records:
    """A folder of records, opened for random access: `records[i]` is an Encoded. Safe to read from threads.

    lengths: [records] int32; manifest: the entries of manifest.json; digest: hex, as recorded when written.
    """

    def __init__(self, directory: pathlib.Path, *, lengths: np.ndarray, manifest: dict[str, Any]):
        self.directory, self.lengths, self.manifest = directory, lengths, manifest
        self._source = array_record_data_source.ArrayRecordDataSource([str(directory / RECORDS)])

    @classmethod
    def open(cls, directory: str | pathlib.Path) -> "Records":
        """Raises UserError when a file is missing or unreadable, or the files disagree about the count."""
        directory = pathlib.Path(directory)
        if missing := [name for name in (RECORDS, LENGTHS, COUNTS, MANIFEST) if not (directory / name).is_file()]:
            raise UserError(f"{directory} lacks {', '.join(missing)}; prepare the data again into a fresh folder.")
        try:
            manifest = json.loads((directory / MANIFEST).read_text())
            lengths = np.load(directory / LENGTHS)
            records = cls(directory, lengths=lengths, manifest=manifest)
            found = (
                len(records._source),
                len(lengths),
                int(lengths.sum(dtype=np.int64)),
                type(records.digest),
            )
            expected = (manifest["records"], manifest["records"], manifest["tokens"], str)
        except (ValueError, KeyError, TypeError, EOFError, OSError, RuntimeError) as fault:
            raise _damaged(directory, f"{type(fault).__name__} {fault}") from fault
        if found != expected:
            raise _damaged(
                directory,
                f"{RECORDS} holds {found[0]} records, {LENGTHS} {found[1]} lengths and {found[2]} tokens, "
                f"{MANIFEST} says {expected[0]} records and {expected[2]} tokens",
            )
        return records

    @property
    def digest(self) -> str:
        return self.manifest["digest"]

    def token_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """[highest id + 1] int64, twice: occurrences of each token in all, and where it is supervised."""
        every, supervised = np.load(self.directory / COUNTS)
        return every, supervised

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, record_id: int) -> Encoded:
        length = int(self.lengths[record_id])
        try:
            raw = self._source[int(record_id)]
        except RuntimeError as fault:
            raise _damaged(self.directory, f"record {record_id} is unreadable: {fault}") from fault
        if len(raw) != 4 * length + (length + 7) // 8:
            raise _damaged(self.directory, f"record {record_id} has {len(raw)} bytes for {length} tokens")
        bits = np.frombuffer(raw, np.uint8, offset=4 * length)
        return Encoded(
            np.frombuffer(raw, "<i4", count=length).astype(np.int32),
            np.unpackbits(bits, count=length, bitorder="little").astype(bool),
        )


def _damaged(directory: pathlib.Path, what: str) -> UserError:
    return UserError(f"{directory} is damaged: {what}. Prepare the data again into a fresh folder.")
