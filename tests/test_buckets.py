"""Bucket borders, rows of a batch at the reference budget, and the faults of both."""

import numpy as np
import pytest

from dflash_jax.batches.buckets import bucket_of, fits, rows_per_batch
from dflash_jax.errors import UserError

EDGES = (770, 1216, 1728, 2432, 3296, 8192)


def test_a_length_on_an_edge_belongs_below_it():
    lengths = np.array([1, 770, 771, 1216, 1217, 3296, 3297, 8192], np.int32)
    assert bucket_of(lengths, EDGES).tolist() == [0, 0, 1, 1, 2, 4, 5, 5]


def test_lengths_without_a_bucket():
    lengths = np.array([0, 5, 8192, 8193, 9000], np.int32)
    assert fits(lengths, EDGES).tolist() == [False, True, True, False, False]
    with pytest.raises(UserError, match=r"2 records do not fit data.buckets, which end at 8192.* 8193 to 9000"):
        bucket_of(lengths[1:], EDGES)


def test_rows_at_the_reference_budget():
    assert rows_per_batch(EDGES, tokens_per_batch=49152, row_multiple=1) == (63, 40, 28, 20, 14, 6)
    assert rows_per_batch(EDGES, tokens_per_batch=49152, row_multiple=6) == (60, 36, 24, 18, 12, 6)


def test_budget_that_is_too_small_is_named():
    with pytest.raises(UserError, match=r"data.tokens_per_batch=49152 .* 8192 tokens .* multiples of 8; .* 65536"):
        rows_per_batch(EDGES, tokens_per_batch=49152, row_multiple=8)


@pytest.mark.parametrize("edges", [(), (0, 5), (5, 5), (8, 4)])
def test_edges_must_increase(edges):
    with pytest.raises(UserError, match=r"data\.buckets must be positive and strictly increasing"):
        fits(np.array([1]), edges)
