"""Softmax attention of a target: grouped queries, rotary positions, and what families add to them.

q, k, v = W x (+ b);   q, k = norm(q), norm(k) per head;   rotate q, k
y = softmax(q k^T / sqrt H) v  over visible keys;   y = y * sigmoid(gate);   out = W_o y (+ b)
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.cache import KVRows
from dflash_jax.models.layers import Linear, RMSNorm
from dflash_jax.models.rope import rotate

QUERY_CHUNK = 512


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """input_bias, output_bias: biases of q, k, v and of o; head_norms: norms of q and k over a head's channels,
    with (1 + w) where unit_offset; gated: q_proj gives each head a gate beside its query."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    norm_eps: float
    input_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    unit_offset: bool = False
    gated: bool = False


class Attention(nnx.Module):
    def __init__(self, config: AttentionConfig, rngs: nnx.Rngs):
        c = self.config = config
        queries, keys = c.heads * c.head_width, c.kv_heads * c.head_width
        q_rows = 2 * queries if c.gated else queries
        self.q_proj = Linear(rngs, "heads embed", q_rows, c.width, bias=c.input_bias)
        self.k_proj = Linear(rngs, "kv_heads embed", keys, c.width, bias=c.input_bias)
        self.v_proj = Linear(rngs, "kv_heads embed", keys, c.width, bias=c.input_bias)
        self.o_proj = Linear(rngs, "embed heads", c.width, queries, bias=c.output_bias)
        if c.head_norms:
            self.q_norm, self.k_norm = (
                RMSNorm(rngs, "head", c.head_width, eps=c.norm_eps, unit_offset=c.unit_offset) for _ in "qk"
            )

    @jax.named_scope("attention")
    def __call__(
        self, x: jax.Array, table: tuple[jax.Array, jax.Array], visible: jax.Array, cached: KVRows | None, starts
    ) -> tuple[jax.Array, KVRows | None]:
        """x: [B, S, E] -> the same shape, and `cached` with the keys and values of x.

        visible: [B, S, T]; cached: T positions to write to from starts [B] on, or None for whole rows (T = S).
        """
        c, shape = self.config, x.shape[:2]
        q = self.q_proj(x).reshape(*shape, c.heads, -1)
        q, gate = (q[..., : c.head_width], q[..., c.head_width :]) if c.gated else (q, None)
        k = self.k_proj(x).reshape(*shape, c.kv_heads, c.head_width)
        v = self.v_proj(x).reshape(*shape, c.kv_heads, c.head_width)
        if c.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, table), rotate(k, table)
        if cached is not None:
            k, v = cached = cached.write(k, v, starts)
        y = attend(q, k.astype(q.dtype), v.astype(q.dtype), visible)
        if gate is not None:
            y = y * jax.nn.sigmoid(gate)
        return self.o_proj(y.reshape(*shape, -1)), cached


def attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """[B, S, N, H] from queries of that shape, keys and values [B, T, K, H] and visible [B, S, T].

    Long rows are run QUERY_CHUNK queries at a time, so that scores take [B, N, QUERY_CHUNK, T] and not S x T.
    """
    count = q.shape[1]
    if count <= QUERY_CHUNK:
        return jax.nn.dot_product_attention(q, k, v, mask=visible[:, None])
    chunks = -(-count // QUERY_CHUNK)

    def pieces(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, chunks * QUERY_CHUNK - count)) + ((0, 0),) * (x.ndim - 2))
        return padded.reshape(x.shape[0], chunks, QUERY_CHUNK, *x.shape[2:]).swapaxes(0, 1)

    y = jax.lax.map(
        lambda piece: jax.nn.dot_product_attention(piece[0], k, v, mask=piece[1][:, None]),
        (pieces(q), pieces(visible)),
    )
    return y.swapaxes(0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :count]
