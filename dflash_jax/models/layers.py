"""Parts that every model is made of: named weights, projections, norms, the SwiGLU MLP and RoPE.

Weights keep the checkpoint's layout [out, in] and the checkpoint's names, so that a parameter's path in the
module tree *is* its name in the file and nothing is ever transposed on the way in or out.
Parameters keep the dtype they were made with; they are cast to the activation's dtype where they are used.
Norms and rotations are computed in float32 and cast back.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.yarn import Yarn

Init = Callable[..., jax.Array]  # (key, shape, dtype) -> array


def weight(rngs: nnx.Rngs, axes: str, *shape: int, init: Init | None = None) -> nnx.Param:
    """A float32 parameter whose dimensions are named, e.g. ``weight(rngs, "mlp embed", F, D)``."""
    init = init or nnx.initializers.normal(0.02)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=tuple(axes.split()))


class Linear(nnx.Module):
    """y = W x (+ b) with W of [out, in]; `axes` names the two dimensions, output first."""

    def __init__(self, rngs: nnx.Rngs, axes: str, *shape: int, bias: bool = False):
        self.weight = weight(rngs, axes, *shape)
        if bias:
            self.bias = weight(rngs, axes.split()[0], shape[0], init=nnx.initializers.zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.einsum("...i,oi->...o", x, self.weight.astype(x.dtype))
        return y + self.bias.astype(x.dtype) if hasattr(self, "bias") else y


class RMSNorm(nnx.Module):
    """x / rms(x) * w over the last axis."""

    def __init__(self, rngs: nnx.Rngs, axis: str, size: int, *, eps: float):
        self.eps = eps
        self.weight = weight(rngs, axis, size, init=nnx.initializers.ones)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight.astype(jnp.float32)).astype(x.dtype)


class Embedding(nnx.Module):
    """Rows of a [V, D] table."""

    def __init__(self, rngs: nnx.Rngs, vocab: int, width: int):
        self.weight = weight(rngs, "vocab embed", vocab, width)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.weight[...][tokens]


class SwiGLU(nnx.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, rngs: nnx.Rngs, width: int, mlp_width: int, *, bias: bool = False):
        self.gate_proj = Linear(rngs, "mlp embed", mlp_width, width, bias=bias)
        self.up_proj = Linear(rngs, "mlp embed", mlp_width, width, bias=bias)
        self.down_proj = Linear(rngs, "embed mlp", width, mlp_width, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_table(
    positions: jax.Array, head_width: int, *, theta: float, yarn: Yarn | None = None
) -> tuple[jax.Array, jax.Array]:
    """(sin, cos) of positions [...] for all channel pairs: two float32 arrays of [..., H / 2]."""
    half = head_width // 2
    # TRAP: these tables must never be rounded to bf16; at theta 1e6 position 3000 would be 3.5 rad off.
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if yarn is not None:
        ramp = yarn.ramp(head_width, theta=theta)
        frequency = frequency * (1 - ramp + ramp / yarn.factor)
    angle = positions.astype(jnp.float32)[..., None] * frequency
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    if yarn is not None:
        sin, cos = sin * yarn.attention_factor, cos * yarn.attention_factor
    # Without the barrier XLA computes the sines again in every layer, head and gradient that uses them.
    return jax.lax.optimization_barrier((sin, cos))


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Apply rotary positions (rotate-half form) to x [..., N, H] with tables of [..., H / 2]."""
    sin, cos = (t[..., None, :] for t in table)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
