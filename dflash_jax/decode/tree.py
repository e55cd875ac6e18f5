"""DDTree (arXiv:2604.12989): one block's distributions as a tree of the B most probable prefixes.

    P(t_1 .. t_d) = prod_k q_k(t_k)          slots are independent given the anchor
    tree          = the B prefixes of any length with the largest P, which hold every prefix of their own

The expected accept length of a set of prefixes is the sum of their P, so no tree of B nodes has a larger one.
Instead of the paper's heap, which is sequential, the B best prefixes of each length are found from those one
shorter, and the B best of all of them stay; both give the same nodes in the same order. The token of rank j after
the prefix of rank i (from 0) has (i + 1)(j + 1) - 1 better ones of its length, which may be B - 1 at most.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """B nodes behind a root, the most probable first; node 0 is the root (the anchor), node i + 1 is entry i.

    tokens: [B] int32; parents: [B] int32, node numbers, always of an earlier node; depths: [B] int32, from 1;
    scores: [B] float32, log P; valid: [B] bool, False where there are no B prefixes.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array
    scores: jax.Array
    valid: jax.Array


def candidates(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` most probable tokens [..., D, C] int32 of each slot and their log-probabilities, best first.

    logits: [..., D, V] float32; C = min(count, V).
    """
    best, index = jax.lax.top_k(logits, min(count, logits.shape[-1]))
    return index.astype(jnp.int32), best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def best_tree(tokens: jax.Array, log_probs: jax.Array, *, budget: int) -> Tree:
    """The tree of `budget` nodes from the candidates [D, C] of D slots; of equals, the one the heap pops first.

    That is the smaller tuple of ranks, as Python compares tuples.
    """
    slots, choices = log_probs.shape
    parent, rank = (jnp.asarray(part) for part in _pairs(budget, min(choices, budget)))
    lengths = []
    # One entry, the empty prefix. order: places of the prefixes among their tuples of ranks.
    scores = jnp.full(budget, -jnp.inf).at[0].set(0.0)
    order, ranks = jnp.arange(budget), jnp.full((budget, slots), -1)
    for slot in range(slots):
        found = scores[parent] + log_probs[slot, rank]
        tie = order[parent] * choices + rank
        _, tie, pick = jax.lax.sort((-found, tie, jnp.arange(len(found))), num_keys=2)
        pick, tie = pick[:budget], tie[:budget]
        scores, above = found[pick], parent[pick]
        order = jnp.argsort(jnp.argsort(tie))
        ranks = ranks[above].at[:, slot].set(rank[pick])
        lengths.append((scores, above, ranks))
    return _best_of(lengths, tokens, budget=budget)


def _pairs(budget: int, choices: int) -> tuple[np.ndarray, np.ndarray]:
    """(prefix, token) by their ranks, of all that can be among the `budget` best; at least `budget` pairs."""
    prefix, token = np.meshgrid(np.arange(budget), np.arange(choices), indexing="ij")
    possible = (prefix + 1) * (token + 1) <= budget
    return prefix[possible], token[possible]


def _best_of(lengths: list[tuple[jax.Array, jax.Array, jax.Array]], tokens: jax.Array, *, budget: int) -> Tree:
    """The tree from the best prefixes of each length: scores [B], which prefixes they continue, ranks [B, D]."""
    slots = len(lengths)
    scores, above, ranks = (jnp.concatenate(parts) for parts in zip(*lengths, strict=True))
    # -1 stands where a prefix has ended, so that a prefix comes before what continues it.
    keys = (-scores, *ranks.T, jnp.arange(slots * budget))
    pick = jax.lax.sort(keys, num_keys=1 + slots)[-1][:budget]
    slot = pick // budget
    number = jnp.zeros(slots * budget, jnp.int32).at[pick].set(jnp.arange(1, budget + 1))
    parents = jnp.where(slot == 0, 0, number[(slot - 1) * budget + above[pick]])
    chosen = jnp.take_along_axis(ranks[pick], slot[:, None], axis=1)[:, 0]
    valid = scores[pick] > -jnp.inf
    return Tree(
        tokens=tokens[slot, jnp.maximum(chosen, 0)],
        parents=jnp.where(valid, parents, 0).astype(jnp.int32),
        depths=(slot + 1).astype(jnp.int32),
        scores=scores[pick],
        valid=valid,
    )


def follow(tree: Tree, chosen: jax.Array, *, steps: int) -> tuple[jax.Array, jax.Array]:
    """Walk from the root to the child with the token that is wanted there, until there is none.

    chosen: [B + 1] int32, the token that is wanted after each node. Returns the nodes visited, [steps + 1] int32,
    the last one repeated to the end, and their number [] int32: accepted drafts, and the bonus token.
    """

    def descend(state: tuple[jax.Array, jax.Array], _: None):
        node, count = state
        child = tree.valid & (tree.parents == node) & (tree.tokens == chosen[node])
        node, count = jnp.where(child.any(), child.argmax() + 1, node), count + child.any()
        return (node, count), node

    root = jnp.zeros((), jnp.int32)
    (_, count), nodes = jax.lax.scan(descend, (root, root + 1), None, length=steps)
    return jnp.concatenate([root[None], nodes]).astype(jnp.int32), count
