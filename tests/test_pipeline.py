"""Look-ahead asks early and changes neither order nor content; the feature cache gives back what it was given."""

import numpy as np
import pytest

from dflash_jax.batch import Batch
from dflash_jax.objective.objective import TargetStates
from dflash_jax.training.features import FeatureCache, Spot, cut, joined, spots
from dflash_jax.training.pipeline import look_ahead


@pytest.mark.parametrize("depth", [0, 1, 3, 50])
def test_order_is_kept_and_requests_run_ahead(depth):
    requested: list[int] = []

    def items():
        for item in range(10):
            requested.append(item)
            yield item

    for position, (item, beyond) in enumerate(look_ahead(items(), depth)):
        assert item == position
        assert list(beyond) == requested[position + 1 :]
        assert len(requested) == min(position + depth + 1, 10)


def batch_of(record_ids: list[list[int]], segment_ids: list[list[int]]) -> Batch:
    """A batch of which only the places of its records matter."""
    segments = np.array(segment_ids, np.int32)
    zeros = np.zeros_like(segments)
    ids = np.array(record_ids, np.int32)
    return Batch(zeros, zeros, segments, segments > 0, ids, np.zeros(len(ids), np.int32))


def test_records_are_found_in_padded_and_in_packed_rows():
    padded = batch_of([[7], [-1], [3]], [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert spots(padded) == [Spot(7, 0, slice(0, 2)), Spot(3, 2, slice(0, 4))]
    packed = batch_of([[7, 3], [5, -1]], [[1, 1, 2, 0], [1, 1, 1, 0]])
    assert spots(packed) == [Spot(7, 0, slice(0, 2)), Spot(3, 0, slice(2, 3)), Spot(5, 1, slice(0, 3))]
    assert spots(batch_of([[-1]], [[0, 0]])) == []


@pytest.mark.parametrize("teacher", [False, True], ids=["features alone", "with last states"])
def test_states_come_back_per_record_whatever_row_they_are_in(teacher):
    random = np.random.default_rng(0)
    features = random.standard_normal((3, 6, 5)).astype(np.float32)
    last = random.standard_normal((3, 6, 2)).astype(np.float32) if teacher else None
    first = batch_of([[7], [3], [-1]], [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0] * 6])
    found = {spot.record_id: cut(TargetStates(features, last), spot) for spot in spots(first)}
    packed = batch_of([[-1, -1], [3, 7]], [[0] * 6, [1, 1, 2, 2, 2, 0]])
    states = joined(packed.tokens.shape, spots(packed), found)
    assert (states.last is None) == (not teacher)
    for values, given in zip(states, (features, last), strict=True):
        if given is not None:
            np.testing.assert_array_equal(
                values[1], np.concatenate([given[1, :2], given[0, :3], 0 * given[0, :1]])
            )
            np.testing.assert_array_equal(values[0], 0)


def test_what_is_cut_out_does_not_hold_the_batch_in_memory():
    states = TargetStates(np.ones((2, 6, 5)))
    assert cut(states, Spot(0, 1, slice(0, 3))).features.base is None


@pytest.mark.parametrize("teacher", [False, True], ids=["features alone", "with last states"])
def test_a_full_cache_keeps_what_it_has(teacher):
    states = TargetStates(np.ones((6, 5), np.float32), np.ones((6, 2), np.float32) if teacher else None)
    size = 6 * (7 if teacher else 5) * 4
    for limit, expected in ((size - 1, []), (size, [0]), (2 * size - 1, [0]), (2 * size, [0, 1])):
        cache = FeatureCache(limit)
        for record_id in (0, 1, 2):
            if cache.wants(record_id):
                cache.keep(record_id, states)
        assert list(cache.recall([0, 1, 2])) == expected
        assert not cache.wants(3)
    assert not FeatureCache(0).wants(0)


def test_a_record_is_kept_once():
    cache = FeatureCache(10**6)
    cache.keep(4, TargetStates(np.ones((6, 5))))
    assert not cache.wants(4)
    assert cache.wants(5)
