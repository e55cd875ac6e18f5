"""Attention of block slots to the context before their anchor and to their own block.

One softmax over both parts, without ever forming a mask between blocks: a block cannot see another block
because it is never offered its keys.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a row with nothing visible has no NaN in its gradient


class Context(NamedTuple):
    """What the blocks of a row may look back at.

    keys, values: [B, S, K, H]; visible: [B, A, S] bool; distance: [B, A, W, S] int32, slot position minus
    context position.
    """

    keys: jax.Array
    values: jax.Array
    visible: jax.Array
    distance: jax.Array


def attend_block(
    queries: jax.Array,
    context: Context,
    block: tuple[jax.Array, jax.Array],
    *,
    causal: bool,
    window: int | None,
) -> jax.Array:
    """Attend from A blocks of W slots; returns [B, A, W, N, H] in the queries' dtype.

    queries: [B, A, W, N, H]; block: keys and values [B, A, W, K, H]. A slot at position q sees a key at
    position p if q - p < window (and p - q < window where the block is not causal); window None is unlimited.
    """
    keys, values = block
    rows, anchors, width, heads, head_width = queries.shape
    kv_heads = keys.shape[3]
    chex.assert_shape(keys, (rows, anchors, width, kv_heads, head_width))
    grouped = queries.reshape(rows, anchors, width, kv_heads, heads // kv_heads, head_width)
    # Key/value heads lead, so that both products are plain batched matrix products without a transposed result.
    grouped = jnp.einsum("BAWKGH->BKAWGH", grouped * head_width**-0.5)

    to_context = jnp.einsum("BKAWGH,BSKH->BKAWGS", grouped, context.keys, preferred_element_type=jnp.float32)
    seen = context.visible[:, :, None, :]
    if window is not None:
        seen = seen & (context.distance < window)
    to_context = jnp.where(seen[:, None, :, :, None], to_context, MASKED)

    to_block = jnp.einsum("BKAWGH,BAXKH->BKAWGX", grouped, keys, preferred_element_type=jnp.float32)
    offset = jnp.arange(width)[:, None] - jnp.arange(width)[None, :]
    allowed = offset >= 0 if causal else jnp.ones_like(offset, bool)
    if window is not None:
        allowed = allowed & (jnp.abs(offset) < window)
    to_block = jnp.where(allowed[:, None], to_block, MASKED)

    # One softmax over the two parts: a shared maximum, a shared denominator, and no concatenated scores.
    highest = jnp.maximum(to_context.max(axis=-1), to_block.max(axis=-1))
    highest = jax.lax.stop_gradient(highest)[..., None]
    from_context, from_block = jnp.exp(to_context - highest), jnp.exp(to_block - highest)
    total = from_context.sum(axis=-1) + from_block.sum(axis=-1)
    out = jnp.einsum("BKAWGS,BSKH->BKAWGH", from_context.astype(values.dtype), context.values)
    out = out + jnp.einsum("BKAWGX,BAXKH->BKAWGH", from_block.astype(values.dtype), values)
    out = jnp.einsum("BKAWGH->BAWKGH", out / total[..., None].astype(out.dtype))
    return out.reshape(queries.shape)
