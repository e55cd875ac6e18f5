"""Length buckets: which static shape a record is padded to, and how many rows a batch of it has.

Edges e_1 < .. < e_n (e_0 = 0): a record of length n is in bucket b when e_b < n <= e_(b+1), and is padded to
e_(b+1). A bucket's rows are floor(tokens_per_batch / e_(b+1)), rounded down to a multiple of the data axis.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from dflash_jax.errors import UserError


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


def rows_per_batch(edges: Sequence[int], *, tokens_per_batch: int, data_axis: int) -> tuple[int, ...]:
    """Rows of a batch, for each bucket. data_axis: devices over which the target mesh splits the rows.

    Raises UserError when the budget leaves a bucket without a row.
    """
    rows = tuple(tokens_per_batch // edge // data_axis * data_axis for edge in _checked(edges))
    if 0 in rows:
        edge = edges[rows.index(0)]
        raise UserError(
            f"data.tokens_per_batch={tokens_per_batch} leaves no row for the bucket of {edge} tokens "
            f"on a data axis of {data_axis}; it takes at least {edge * data_axis}, or lower edges."
        )
    return rows


def _checked(edges: Sequence[int]) -> Sequence[int]:
    if not len(edges) or edges[0] <= 0 or any(a >= b for a, b in itertools.pairwise(edges)):
        raise UserError(f"data.buckets must be positive and strictly increasing; found {list(edges)}.")
    return edges
