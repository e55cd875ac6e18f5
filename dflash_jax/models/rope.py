"""Rotary positions: frequencies, tables of sines and cosines, and the rotation of heads.

f_i = theta^(-2i / R)                                  i: pair of the R rotated channels of a head
f'_i = f_i (1 - ramp_i + ramp_i / factor)              where a scaling stretches the context
pair i of a token at position p turns by p f'_i        rotate-half form: channel i goes with channel i + R / 2
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models.yarn import Yarn


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's stretched context: pairs that turn often over the original length stay, those that turn seldom
    are divided by the factor, with a ramp between `low` and `high` turns."""

    factor: float
    original_length: int
    low: float
    high: float
    attention_factor: float = 1.0

    def ramp(self, width: int, *, theta: float) -> np.ndarray:
        """[R / 2] float32 from 0 (frequency kept) to 1 (divided by the factor)."""
        half = width // 2
        turns = self.original_length * theta ** (-np.arange(half) / half) / (2 * math.pi)
        return np.clip((self.high - turns) / (self.high - self.low), 0, 1).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Rope:
    """theta: the base; width: R, leading channels of a head that are rotated; scaling: of a stretched context."""

    theta: float
    width: int
    scaling: Yarn | Llama3Scaling | None = None

    def table(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(sin, cos) of positions [...] for all channel pairs: two float32 arrays of [..., R / 2]."""
        half, scaling = self.width // 2, self.scaling
        # TRAP: these tables must never be rounded to bf16; at theta 1e6 position 3000 would be 3.5 rad off.
        frequency = self.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
        if scaling is not None:
            ramp = scaling.ramp(self.width, theta=self.theta)
            frequency = frequency * (1 - ramp + ramp / scaling.factor)
        angle = positions.astype(jnp.float32)[..., None] * frequency
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        if scaling is not None:
            sin, cos = sin * scaling.attention_factor, cos * scaling.attention_factor
        # Without the barrier XLA computes the sines again in every layer, head and gradient that uses them.
        return jax.lax.optimization_barrier((sin, cos))


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn the leading R channels of x [..., N, H] by tables of [..., R / 2]; the others pass through."""
    sin, cos = (t[..., None, :] for t in table)
    half = sin.shape[-1]
    first, second = (x[..., part].astype(jnp.float32) for part in (slice(half), slice(half, 2 * half)))
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), x[..., 2 * half :]], axis=-1)
