"""Weights of the slots in the objective, by name.

    decay     w_k = exp(-(k - 1) / gamma)                                  arXiv:2602.06036, appendix A.3
    dpace     c_j = alpha + (1 - alpha) q_j;   w_k = sum_{j >= k} prod_{i <= j} c_i
    uniform   w_k = 1

q_k is the drafter's own probability of the label in slot k, as a constant: with dpace a slot weighs as much as the
accepted tokens that still depend on it. Slots without a label have weight 0 and are passed over by the products.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

# Decay constants of the published recipes by block size (arXiv:2602.06036, appendix A.3).
PUBLISHED_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


def default_gamma(block_size: int) -> float:
    """The decay constant for a block size: published, or interpolated linearly between the published ones."""
    sizes = sorted(PUBLISHED_GAMMA)
    return float(np.interp(block_size, sizes, [PUBLISHED_GAMMA[size] for size in sizes]))


@dataclasses.dataclass(frozen=True)
class Decay:
    """Weights that fall by the factor e every gamma slots; gamma infinite weighs all alike."""

    gamma: float

    def __str__(self) -> str:
        return "uniform weights" if self.gamma == float("inf") else f"decay, gamma {self.gamma:g}"

    def __call__(self, label_probability: jax.Array, mask: jax.Array) -> jax.Array:
        """label_probability, mask: [..., W - 1] by slot from 1 -> weights [..., W - 1], float32."""
        slot = jnp.arange(mask.shape[-1], dtype=jnp.float32)
        return jnp.exp(-slot / self.gamma) * mask


@dataclasses.dataclass(frozen=True)
class Dpace:
    """Weights by the accept length at stake; alpha in (0, 1] keeps slots behind an improbable one alive."""

    alpha: float

    def __str__(self) -> str:
        return f"D-PACE, alpha {self.alpha:g}"

    def __call__(self, label_probability: jax.Array, mask: jax.Array) -> jax.Array:
        """label_probability, mask: [..., W - 1] by slot from 1 -> weights [..., W - 1], float32."""
        smoothed = self.alpha + (1.0 - self.alpha) * label_probability
        reached = jnp.cumprod(jnp.where(mask > 0, smoothed, 1.0), axis=-1) * mask
        at_stake = jnp.flip(jnp.cumsum(jnp.flip(reached, axis=-1), axis=-1), axis=-1)
        return jax.lax.stop_gradient(at_stake * mask)


SlotWeights = Decay | Dpace


def slot_weights(name: str, *, gamma: float, alpha: float) -> SlotWeights:
    """The weighting with this name: `decay` with gamma, `dpace` with alpha, or `uniform`."""
    return {"decay": Decay(gamma), "dpace": Dpace(alpha), "uniform": Decay(float("inf"))}[name]
