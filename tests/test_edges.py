"""Edges that waste the least, against all sets of edges there are, and against hand-made ones on real shapes."""

import itertools

import numpy as np
import pytest

from dflash_jax.batches.edges import best_edges
from dflash_jax.errors import UserError


def held(lengths, edges, *, tokens_per_batch, row_multiple):
    """Tokens that the batches of these buckets hold, padding and empty rows included; counted one by one."""
    total = 0
    for low, high in itertools.pairwise((0, *edges)):
        rows = tokens_per_batch // high // row_multiple * row_multiple
        if rows == 0:
            return np.inf
        records = sum(low < length <= high for length in lengths)
        total += -(-records // rows) * rows * high
    return total


@pytest.mark.parametrize("seed", range(60))
def test_no_set_of_edges_is_better(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, rng.integers(3, 12), rng.integers(1, 40))
    count, row_multiple, multiple = (int(rng.integers(1, high)) for high in (4, 3, 3))
    least = -(-lengths.max() // multiple) * multiple * row_multiple
    tokens_per_batch = int(least + rng.integers(0, 30))
    shape = {"tokens_per_batch": tokens_per_batch, "row_multiple": row_multiple}
    edges = best_edges(lengths, count, multiple=multiple, **shape)
    assert len(edges) <= count
    assert all(edge % multiple == 0 for edge in edges)
    allowed = range(multiple, tokens_per_batch // row_multiple + 1, multiple)
    sets = (chosen for size in range(1, count + 1) for chosen in itertools.combinations(allowed, size))
    best = min(held(lengths, chosen, **shape) for chosen in sets if chosen[-1] >= lengths.max())
    assert held(lengths, edges, **shape) == best


def test_no_hand_given_edges_are_better_on_a_long_tailed_population():
    rng = np.random.default_rng(1)
    lengths = np.clip(np.exp(rng.normal(7.4, 0.8, 3000)), 1, 8192).astype(int)
    shape = {"tokens_per_batch": 49152, "row_multiple": 6}
    best = held(lengths, best_edges(lengths, 6, multiple=1, **shape), **shape)
    quantiles = [*np.quantile(lengths, np.arange(1, 6) / 6).astype(int), 8192]
    for edges in (
        (770, 1216, 1728, 2432, 3296, 8192),
        (512, 1024, 2048, 3072, 4096, 8192),
        quantiles,
        *(sorted({*rng.integers(64, 8192, 5), 8192}) for _ in range(50)),
    ):
        assert best <= held(lengths, edges, **shape)


def test_a_single_length_needs_one_edge():
    assert best_edges(np.full(12, 30), 5, tokens_per_batch=120, row_multiple=2, multiple=1) == (30,)
    # Seven records would leave one of eight rows of 30 tokens empty; of rows of 31 tokens there are only seven.
    assert best_edges(np.full(7, 30), 1, tokens_per_batch=240, row_multiple=1, multiple=1) == (31,)
    assert best_edges(np.full(7, 30), 1, tokens_per_batch=240, row_multiple=1, multiple=16) == (32,)


def test_a_budget_without_a_row_for_the_longest_record_is_refused():
    with pytest.raises(UserError, match=r"no row for the longest record, 90 tokens on 4 .* at least 384"):
        best_edges(np.array([5, 90]), 3, tokens_per_batch=300, row_multiple=4, multiple=32)
