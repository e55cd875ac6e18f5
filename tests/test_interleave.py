"""How buckets take turns: counts, the shortest runs that a mix allows, even spread, a common end."""

import itertools

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_jax.batches.interleave import interleave, longest_runs

COUNTS = st.lists(st.integers(0, 120), min_size=1, max_size=8).filter(any)


def runs_of(order) -> int:
    return max(len(list(group)) for _, group in itertools.groupby(order))


@settings(deadline=None, max_examples=300)
@given(COUNTS, st.integers(0, 2**32))
@example([0, 7], 0)
@example([5, 11], 0)  # 2 (5 + 1) - 1: pairs everywhere but at one place
@example([5, 12], 0)
@example([5, 13], 0)
def test_no_run_is_longer_than_the_mix_demands(counts, seed):
    order = interleave(counts, np.random.default_rng(seed))
    assert np.bincount(order, minlength=len(counts)).tolist() == counts
    largest, others = max(counts), sum(counts) - max(counts)
    # The largest bucket has others + 1 gaps to go to, so one of them gets at least this many.
    demanded = -(-largest // (others + 1))
    assert runs_of(order) <= max(2, demanded)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 300), min_size=2, max_size=8), st.integers(0, 2**32))
def test_buckets_are_spread_evenly_and_end_together(counts, seed):
    order = interleave(counts, np.random.default_rng(seed))
    for bucket, count in enumerate(counts):
        places, stride = np.flatnonzero(order == bucket), len(order) / count
        ideal = (np.arange(count) + 0.5) * stride
        # One stride, and a place for each bucket that joined later.
        assert np.abs(places + 0.5 - ideal).max() <= stride + len(counts)
        assert len(order) - 1 - places[-1] <= 1.25 * stride + 2


def test_phases_are_drawn_anew():
    rng = np.random.default_rng(0)
    orders = {tuple(interleave([30, 90, 310], rng)) for _ in range(20)}
    assert len(orders) > 10


def test_longest_runs():
    assert longest_runs(np.array([2, 2, 0, 2, 2, 2, 0, 0]), buckets=4) == (2, 0, 3, 0)
    assert longest_runs(np.array([], np.int32), buckets=2) == (0, 0)
