"""Look-ahead asks early and changes neither order nor content; the feature cache gives back what it was given."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.batch import Batch
from dflash_jax.objective.objective import TargetStates
from dflash_jax.training.features import FeatureCache
from dflash_jax.training.pipeline import look_ahead


@pytest.mark.parametrize("depth", [0, 1, 3, 50])
def test_order_is_kept_and_requests_run_ahead(depth):
    requested: list[int] = []

    def items():
        for item in range(10):
            requested.append(item)
            yield item

    for position, item in enumerate(look_ahead(items(), depth)):
        assert item == position
        assert len(requested) == min(position + depth + 1, 10)


def batch_of(record_ids: list[int], lengths: list[int]) -> Batch:
    real = np.arange(6) < np.array(lengths)[:, None]
    zeros = np.zeros((len(lengths), 6), np.int32)
    return Batch(zeros, zeros, real.astype(np.int32), real, np.array(record_ids), np.zeros(len(lengths), int))


@pytest.mark.parametrize("teacher", [False, True], ids=["features alone", "with last states"])
def test_states_come_back_per_record_whatever_batch_they_are_in(teacher):
    cache = FeatureCache(10**6)
    first = batch_of([7, 3, -1], [4, 6, 0])
    random = np.random.default_rng(0)
    features = random.standard_normal((3, 6, 5)).astype(np.float32)
    last = random.standard_normal((3, 6, 2)).astype(np.float32) if teacher else None
    assert cache.recall(first) is None
    cache.keep(first, TargetStates(jnp.asarray(features), None if last is None else jnp.asarray(last)))
    recalled = cache.recall(batch_of([-1, 3, 7], [0, 6, 4]))
    assert recalled is not None
    assert (recalled.last is None) == (not teacher)
    for found, values in zip(recalled, (features, last), strict=True):
        if values is not None:
            np.testing.assert_array_equal(found[1], values[1])
            np.testing.assert_array_equal(found[2, :4], values[0, :4])
            np.testing.assert_array_equal(found[2, 4:], 0)
            np.testing.assert_array_equal(found[0], 0)
    assert cache.recall(batch_of([3, 8], [6, 2])) is None


def test_a_batch_without_records_is_not_recalled():
    cache = FeatureCache(10**6)
    assert cache.recall(batch_of([-1, -1], [0, 0])) is None


def test_a_full_cache_keeps_what_it_has():
    row = 6 * 5 * 4
    cache = FeatureCache(row + row // 2)
    states = TargetStates(jnp.ones((2, 6, 5)))
    cache.keep(batch_of([1, 2], [6, 6]), states)
    assert cache.recall(batch_of([1], [6])) is not None
    assert cache.recall(batch_of([2], [6])) is None
    assert FeatureCache(0).full


def test_last_states_take_room_too():
    row = 6 * (5 + 2) * 4
    states = TargetStates(jnp.ones((2, 6, 5)), jnp.ones((2, 6, 2)))
    for limit, kept in ((row - 1, 0), (row, 1), (2 * row - 1, 1), (2 * row, 2)):
        cache = FeatureCache(limit)
        cache.keep(batch_of([1, 2], [6, 6]), states)
        assert [cache.recall(batch_of([record], [6])) is not None for record in (1, 2)].count(True) == kept
        assert cache.full == (kept * row >= limit)
