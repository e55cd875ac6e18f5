"""What chain and tree decoding would accept of a text that is known, from one pass of the drafter over it.

A block's draft is compared with the tokens that follow in the text: how many leading slots of the chain are right,
and how deep the text's own tokens lie in the best tree of a budget. A greedy target that wrote the text accepts as
much. Means over all blocks weigh positions alike; decoding visits them by its own jumps, which the walk repeats
(objective/acceptance.py). All are sums, so that they add exactly over batches and shards.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from dflash_jax.batch import Batch
from dflash_jax.decode.tree import best_tree, candidates, follow
from dflash_jax.models.drafter import Drafter
from dflash_jax.objective.acceptance import walk
from dflash_jax.objective.anchors import block_labels, valid_anchors
from dflash_jax.objective.objective import Frozen, block_states


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Simulated:
    """float32 sums; those of [1 + G] hold the chain and then a tree of each of G budgets.

    blocks: [], blocks with a label in slot 1; accepted: [1 + G], drafts accepted in them; full_blocks: [] and
    full_accepted: [1 + G], the same of blocks with a label in every slot; walk_tokens, walk_rounds: [1 + G], of
    decodings that start at the first token of each answer, the tokens and the verify steps.
    """

    blocks: jax.Array
    accepted: jax.Array
    full_blocks: jax.Array
    full_accepted: jax.Array
    walk_tokens: jax.Array
    walk_rounds: jax.Array
    budgets: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def __add__(self, other: "Simulated") -> "Simulated":
        return jax.tree.map(lambda a, b: a + b, self, other)

    def measures(self) -> dict[str, jax.Array]:
        """Tokens of a verify step by name: of the chain, and of a tree of each budget B as `tree_measures`.

        A mean over no block is 1, the target's own token; a walk without a step is 0.
        """
        chain, *_ = self._means()
        names = ("sim_accept_len", "sim_full_accept_len", "walk_tau")
        return dict(zip(names, chain, strict=True)) | self.tree_measures()

    def tree_measures(self) -> dict[str, jax.Array]:
        """tree{B}_accept_len, over all blocks, tree{B}_full_accept_len, over those with a label in every slot, and
        tree{B}_walk_tau, along the way that decoding takes."""
        _, *trees = self._means()
        names = ("accept_len", "full_accept_len", "walk_tau")
        return {
            f"tree{budget}_{name}": value
            for budget, means in zip(self.budgets, trees, strict=True)
            for name, value in zip(names, means, strict=True)
        }

    def _means(self) -> Iterator[tuple[jax.Array, jax.Array, jax.Array]]:
        everywhere = 1.0 + self.accepted / jnp.maximum(self.blocks, 1)
        full = 1.0 + self.full_accepted / jnp.maximum(self.full_blocks, 1)
        walked = self.walk_tokens / jnp.maximum(self.walk_rounds, 1)
        return zip(everywhere, full, walked, strict=True)


def simulate(
    drafter: Drafter,
    batch: Batch,
    features: jax.Array,
    frozen: Frozen,
    *,
    anchors: jax.Array,
    kept: jax.Array,
    budgets: tuple[int, ...],
    head_chunk: int,
    width: int | None = None,
) -> Simulated:
    """Sums over the blocks at anchors [B, A] of a batch, of which kept [B, A] exist (as of `draw_anchors`).

    features: [B, S, T * E] of the target; budgets: nodes of each tree besides its root; head_chunk: blocks whose
    logits are alive at a time; width: slots of a block, None for the drafter's block_size. The walk is known in
    rows whose anchors are all positions where a block may start, and leaves the others out.
    """
    slots = width or drafter.config.block_size
    labels, mask = block_labels(
        batch.tokens, batch.loss_mask, batch.segment_ids, anchors=anchors, kept=kept, width=slots
    )
    # Slot 0 predicts nothing.
    labels, mask = labels[:, :, 1:], mask[:, :, 1:]
    hidden = block_states(drafter, batch, features, frozen, anchors=anchors, kept=kept, width=slots)[:, :, 1:]
    streaks = jnp.moveaxis(_streaks(hidden, labels, mask, frozen, budgets=budgets, chunk=head_chunk), -1, 0)
    valid = valid_anchors(batch.loss_mask, batch.segment_ids)
    tokens, rounds = jax.vmap(walk, in_axes=(0, None, None, None))(streaks, anchors, kept, valid)
    full = mask.all(axis=-1)

    def total(values: jax.Array) -> jax.Array:
        return values.sum(axis=(-2, -1)).astype(jnp.float32)

    return Simulated(
        blocks=total(mask[..., 0]),
        accepted=total(streaks),
        full_blocks=total(full),
        full_accepted=total(jnp.where(full, streaks, 0)),
        walk_tokens=tokens,
        walk_rounds=rounds,
        budgets=budgets,
    )


def _streaks(
    hidden: jax.Array, labels: jax.Array, mask: jax.Array, frozen: Frozen, *, budgets: tuple[int, ...], chunk: int
) -> jax.Array:
    """[B, A, 1 + G] int32 accepted drafts of blocks with states [B, A, D, E], labels and their mask [B, A, D]."""
    shape = labels.shape[:2]
    blocks = shape[0] * shape[1]
    chunk = min(chunk, blocks)
    count = -(-blocks // chunk)
    # No token is -1, so no draft and no node has the label of a slot without one.
    wanted = jnp.where(mask, labels, -1)

    def cut(values: jax.Array) -> jax.Array:
        values = values.reshape(blocks, *values.shape[2:])
        padding = ((0, count * chunk - blocks),) + ((0, 0),) * (values.ndim - 1)
        return jnp.pad(values, padding).reshape(count, chunk, *values.shape[1:])

    def one(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, wanted = part
        with jax.named_scope("head"):
            logits = frozen.logits(hidden)
        drafts = frozen.tokens_of(jnp.argmax(logits, axis=-1))
        streaks = [jnp.cumprod(drafts == wanted, axis=-1).sum(axis=-1)]
        if budgets:
            ranked, log_probs = candidates(logits, max(budgets))
            tokens = frozen.tokens_of(ranked)
        for budget in budgets:
            depths = jax.vmap(lambda *block, budget=budget: _depth(*block, budget=budget))
            streaks.append(depths(tokens[..., :budget], log_probs[..., :budget], wanted))
        return jnp.stack(streaks, axis=-1).astype(jnp.int32)

    found = jax.lax.map(one, (cut(hidden), cut(wanted)))
    return found.reshape(count * chunk, -1)[:blocks].reshape(*shape, -1)


def _depth(tokens: jax.Array, log_probs: jax.Array, wanted: jax.Array, *, budget: int) -> jax.Array:
    """How many leading tokens of wanted [D] lie in the best tree of the candidates [D, C] of one block."""
    tree = best_tree(tokens, log_probs, budget=budget)
    steps = wanted.shape[0]
    # The token wanted after a node of depth d is that of slot d + 1; after the last slot there is none.
    after = jnp.concatenate([wanted, jnp.full(1, -1, wanted.dtype)])
    chosen = after[jnp.concatenate([jnp.zeros(1, jnp.int32), tree.depths])]
    _, count = follow(tree, chosen, steps=steps)
    return count - 1
