"""Row lengths of buckets that waste the least: exact, by dynamic programming over the lengths of the data.

    best(k, e) = min over e' < e of  best(k - 1, e') + cost(e', e)
    cost(e', e) = batches * rows(e) * e,   batches = ceil(records with e' < length <= e / rows(e))

cost is what the batches of a bucket hold in tokens, padding, empty rows of its last batch and the rounding of rows
included. Every multiple of `multiple` is tried as an edge, not only lengths that occur: a longer edge with
fewer rows can waste less in the last batch.
"""

from collections.abc import Callable

import numpy as np

from dflash_jax.errors import UserError


def best_edges(
    lengths: np.ndarray, count: int, *, tokens_per_batch: int, row_multiple: int, multiple: int
) -> tuple[int, ...]:
    """At most `count` edges whose buckets hold all records in the fewest tokens; ascending.

    lengths: [records] int, all positive; row_multiple: rows of a batch are a multiple of it; multiple: so is each
    edge. Raises UserError when the longest record leaves no row.
    """
    longest = -(-int(lengths.max()) // multiple) * multiple
    highest = tokens_per_batch // row_multiple // multiple * multiple
    if longest > highest:
        raise UserError(
            f"data.tokens_per_batch={tokens_per_batch} leaves no row for the longest record, {lengths.max()} "
            f"tokens on {row_multiple} row shards; it takes at least {longest * row_multiple}, or a lower "
            "data.max_length."
        )

    def rows_of(edges: np.ndarray) -> np.ndarray:
        return tokens_per_batch // np.maximum(edges, 1) // row_multiple * row_multiple

    edges = np.concatenate([np.arange(0, longest + 1, multiple), _wider(longest, highest, multiple, rows_of)])
    rows = rows_of(edges)
    below = np.searchsorted(np.sort(lengths), edges, side="right")  # records that fit edge e
    last = np.searchsorted(edges, longest)
    best = np.full((count + 1, last + 1), np.inf)
    best[0, 0] = 0.0
    chosen = np.zeros((count + 1, len(edges)), np.int64)
    ends = np.full((count + 1, len(edges)), np.inf)  # as `best`, for edges past the longest record too
    for index in range(1, len(edges)):
        start = np.arange(min(index, last + 1))
        batches = -(-(below[index] - below[start]) // rows[index])
        totals = best[:-1, : len(start)] + batches * (rows[index] * edges[index])
        chosen[1:, index] = totals.argmin(axis=1)
        ends[1:, index] = totals.min(axis=1)
        if index <= last:
            best[1:, index] = ends[1:, index]
    finals = ends[:, last:]
    used, index = np.unravel_index(finals.argmin(), finals.shape)
    index += last
    found = []
    while used:
        found.append(int(edges[index]))
        index, used = chosen[used, index], used - 1
    return tuple(reversed(found))


def _wider(longest: int, highest: int, multiple: int, rows: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Edges past the longest record that may still waste less: the narrowest for each smaller number of rows."""
    edges = np.arange(longest, highest + 1, multiple)
    return edges[1:][np.diff(rows(edges)) != 0]
