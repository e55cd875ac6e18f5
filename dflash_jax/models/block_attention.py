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
    grouped = grouped * head_width**-0.5

    to_context = jnp.einsum("BAWKGH,BSKH->BAKGWS", grouped, context.keys, preferred_element_type=jnp.float32)
    seen = context.visible[:, :, None, :]
    if window is not None:
        seen = seen & (context.distance < window)
    to_context = jnp.where(seen[:, :, None, None], to_context, MASKED)

    to_block = jnp.einsum("BAWKGH,BAXKH->BAKGWX", grouped, keys, preferred_element_type=jnp.float32)
    offset = jnp.arange(width)[:, None] - jnp.arange(width)[None, :]
    allowed = offset >= 0 if causal else jnp.ones_like(offset, bool)
    if window is not None:
        allowed = allowed & (jnp.abs(offset) < window)
    to_block = jnp.where(allowed, to_block, MASKED)

    scores = jnp.concatenate([to_context, to_block], axis=-1)
    shares = jax.nn.softmax(scores, axis=-1).astype(queries.dtype)
    from_context, from_block = jnp.split(shares, [context.keys.shape[1]], axis=-1)
    out = jnp.einsum("BAKGWS,BSKH->BAWKGH", from_context, context.values)
    out = out + jnp.einsum("BAKGWX,BAXKH->BAWKGH", from_block, values)
    return out.reshape(queries.shape)
