"""Tree speculative decoding (DDTree, arXiv:2604.12989): many likely continuations, verified in one target pass.

    draft   [x_a, MASK ..] -> q_1 .. q_{W-1} -> the tree of the B most probable prefixes (tree.py)
    verify  the anchor and the B nodes, each after its own ancestors only -> the target's token after every node
    walk    from the anchor to the child that is the target's token, as long as there is one

The token at a node is the target's argmax, or its sample with the noise that plain decoding would use at that
place. So the text is that of plain decoding at any temperature, whatever the tree.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dflash_jax.decode.drafting import draft_logits, remember
from dflash_jax.decode.early_end import draft_unless, verify_promising
from dflash_jax.decode.sampling import GREEDY, Sampling, filtered, noise
from dflash_jax.decode.speculate import Anchors, Decoded, Outcome, speculate
from dflash_jax.decode.tree import Tree, best_tree, candidates, follow
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.target import Target
from dflash_jax.objective.objective import Frozen


def generate_tree(
    target: Target,
    drafter: Drafter,
    frozen: Frozen,
    prompts: jax.Array,
    lengths: jax.Array,
    *,
    taps: tuple[int, ...],
    stop: tuple[int, ...],
    max_new_tokens: int,
    budget: int,
    sampling: Sampling = GREEDY,
    keys: jax.Array | None = None,
    width: int | None = None,
    min_accept: float = 0.0,
) -> Decoded:
    """Continuations of prompts [B, P] of `lengths` [B], drafted as trees of `budget` nodes behind the anchor.

    keys: [B] random keys, needed unless the sampling is greedy; width: slots of a block, and so the deepest node's
    depth and one more; None is the drafter's block size; min_accept: drafts to expect, of the most promising row,
    below which no nodes are verified; 0 verifies all.
    """
    slots = width or drafter.config.block_size

    def play(at: Anchors) -> Outcome:
        def draft() -> Tree:
            logits = draft_logits(drafter, frozen, at.token, at.cache.lengths, at.context, width=slots)
            tokens, log_probs = candidates(logits, budget)
            return jax.vmap(functools.partial(best_tree, budget=budget))(frozen.tokens_of(tokens), log_probs)

        tree = draft_unless(at.resting, draft, min_accept=min_accept)
        probability = jnp.where(tree.valid, jnp.exp(tree.scores), 0)
        return verify_promising(functools.partial(verdict, tree), at, probability, min_accept=min_accept)

    def verdict(tree: Tree, at: Anchors, *, length: int) -> Outcome:
        """What the target says of the anchor and of the first length - 1 nodes of the tree [B]."""
        nodes = jnp.concatenate([at.token[:, None], tree.tokens], axis=1)[:, :length]
        parents = jnp.pad(tree.parents, ((0, 0), (1, 0)), constant_values=-1)[:, :length]
        features, last, step = target.step(nodes, at.cache, taps=taps, parents=parents)
        found = target.logits(last)
        if sampling.temperature > 0:
            assert keys is not None
            vocab, depths = found.shape[-1], jnp.pad(tree.depths, ((0, 0), (1, 0)))[:, :length]
            added = jnp.stack([noise(keys, at.places + depth, vocab=vocab) for depth in range(slots)], axis=1)
            found = filtered(found, sampling) + jax.vmap(lambda rows, depth: rows[depth])(added, depths)
        chosen = jnp.argmax(found, axis=-1).astype(jnp.int32)
        verified = dataclasses.replace(tree, valid=tree.valid & (jnp.arange(budget) < length - 1))
        wanted = jnp.pad(chosen, ((0, 0), (0, budget + 1 - length)))
        path, count = jax.vmap(functools.partial(follow, steps=slots - 1))(verified, wanted)
        walked = jnp.take_along_axis(features, path[:, :length, None], axis=1)
        return Outcome(
            tokens=jnp.take_along_axis(chosen, path, axis=1),
            accepted=count - 1,
            cache=step.keep(jnp.where(at.active, count, 0), path=path),
            context=remember(drafter, at.context, walked, at.cache.lengths),
        )

    return speculate(
        target,
        drafter,
        frozen,
        prompts,
        lengths,
        play=play,
        room=max(budget + 1, slots),
        taps=taps,
        stop=stop,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        keys=keys,
    )
