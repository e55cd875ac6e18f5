"""Parts that every model is made of: named weights, projections, norms and the SwiGLU MLP.

Weights keep the checkpoint's layout [out, in] and the checkpoint's names, so that a parameter's path in the
module tree *is* its name in the file and nothing is ever transposed on the way in or out.
Parameters keep the dtype they were made with; they are cast to the activation's dtype where they are used.
Norms are computed in float32 and cast back.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

FEW_ROWS = 32  # on a CPU; of more, copying a weight costs less than its product

Init = Callable[..., jax.Array]  # (key, shape, dtype) -> array


def weight(rngs: nnx.Rngs, axes: str, *shape: int, init: Init | None = None) -> nnx.Param:
    """A float32 parameter whose dimensions are named, e.g. ``weight(rngs, "mlp embed", F, D)``."""
    init = init or nnx.initializers.normal(0.02)
    return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=tuple(axes.split()))


def product(x: jax.Array, weight: jax.Array, *, dtype: jnp.dtype | None = None) -> jax.Array:
    """W x, [..., O] from x [..., I] and W [O, I], in `dtype`: float32, or None for x's own."""
    weight = weight.astype(x.dtype)
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and x.dtype == jnp.bfloat16:
        y = _bfloat16_on_cpu(flat, weight)
    elif on_cpu and x.dtype == jnp.float32 and 1 < flat.shape[0] <= FEW_ROWS:
        y = _few_rows_on_cpu(flat, weight)
    else:
        return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=dtype)
    return y.reshape(*x.shape[:-1], -1).astype(dtype or x.dtype)


def _bfloat16_on_cpu(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[R, O] float32 in the one form for which XLA uses a processor's own instructions for bfloat16.

    That is two rows or more, of two dimensions, and a float32 result: for one row there is a loop eight times as
    slow, of more dimensions the weight is transposed first, and for a bfloat16 result it is turned to float32.
    """
    rows = jnp.concatenate([x, x]) if x.shape[0] == 1 else x
    y = jnp.einsum("ri,oi->ro", rows, weight, preferred_element_type=jnp.float32)
    return y[: x.shape[0]]


def _few_rows_on_cpu(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[R, O] of a few rows, such as a block's, with the weight as the left factor.

    XLA copies the right factor into another layout at each call, which for a weight costs more than the product.
    The barrier keeps it from exchanging the factors again; whole eights of rows are its kernels' fast case.
    """
    rows = jnp.pad(x, ((0, -x.shape[0] % 8), (0, 0)))
    y = jax.lax.optimization_barrier(jnp.einsum("oi,ri->or", weight, rows))
    return y.T[: x.shape[0]]


class Linear(nnx.Module):
    """y = W x (+ b) with W of [out, in]; `axes` names the two dimensions, output first."""

    def __init__(self, rngs: nnx.Rngs, axes: str, *shape: int, bias: bool = False):
        self.weight = weight(rngs, axes, *shape)
        if bias:
            self.bias = weight(rngs, axes.split()[0], shape[0], init=nnx.initializers.zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = product(x, self.weight[...])
        return y + self.bias.astype(x.dtype) if hasattr(self, "bias") else y


class RMSNorm(nnx.Module):
    """x / rms(x) * w over the last axis, or * (1 + w) with a unit offset."""

    def __init__(self, rngs: nnx.Rngs, axis: str, size: int, *, eps: float, unit_offset: bool = False):
        self.eps, self.unit_offset = eps, unit_offset
        init = nnx.initializers.zeros if unit_offset else nnx.initializers.ones
        self.weight = weight(rngs, axis, size, init=init)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = self.weight.astype(jnp.float32)
        return (y * (1 + scale if self.unit_offset else scale)).astype(x.dtype)


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

    @jax.named_scope("mlp")
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
