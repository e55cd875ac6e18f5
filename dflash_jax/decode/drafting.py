"""What a drafter does while decoding: remember the context of known tokens, and draft the block at an anchor."""

import jax
import jax.numpy as jnp

from dflash_jax.models.cache import KVRows
from dflash_jax.models.drafter import Drafter
from dflash_jax.objective.objective import Frozen, embed_blocks

DraftContext = tuple[KVRows, ...]  # keys and values of each layer, of features before the anchor


def empty_context(drafter: Drafter, rows: int, *, capacity: int, dtype: jnp.dtype) -> DraftContext:
    """The context of `rows` rows before their first token, with room for `capacity` positions."""
    config = drafter.config
    shape = (rows, capacity, config.kv_heads, config.head_width)
    return tuple(KVRows.empty(shape, dtype) for _ in config.layer_types)


def remember(drafter: Drafter, context: DraftContext, features: jax.Array, starts: jax.Array) -> DraftContext:
    """With the features [B, S, T * E] of the tokens from position starts [B] of each row on."""
    positions = starts[:, None] + jnp.arange(features.shape[1])
    added = drafter.context(features.astype(context[0].keys.dtype), positions)
    return tuple(rows.write(*new, starts) for rows, new in zip(context, added, strict=True))


def draft_logits(
    drafter: Drafter, frozen: Frozen, token: jax.Array, anchors: jax.Array, context: DraftContext, *, width: int
) -> jax.Array:
    """[B, W - 1, V'] float32: what the drafter says of the tokens after the anchors.

    token: [B] anchor tokens at positions `anchors` [B], before which the context is read; width: slots of a block.
    """
    block = embed_blocks(token[:, None], frozen, block_size=width, mask_token=drafter.config.mask_token)
    positions = anchors[:, None, None] + jnp.arange(width)
    capacity = context[0].keys.shape[1]
    at = jnp.broadcast_to(jnp.arange(capacity), (token.shape[0], capacity))
    hidden = drafter(
        block,
        positions,
        context,
        visible=(at < anchors[:, None])[:, None],
        context_positions=at,
    )
    return frozen.logits(hidden[:, 0, 1:])
