"""One part of the source files -> its records as bytes, and a tally of what became of its rows.

This is what a worker process computes. A tally of parts is the sum of their tallies, so that shards and whole
folders are tallied alike.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dflash_jax.chat.chat import Answers, Chat, Encoded
from dflash_jax.data.origin import Preparation
from dflash_jax.data.records import pack
from dflash_jax.sources.conversations import TokenRow, parse_row
from dflash_jax.sources.files import Part, rows_of
from dflash_jax.sources.unused import UnusedRow


@dataclasses.dataclass(frozen=True, eq=False)
class Tally:
    """What rows became.

    lengths: [records] int32; counts: [2, highest id + 1] int64, occurrences of tokens, in all and supervised.
    rows: rows by source file (its index); notes: how often Chat.encode noted what; unused: (file, row, reason,
    detail) of each row that gave no record; split, cut: conversations that became several records or were cut.
    """

    lengths: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    counts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((2, 0), np.int64))
    rows: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unused: list[tuple[int, int, str, str]] = dataclasses.field(default_factory=list)
    split: int = 0
    cut: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        width = max(self.counts.shape[1], other.counts.shape[1])
        return Tally(
            np.concatenate([self.lengths, other.lengths]),
            _widened(self.counts, width) + _widened(other.counts, width),
            self.rows + other.rows,
            self.notes + other.notes,
            self.unused + other.unused,
            self.split + other.split,
            self.cut + other.cut,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class PackedPart:
    """content: the part's records one after another, as `records.pack` makes them. index: the part's."""

    index: int
    content: bytes
    tally: Tally


def pack_part(part: Part, *, chat: Chat, preparation: Preparation) -> PackedPart:
    """Encode the rows of a part. A row that cannot be used is in the tally; whatever else goes wrong is a bug."""
    encoded: list[Encoded] = []
    unused, notes, rows, split, cut = [], collections.Counter[str](), 0, 0, 0
    for number, answers in encode_rows(part, chat=chat, preparation=preparation):
        rows += 1
        if isinstance(answers, UnusedRow):
            unused.append((part.file, number, answers.reason, answers.detail))
            continue
        encoded += answers.records
        split += answers.split
        cut += answers.cut
        notes.update(answers.notes)
    lengths = np.array([len(row.tokens) for row in encoded], np.int32)
    by_file = collections.Counter({part.file: rows})
    tally = Tally(lengths, token_counts(encoded), by_file, notes, unused, split, cut)
    return PackedPart(part.index, b"".join(map(pack, encoded)), tally)


def encode_rows(part: Part, *, chat: Chat, preparation: Preparation) -> Iterator[tuple[int, Answers | UnusedRow]]:
    """(row number, its records or why there are none) of each row, in order."""
    for number, row in rows_of(part):
        try:
            answers = row if isinstance(row, UnusedRow) else _encode(row, chat=chat, preparation=preparation)
        except UnusedRow as unused:
            answers = unused
        yield number, answers


def _encode(row: dict[str, Any], *, chat: Chat, preparation: Preparation) -> Answers:
    parsed = parse_row(row)
    if isinstance(parsed, TokenRow):
        return _checked(parsed, vocab=chat.vocab, max_length=preparation.max_length)
    return chat.encode(parsed, **preparation.options)


def _checked(row: TokenRow, *, vocab: int, max_length: int | None) -> Answers:
    """A row that came as tokens is taken as it is, or not at all: nobody can tell where it could be cut."""
    if outside := row.tokens[(row.tokens < 0) | (row.tokens >= vocab)].tolist():
        raise UnusedRow(
            "bad tokens", f"token {outside[0]}, but the target's tokenizer has 0 to {vocab - 1}; tokenise for it"
        )
    if max_length is not None and len(row.tokens) > max_length:
        raise UnusedRow("too long", f"{len(row.tokens)} tokens, at most {max_length}; raise max_length")
    record = Encoded(row.tokens, row.loss_mask)
    if not record.has_anchor():
        raise UnusedRow("no anchor", f"{int(row.loss_mask.sum())} trained tokens, none right after another")
    return Answers(records=(record,), split=False, cut=False, notes=())


def token_counts(rows: Sequence[Encoded]) -> np.ndarray:
    """[2, highest id + 1] int64: occurrences of each token, in all and where it is supervised."""
    if not rows:
        return np.zeros((2, 0), np.int64)
    tokens = np.concatenate([row.tokens for row in rows])
    supervised = tokens[np.concatenate([row.loss_mask for row in rows])]
    width = int(tokens.max(initial=-1)) + 1
    return np.stack([np.bincount(tokens, minlength=width), np.bincount(supervised, minlength=width)])


def _widened(counts: np.ndarray, width: int) -> np.ndarray:
    return np.pad(counts, ((0, 0), (0, width - counts.shape[1])))
