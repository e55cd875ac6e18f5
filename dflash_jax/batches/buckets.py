"""Length buckets: which static shape a record is padded to, and how many rows a batch of it has.

Edges e_1 < .. < e_n (e_0 = 0): a record of length n is in bucket b when e_b < n <= e_(b+1), and is padded to
e_(b+1). A bucket's rows are floor(tokens_per_batch / e_(b+1)), rounded down to a multiple of the
meshes' row shards.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_jax.batches.edges import best_edges
from dflash_jax.errors import UserError

AUTO = "auto:"
MOST = 64  # buckets; each is a compilation of every program


def parse_buckets(value: Any) -> tuple[int, ...] | int:
    """What data.buckets says: edges, or how many are to be found. Raises UserError for anything else."""
    if isinstance(value, str) and value.startswith(AUTO):
        number = value.removeprefix(AUTO)
        if number.isdecimal() and 1 <= int(number) <= MOST:
            return int(number)
    if isinstance(value, list) and all(type(edge) is int for edge in value):
        return tuple(_checked(value))
    raise UserError(
        f"data.buckets: found {value!r}, allowed: increasing row lengths such as [512,1024,2048], or {AUTO}N with "
        f"N from 1 to {MOST}"
    )


def choose_edges(
    buckets: tuple[int, ...] | int,
    lengths: np.ndarray,
    *,
    tokens_per_batch: int,
    row_multiple: int,
    pad_multiple: int,
) -> tuple[int, ...]:
    """The given edges rounded up to multiples of pad_multiple, or so many best ones for the lengths [records]."""
    if isinstance(buckets, int):
        return best_edges(
            lengths,
            buckets,
            tokens_per_batch=tokens_per_batch,
            row_multiple=row_multiple,
            multiple=pad_multiple,
        )
    return tuple(sorted({-(-edge // pad_multiple) * pad_multiple for edge in buckets}))


def fits(lengths: np.ndarray, edges: Sequence[int]) -> np.ndarray:
    """[records] bool: True where a record has a bucket (neither empty nor above the last edge)."""
    return (lengths > 0) & (lengths <= _checked(edges)[-1])


def bucket_of(lengths: np.ndarray, edges: Sequence[int]) -> np.ndarray:
    """[records] int32: each record's bucket. Raises UserError when a record has none."""
    outside = lengths[~fits(lengths, edges)]
    if len(outside):
        raise UserError(
            f"{len(outside)} records do not fit data.buckets, which end at {edges[-1]}: their lengths run from "
            f"{outside.min()} to {outside.max()} tokens. Add a bucket, or leave these records out."
        )
    return np.searchsorted(edges, lengths, side="left").astype(np.int32)


def rows_per_batch(edges: Sequence[int], *, tokens_per_batch: int, row_multiple: int) -> tuple[int, ...]:
    """Rows of a batch, for each bucket. row_multiple: they are rounded down to a multiple of it.

    Raises UserError when the budget leaves a bucket without a row.
    """
    rows = tuple(tokens_per_batch // edge // row_multiple * row_multiple for edge in _checked(edges))
    if 0 in rows:
        edge = edges[rows.index(0)]
        raise UserError(
            f"data.tokens_per_batch={tokens_per_batch} leaves no row for the bucket of {edge} tokens "
            f"in multiples of {row_multiple}; it takes at least {edge * row_multiple}, or lower edges."
        )
    return rows


def _checked(edges: Sequence[int]) -> Sequence[int]:
    if not len(edges) or edges[0] <= 0 or any(a >= b for a, b in itertools.pairwise(edges)):
        raise UserError(f"data.buckets must be positive and strictly increasing; found {list(edges)}.")
    return edges
