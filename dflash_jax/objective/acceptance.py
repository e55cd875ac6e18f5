"""How far a verify step would get: accuracy by position and accept length, as sums and counts.

All are teacher-forced: the drafted token of each slot is compared with the text. Sums travel instead of means,
so that they add exactly over micro-batches, shards and steps; division happens once, where they are shown.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Sums over blocks. correct, survived, counted: [W - 1] by slot from 1; blocks: scalar.

    correct: drafted token equals the label; survived: it and all before it do (prefix rule);
    counted: slots with a label; blocks: blocks with a label in slot 1.
    """

    correct: jax.Array
    survived: jax.Array
    counted: jax.Array
    blocks: jax.Array

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return jax.tree.map(lambda a, b: a + b, self, other)

    @property
    def accuracy(self) -> jax.Array:
        """Share of labelled slots drafted right."""
        return self.correct.sum() / jnp.maximum(self.counted.sum(), 1)

    @property
    def streak(self) -> jax.Array:
        """Mean number of leading correct drafts of a block, without the bonus token."""
        return self.survived.sum() / jnp.maximum(self.blocks, 1)

    @property
    def accept_length(self) -> jax.Array:
        """Mean tokens that one verify step yields: the streak and the target's own bonus token."""
        return self.streak + 1.0


def acceptance(correct: jax.Array, mask: jax.Array) -> Acceptance:
    """Sums over blocks of slots 1..: correct [..., W - 1] bool, drafted right; mask [..., W - 1], has a label."""
    right = correct & mask
    survived = jnp.cumprod(right, axis=-1)
    blocks = tuple(range(right.ndim - 1))
    return Acceptance(
        correct=right.sum(blocks).astype(jnp.float32),
        survived=survived.sum(blocks).astype(jnp.float32),
        counted=mask.sum(blocks).astype(jnp.float32),
        blocks=mask[..., 0].sum().astype(jnp.float32),
    )
