"""How far a verify step would get: accuracy by position and accept length, as sums and counts.

All are teacher-forced: the drafted tokens of each slot are compared with the text. Sums travel instead of means,
so that they add exactly over micro-batches, shards and steps; division happens once, where they are shown.
"""

import dataclasses

import jax
import jax.numpy as jnp

TREE_WIDTHS = (4, 8)  # candidates of a slot that the measures for tree decoding look at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Sums over blocks. correct, survived, counted: [W - 1] by slot from 1; the others are scalars.

    correct: the drafter's first choice is the label; survived: it is, there and in all slots before (prefix rule);
    counted: slots with a label; blocks: blocks with a label in slot 1.
    among, among_streak: for each of TREE_WIDTHS, slots whose label is among so many first choices, and leading
    slots of which that holds. expected: accepted drafts to be expected where target and drafter are sampled at
    temperature 1 (sum over prefixes of the product of overlaps). walk_tokens, walk_rounds: tokens and verify steps
    of a decoding that starts at the first token of each answer and jumps by the accept length.
    """

    correct: jax.Array
    survived: jax.Array
    counted: jax.Array
    blocks: jax.Array
    among: jax.Array
    among_streak: jax.Array
    expected: jax.Array
    walk_tokens: jax.Array
    walk_rounds: jax.Array

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return jax.tree.map(lambda a, b: a + b, self, other)

    @property
    def walk_length(self) -> jax.Array:
        """Mean tokens of a verify step on the way that decoding takes through the text (walk tau)."""
        return self.walk_tokens / jnp.maximum(self.walk_rounds, 1)

    def measures(self) -> dict[str, jax.Array]:
        """The means these sums stand for, under the names of the log; *_by_position are [W - 1].

        accept_len = streak + 1: the target's own bonus token ends every verify step.
        """
        slots, blocks = jnp.maximum(self.counted.sum(), 1), jnp.maximum(self.blocks, 1)
        streak = self.survived.sum() / blocks
        found = {
            "acc": self.correct.sum() / slots,
            "streak": streak,
            "accept_len": streak + 1.0,
            "acc_by_position": self.correct / jnp.maximum(self.counted, 1),
            "survival_by_position": self.survived / blocks,
            "blocks": self.blocks,
        }
        for index, width in enumerate(TREE_WIDTHS):
            found[f"top{width}_acc"] = self.among[index] / slots
            found[f"ddtree_streak{width}"] = self.among_streak[index] / blocks
        return found


def acceptance(ranks: jax.Array, mask: jax.Array, overlaps: jax.Array) -> Acceptance:
    """Sums over blocks of slots 1.., [..., W - 1] each.

    ranks: int32, tokens that the drafter prefers to the label; mask: bool, has a label; overlaps: float32,
    sum min(p, q) of target and drafter.
    """
    over_blocks = tuple(range(ranks.ndim - 1))
    among = jnp.stack([(ranks < width) & mask for width in (1, *TREE_WIDTHS)]).astype(jnp.float32)
    leading = jnp.cumprod(among, axis=-1)
    zero = jnp.float32(0)
    return Acceptance(
        correct=among[0].sum(over_blocks),
        survived=leading[0].sum(over_blocks),
        counted=mask.sum(over_blocks).astype(jnp.float32),
        blocks=mask[..., 0].sum().astype(jnp.float32),
        among=among[1:].reshape(len(TREE_WIDTHS), -1).sum(axis=1),
        among_streak=leading[1:].reshape(len(TREE_WIDTHS), -1).sum(axis=1),
        expected=jnp.cumprod(jnp.where(mask, overlaps, 0.0), axis=-1).sum(),
        walk_tokens=zero,
        walk_rounds=zero,
    )


def walk(streaks: jax.Array, anchors: jax.Array, kept: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(tokens, rounds) of decodings that jump through the text by the accept length, float32.

    streaks: [B, A] leading correct drafts of the block at anchors [B, A], of which kept [B, A] exist;
    valid: [B, S] bool, all positions where a block may start. Rows whose blocks do not cover these are left out.
    On text that the target wrote greedily, tokens / rounds is what real greedy decoding yields for a verify step.
    """
    rows, length = valid.shape
    index = jnp.where(kept, anchors, length)
    at = (
        jnp.zeros((rows, length + 1), jnp.int32)
        .at[jnp.arange(rows)[:, None], index]
        .set(streaks.astype(jnp.int32))
    )
    covered = kept.sum(axis=1) == valid.sum(axis=1)
    first = valid & ~jnp.pad(valid, ((0, 0), (1, 0)))[:, :-1]

    def visit(target: jax.Array, column: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        position, starts, open_, streak = column
        jumps = open_ & ((position == target) | starts)
        return jnp.where(jumps, position + streak + 1, target), jumps

    columns = (jnp.arange(length), first.T, valid.T, at[:, :length].T)
    _, jumps = jax.lax.scan(visit, jnp.full(rows, -1), columns)
    weight = covered.astype(jnp.float32)
    return (valid.sum(axis=1) * weight).sum(), (jumps.sum(axis=0) * weight).sum()
