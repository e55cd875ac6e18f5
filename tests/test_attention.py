"""Attention of long rows, which runs some queries at a time, and what tokens of a tree may see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models import attention
from dflash_jax.models.sight import Sight, ancestors


def by_hand(q, k, v, visible):
    """Softmax attention in float64, a head and a query at a time."""
    rows, count, heads, width = q.shape
    out = np.zeros(q.shape)
    for row, at, head in np.ndindex(rows, count, heads):
        group = head // (heads // k.shape[2])
        scores = k[row, :, group] @ q[row, at, head] / np.sqrt(width)
        weights = np.where(visible[row, at], np.exp(scores - scores[visible[row, at]].max()), 0)
        out[row, at, head] = weights @ v[row, :, group] / weights.sum()
    return out


@pytest.mark.parametrize("chunk", [4, 7, 23, 100])
def test_queries_in_pieces_give_the_same_as_all_at_once(monkeypatch, chunk):
    monkeypatch.setattr(attention, "QUERY_CHUNK", chunk)
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((2, 23, heads, 8)) for heads in (6, 2, 2))
    visible = random.random((2, 23, 23)) < 0.4
    visible |= np.eye(23, dtype=bool)
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    found = jax.jit(attention.attend)(*arrays, jnp.asarray(visible))
    np.testing.assert_allclose(found, by_hand(q, k, v, visible), rtol=0, atol=2e-6)


PARENTS = jnp.asarray([-1, 0, -1, 1, 0])


def test_ancestors_of_the_nodes_of_a_tree():
    found = [set(np.flatnonzero(row).tolist()) for row in np.asarray(ancestors(PARENTS))]
    assert found == [{0}, {0, 1}, {2}, {0, 1, 3}, {0, 4}]


def test_a_node_sees_the_cache_and_its_ancestors_and_distances_follow_the_path():
    sight = Sight.of_tree(jnp.asarray([3, 1]), PARENTS[None].repeat(2, axis=0), capacity=10)
    np.testing.assert_array_equal(sight.positions, [[3, 4, 3, 5, 4], [1, 2, 1, 3, 2]])
    seen = [set(np.flatnonzero(row).tolist()) for row in np.asarray(sight.visible[0])]
    # The cache holds positions 0 to 2; nodes 0 to 4 are written to places 3 to 7, whatever their depth.
    assert seen == [{0, 1, 2, 3}, {0, 1, 2, 3, 4}, {0, 1, 2, 5}, {0, 1, 2, 3, 4, 6}, {0, 1, 2, 3, 7}]
    # Node 3 stands at position 5: its parent is one token away, its grandparent two, the cache's last token three.
    assert [int(sight.distance[0, 3, place]) for place in (6, 4, 3, 2, 0)] == [0, 1, 2, 3, 5]
    inside = [set(np.flatnonzero(row).tolist()) for row in np.asarray(sight.within(2)[0])]
    assert inside == [{2, 3}, {3, 4}, {2, 5}, {4, 6}, {3, 7}]
