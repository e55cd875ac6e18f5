"""Trees of the most probable prefixes: against the paper's code, against a heap, and by hand."""

import functools
import heapq
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import GOLDEN

from dflash_jax.decode.tree import Tree, best_tree, candidates, follow

KINDS, BUDGETS = ("flat", "sharp", "decay", "h15", "narrow"), (1, 4, 15, 32, 64)


@functools.partial(jax.jit, static_argnames="budget")
def tree_of(logits, budget) -> Tree:
    return best_tree(*candidates(logits, budget), budget=budget)


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "ddtree_trees.npz")


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_trees_and_walks_equal_the_papers_code(golden, kind, budget):
    def known(name):
        return golden[f"{kind}/b{budget}/{name}"]

    logits = jnp.asarray(golden[f"{kind}/logits"])
    tree = tree_of(logits, budget)
    count = len(known("tokens"))
    assert tree.valid.tolist() == [True] * count + [False] * (budget - count)
    np.testing.assert_array_equal(tree.tokens[:count], known("tokens"))
    np.testing.assert_array_equal(tree.depths[:count], known("depths"))
    np.testing.assert_array_equal(tree.parents[:count], known("parents")[1:])
    np.testing.assert_allclose(tree.scores[:count], known("logw"), atol=1e-4)
    walk = jax.jit(functools.partial(follow, steps=len(logits)))
    for posterior, accepted, token in zip(known("posterior"), known("accepted"), known("next_token"), strict=True):
        wanted = np.pad(posterior, (0, budget + 1 - len(posterior))).astype(np.int32)
        path, visited = walk(tree, jnp.asarray(wanted))
        assert path[:visited].tolist() == accepted[accepted >= 0].tolist()
        assert wanted[path[visited - 1]] == token


def heap_tree(logits, budget):
    """(rank tuple, score) of the nodes that a best-first search pops, in its order."""
    log_probs = np.sort(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True), axis=1)[:, ::-1]
    depth, vocab = log_probs.shape
    queue, popped = [(-log_probs[0, 0], (0,))], []
    while queue and len(popped) < budget:
        cost, ranks = heapq.heappop(queue)
        popped.append((ranks, -cost))
        if ranks[-1] + 1 < vocab:
            sibling = (*ranks[:-1], ranks[-1] + 1)
            heapq.heappush(queue, (-score_of(log_probs, sibling), sibling))
        if len(ranks) < depth:
            child = (*ranks, 0)
            heapq.heappush(queue, (-score_of(log_probs, child), child))
    return popped


def score_of(log_probs, ranks):
    return sum(log_probs[slot, rank] for slot, rank in enumerate(ranks))


def rank_tuples(tree: Tree, logits):
    """The nodes as tuples of ranks, from their tokens and parents."""
    order = np.argsort(-np.asarray(logits), axis=1, kind="stable")
    ranks = np.argsort(order, axis=1)
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        above = found[parent]
        found.append((*above, int(ranks[len(above), token])))
    return found[1:]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1, 3, 5), (2, 2, 6), (3, 7, 16), (5, 40, 32), (7, 11, 64), (15, 60, 48)]),
    sharpness=st.sampled_from([0.1, 1.0, 4.0, 12.0]),
)
def test_the_beam_finds_what_the_heap_pops_in_its_order(seed, shape, sharpness):
    depth, vocab, budget = shape
    logits = (np.random.default_rng(seed).standard_normal((depth, vocab)) * sharpness).astype(np.float32)
    expected = heap_tree(logits.astype(np.float64), budget)
    tree = tree_of(jnp.asarray(logits), budget)
    count = int(tree.valid.sum())
    assert count == len(expected)
    np.testing.assert_allclose(tree.scores[:count], [score for _, score in expected], atol=1e-4)
    scores = np.array([score for _, score in expected])
    if (-np.diff(scores) > 1e-4).all():  # nothing that rounding could exchange
        assert rank_tuples(tree, logits)[:count] == [ranks for ranks, _ in expected]


def test_no_other_tree_of_that_size_is_more_probable():
    logits = np.random.default_rng(3).standard_normal((3, 4)).astype(np.float32)
    probabilities = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    prefixes = {
        prefix: math.prod(probabilities[slot, token] for slot, token in enumerate(prefix))
        for length in (1, 2, 3)
        for prefix in itertools.product(range(4), repeat=length)
    }
    for budget in (1, 2, 5, 9):
        largest = sum(sorted(prefixes.values())[-budget:])
        found = float(jnp.exp(tree_of(jnp.asarray(logits), budget).scores).sum())
        assert found == pytest.approx(largest, rel=1e-5)


def test_the_example_of_the_paper_and_its_expected_length():
    slots = jnp.log(jnp.array([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.9, 0.05, 0.05]]))
    tree = tree_of(slots, 6)
    names = ["".join(("abc", "def", "ghi")[d][r] for d, r in enumerate(t)) for t in rank_tuples(tree, slots)]
    assert set(names) == {"a", "ad", "b", "adg", "ae", "aeg"}
    assert names[0] == "a"
    assert names[3:] == ["adg", "ae", "aeg"]
    assert float(jnp.exp(tree.scores).sum()) == pytest.approx(1.926)


def test_of_equal_prefixes_the_smaller_tuple_of_ranks_comes_first():
    # Powers of two: all sums are exact. P: a 1/2, ad 1/2, b 1/4, bd 1/4.
    with_ties = jnp.log2(jnp.array([[0.5, 0.25, 0.125], [1.0, 0.0, 0.0]]))
    tree = jax.jit(functools.partial(best_tree, budget=4))(jnp.array([[0, 1, 2], [5, 6, 7]]), with_ties)
    assert tree.tokens.tolist() == [0, 5, 1, 5]
    assert tree.parents.tolist() == [0, 1, 0, 3]
    # And between lengths: (0, 0) before (1,), both 1/4.
    between = jnp.log2(jnp.array([[0.5, 0.25, 0.125], [0.5, 0.25, 0.125]]))
    tree = jax.jit(functools.partial(best_tree, budget=3))(jnp.array([[0, 1, 2], [5, 6, 7]]), between)
    assert tree.tokens.tolist() == [0, 5, 1]
    assert tree.parents.tolist() == [0, 1, 0]


def test_a_small_vocabulary_has_fewer_nodes_than_the_budget():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3)), jnp.float32)
    tree = tree_of(logits, 40)
    assert int(tree.valid.sum()) == 3 + 9
    assert not tree.parents[12:].any()
    # What is not a node is never walked to, whatever token it holds.
    wanted = jnp.full(41, int(tree.tokens[-1]))
    path, count = follow(tree, wanted, steps=2)
    assert (path[:count] <= 12).all()
