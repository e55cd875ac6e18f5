"""Gated delta-net layers (linear attention) of the Qwen3.5 family: whole rows, cached steps and what they keep.

    q, k, v = silu(conv(W_qkv x));   beta = sigmoid(W_b x);   g = -exp(A_log) softplus(W_a x + dt_bias)
    out     = W_out (w * rms_norm(delta_rule(q, k, v, g, beta)) * silu(W_z x))

The convolution runs over the last `kernel` tokens of each channel. What a layer remembers of the tokens before
is therefore their last kernel - 1 inputs of the convolution and one state of the delta rule.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.delta_rule import along_tree, chunked, stepwise
from dflash_jax.models.layers import Linear, weight

# Up to so many tokens the recurrence itself runs, and results do not depend on where steps are cut.
MOST_STEPWISE = 64


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """Sizes of one layer; `kernel` is in tokens, `value_heads` a multiple of `key_heads`."""

    width: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    kernel: int
    norm_eps: float

    @property
    def keys(self) -> int:
        """Channels of all key heads; queries have as many."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaMemory:
    """What a layer remembers of each row: the same size however long the row is.

    conv: [B, kernel - 1, C], the last inputs of the convolution, in the activation's dtype; zeros where the
    row has seen fewer. state: [B, N, Dk, Dv] float32.
    """

    conv: jax.Array
    state: jax.Array

    @classmethod
    def empty(cls, config: DeltaNetConfig, rows: int, dtype: jnp.dtype) -> Self:
        """The memory of `rows` rows that have seen nothing, for activations of `dtype`."""
        c = config
        return cls(
            conv=jnp.zeros((rows, c.kernel - 1, c.channels), dtype),
            state=jnp.zeros((rows, c.value_heads, c.key_width, c.value_width), jnp.float32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaExtension:
    """A step that is not yet decided: the memory before it, and what its S tokens would write.

    conv: [B, S, C]; k: [B, S, G, Dk]; v: [B, S, N, Dv], both after the convolution; g, beta: [B, S, N].
    """

    before: DeltaMemory
    conv: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array

    def keep(self, count: jax.Array, *, path: jax.Array | None = None) -> DeltaMemory:
        """The memory after the first `count` [B] int32 tokens of the step; the others leave no trace in it.

        path: [B, D] int32, the nodes of a tree from which the first `count` count, each the parent of the
        next and the first one without a parent; entries past `count` may be any.
        """
        tokens = (self.conv, self.k, self.v, self.g, self.beta)
        if path is not None:
            tokens = tuple(jax.vmap(lambda row, nodes: row[nodes])(x, path) for x in tokens)
        conv, *written = tokens
        kept = jnp.arange(conv.shape[1]) < count[:, None]
        k, v, g, beta = (jnp.where(jnp.expand_dims(kept, range(2, x.ndim)), x, 0) for x in written)
        # There is nothing to read, so any queries do.
        _, state = _chain(k, k, v, g, beta, state=self.before.state)
        inputs = jnp.concatenate([self.before.conv, conv], axis=1)
        last = count[:, None] + jnp.arange(self.before.conv.shape[1])
        return DeltaMemory(jnp.take_along_axis(inputs, last[..., None], axis=1), state)


class DepthwiseConv(nnx.Module):
    """silu of a weighted sum over the last `kernel` tokens, each channel on its own."""

    def __init__(self, rngs: nnx.Rngs, channels: int, kernel: int):
        self.weight = weight(rngs, "delta_channels single kernel", channels, 1, kernel)

    def __call__(self, window: list[jax.Array]) -> jax.Array:
        """window: the inputs [B, S, C] of kernel - 1 tokens back, ..., one token back and of the token itself."""
        factors = self.weight.astype(jnp.float32)[:, 0].T
        y = sum(factor * x.astype(jnp.float32) for factor, x in zip(factors, window, strict=True))
        return jax.nn.silu(jnp.asarray(y)).astype(window[-1].dtype)


class GatedNorm(nnx.Module):
    """w * y / rms(y) * silu(gate) over the width of a head, in float32."""

    def __init__(self, rngs: nnx.Rngs, size: int, *, eps: float):
        self.eps = eps
        self.weight = weight(rngs, "head", size, init=nnx.initializers.ones)

    def __call__(self, y: jax.Array, gate: jax.Array) -> jax.Array:
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return self.weight.astype(jnp.float32) * y * jax.nn.silu(gate.astype(jnp.float32))


class GatedDeltaNet(nnx.Module):
    """The layer; parameters are named as in the checkpoint."""

    def __init__(self, config: DeltaNetConfig, rngs: nnx.Rngs):
        c = self.config = config
        self.in_proj_qkv = Linear(rngs, "delta_channels embed", c.channels, c.width)
        self.in_proj_z = Linear(rngs, "delta_values embed", c.values, c.width)
        self.in_proj_b = Linear(rngs, "delta_heads embed", c.value_heads, c.width)
        self.in_proj_a = Linear(rngs, "delta_heads embed", c.value_heads, c.width)
        self.conv1d = DepthwiseConv(rngs, c.channels, c.kernel)
        # Rounded to bf16, the decay of a long document would be another one.
        rates = jax.random.uniform(rngs.params(), (c.value_heads,), minval=1.0, maxval=16.0)
        self.A_log = nnx.Param(jnp.log(rates), axes=("delta_heads",), keep_dtype=True)
        self.dt_bias = weight(rngs, "delta_heads", c.value_heads, init=nnx.initializers.ones)
        self.norm = GatedNorm(rngs, c.value_width, eps=c.norm_eps)
        self.out_proj = Linear(rngs, "embed delta_values", c.width, c.values)

    def __call__(self, x: jax.Array, *, segment_ids: jax.Array) -> jax.Array:
        """[B, S, E] of whole rows x [B, S, E]; a token sees the tokens before it in its own segment [B, S]."""
        conv = self.in_proj_qkv(x)

        def back(tokens: int) -> jax.Array:
            own = _shift(segment_ids, tokens) == segment_ids
            return jnp.where(own[..., None], _shift(conv, tokens), 0)

        window = [back(tokens) for tokens in reversed(range(1, self.config.kernel))]
        q, k, v = self._heads(self.conv1d([*window, conv]))
        with jax.named_scope("delta_rule"):
            y, _ = chunked(q, k, v, *self._gates(x), segment_ids=segment_ids)
        return self._out(y, x)

    def step(
        self, x: jax.Array, memory: DeltaMemory, *, parents: jax.Array | None = None
    ) -> tuple[jax.Array, DeltaExtension]:
        """Outputs [B, S, E] of S tokens x [B, S, E] after `memory`, and what decides which of them stay.

        parents: [B, S] int32, each token's parent among the tokens, always an earlier one, or -1 for one that
        follows the memory. None: a chain.
        """
        conv = self.in_proj_qkv(x)
        inputs = jnp.concatenate([memory.conv, conv], axis=1)
        window = _chain_window(inputs, x.shape[1]) if parents is None else _tree_window(inputs, parents)
        q, k, v = self._heads(self.conv1d(window))
        g, beta = self._gates(x)
        with jax.named_scope("delta_rule"):
            if parents is None:
                y, _ = _chain(q, k, v, g, beta, state=memory.state)
            else:
                y = along_tree(q, k, v, g, beta, state=memory.state, parents=parents)
        return self._out(y, x), DeltaExtension(memory, conv, k, v, g, beta)

    def _heads(self, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        c = self.config
        q, k, v = jnp.split(mixed, (c.keys, 2 * c.keys), axis=-1)
        q, k = (x.reshape(*x.shape[:2], c.key_heads, c.key_width) for x in (q, k))
        return q, k, v.reshape(*v.shape[:2], c.value_heads, c.value_width)

    def _gates(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """g and beta, [B, S, N] float32."""
        a, b = (project(x).astype(jnp.float32) for project in (self.in_proj_a, self.in_proj_b))
        rate = jnp.exp(self.A_log.astype(jnp.float32))
        return -rate * jax.nn.softplus(a + self.dt_bias.astype(jnp.float32)), jax.nn.sigmoid(b)

    def _out(self, y: jax.Array, x: jax.Array) -> jax.Array:
        y = self.norm(y, self.in_proj_z(x).reshape(y.shape)).astype(x.dtype)
        return self.out_proj(y.reshape(*x.shape[:2], -1))


def _chain(q, k, v, g, beta, *, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The delta rule over tokens that follow each other, in the form that suits their number."""
    form = stepwise if k.shape[1] <= MOST_STEPWISE else chunked
    return form(q, k, v, g, beta, state=state)


def _shift(x: jax.Array, tokens: int) -> jax.Array:
    """x [B, S, ...] of so many tokens back, with zeros at the start of the row."""
    zeros = jnp.zeros_like(x[:, :tokens])
    return jnp.concatenate([zeros, x], axis=1)[:, : x.shape[1]]


def _chain_window(inputs: jax.Array, length: int) -> list[jax.Array]:
    """Inputs [B, kernel - 1 + S, C] as seen by each of the last `length` S tokens, the furthest first."""
    return [inputs[:, start : start + length] for start in range(inputs.shape[1] - length + 1)]


def _tree_window(inputs: jax.Array, parents: jax.Array) -> list[jax.Array]:
    """As `_chain_window`, where a token comes after its parent; parents: [B, S]."""
    rows, length = parents.shape
    remembered = inputs.shape[1] - length
    # Where the token before each of the inputs lies; nothing reaches the one before the first.
    before = jnp.broadcast_to(jnp.arange(remembered) - 1, (rows, remembered))
    before = jnp.concatenate([before, parents + remembered], axis=1)
    at = jnp.broadcast_to(remembered + jnp.arange(length), (rows, length))
    window = []
    for _ in range(remembered + 1):
        window.append(jnp.take_along_axis(inputs, at[..., None], axis=1))
        at = jnp.take_along_axis(before, at, axis=1)
    return window[::-1]
