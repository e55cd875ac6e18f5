"""A softmax over part of the vocabulary that estimates the whole: cheap training, full-vocabulary drafting.

    Z = sum_v exp l_v  ~  sum_{v in data} exp l_v + (V - V_data) / M * sum_{v in sample} exp l_v

All tokens that occur as labels are in it every time; M of the others are drawn anew for each step and stand for
all of them. The estimate of Z is unbiased, so tokens that never occur are still pushed down, and the drafter may
be used with the target's whole head.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """One draw: key, the address of its randomness, and size, the tokens in it."""

    key: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of_step(cls, step: jax.Array, *, seed: int, size: int) -> Self:
        """The draw of an optimizer step [] int32: the same for all its rows, however they are batched."""
        return cls(jax.random.fold_in(jax.random.key(seed), step), size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadSample:
    """labels: [V_data] int32, ascending, tokens that occur as labels; others: [V - V_data] int32, the rest."""

    labels: jax.Array
    others: jax.Array

    @classmethod
    def split(cls, counts: np.ndarray, *, vocab: int) -> Self:
        """From how often each token is a label. counts: [<= V] int."""
        occurs = np.pad(counts, (0, vocab - len(counts))) > 0
        return cls(np.flatnonzero(occurs).astype(np.int32), np.flatnonzero(~occurs).astype(np.int32))  # pyright: ignore[reportArgumentType]

    def draw(self, draw: Draw) -> tuple[jax.Array, jax.Array]:
        """`draw.size` tokens [size] int32, labels first, and what to add to their logits [size] float32."""
        extra = draw.size - self.labels.shape[0]
        drawn = self.others[jax.random.randint(draw.key, (extra,), 0, self.others.shape[0])]
        correction = jnp.log(self.others.shape[0] / extra)
        offsets = jnp.concatenate([jnp.zeros(self.labels.shape), jnp.full((extra,), correction)])
        return jnp.concatenate([self.labels, drawn]), offsets.astype(jnp.float32)
