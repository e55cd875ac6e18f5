"""Rows of several records: every record once, none too many, and no two rows that would go into one."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.batches import packing
from dflash_jax.batches.packing import pack


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(50, 90), st.integers(0, 2**32))
def test_first_fit(lengths, row_length, seed):
    lengths = np.array(lengths)
    rows = pack(lengths, row_length, seed=seed)
    assert rows.dtype == np.int32
    assert sorted(rows[rows >= 0]) == list(range(len(lengths)))
    assert (np.diff((rows >= 0).astype(int), axis=1) <= 0).all(), "a gap between records"
    assert (rows[:, 0] >= 0).all(), "an empty row"
    assert (rows[:, -1] >= 0).any(), "a column that no row needs"
    used = [int(lengths[row[row >= 0]].sum()) for row in rows]
    assert max(used) <= row_length
    # A row is only opened for a record that no row before it has room for.
    assert all(a + b > row_length for a, b in itertools.combinations(used, 2))


def test_windows_waste_little(monkeypatch):
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.8, 6000), 1, 1000).astype(int)
    whole = pack(lengths, 1000, seed=1)
    monkeypatch.setattr(packing, "WINDOW", 500)
    in_windows = pack(lengths, 1000, seed=1)
    assert sorted(in_windows[in_windows >= 0]) == list(range(6000))
    assert len(whole) <= len(in_windows) <= 1.02 * len(whole)
    assert lengths.sum() / (1000 * len(whole)) > 0.98


def test_neighbours_depend_on_the_seed_alone():
    lengths = np.random.default_rng(0).integers(1, 30, 200)
    first = pack(lengths, 60, seed=3)
    np.testing.assert_array_equal(first, pack(lengths, 60, seed=3))
    other = pack(lengths, 60, seed=4)
    assert first.shape != other.shape or (first != other).any()


@pytest.mark.parametrize("length", [60, 1])
def test_rows_of_one_length(length):
    rows = pack(np.full(120, length), 60, seed=0)
    assert rows.shape == (120 * length // 60, 60 // length)
