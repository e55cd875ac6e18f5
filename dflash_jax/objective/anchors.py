"""Where blocks start, and what their slots must predict.

An anchor a is valid if tokens a and a + 1 are both supervised and in one document: at inference the anchor is
always a generated token, and a block whose first proposal is not generated text never occurs. Blocks may run
over the end of the text; the slots past it carry no label.
"""

import jax
import jax.numpy as jnp

from dflash_jax.batch import Batch


def valid_anchors(loss_mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """[B, S] bool: positions where a block may start. loss_mask: [B, S] bool; segment_ids: [B, S], 0 = pad."""
    same = (segment_ids[:, :-1] == segment_ids[:, 1:]) & (segment_ids[:, :-1] != 0)
    pair = loss_mask[:, :-1] & loss_mask[:, 1:] & same
    return jnp.pad(pair, ((0, 0), (0, 1)))


def token_keys(seed: int, batch: Batch) -> jax.Array:
    """One random key per token [B, S], a function of (seed, pass, record, position in the record) alone.

    So what is drawn for a record does not depend on the batch, the row, the mesh or the host that it is on, and
    nothing random has to be saved.
    """
    key = jax.random.key(seed)
    # Padding takes the key of some record; nothing is ever drawn for it.
    records = jnp.take_along_axis(batch.record_ids, jnp.maximum(batch.segment_ids - 1, 0), axis=1)

    def one(epoch: jax.Array, record: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, epoch), record), position)

    of_row = jax.vmap(one, in_axes=(None, 0, 0))
    return jax.vmap(of_row)(batch.epochs, records, batch.positions)


def draw_anchors(keys: jax.Array, valid: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Draw up to `count` anchors per row, uniformly and without replacement.

    keys: [B, S]; valid: [B, S] bool. Returns anchors [B, A] int32, ascending, and kept [B, A] bool; A is `count`,
    and entries that are not kept (rows with fewer valid positions) hold 0. A packed row's anchors fall on its
    records in proportion to their valid positions.
    """
    width = valid.shape[1]
    scores = jax.vmap(jax.vmap(jax.random.uniform))(keys)
    scores = jnp.where(valid, scores, -1.0)
    if count > width:
        scores = jnp.pad(scores, ((0, 0), (0, count - width)), constant_values=-1.0)
    best, index = jax.lax.top_k(scores, count)
    index = jnp.sort(jnp.where(best >= 0, index, width), axis=1)
    kept = index < width
    return jnp.where(kept, index, 0).astype(jnp.int32), kept


def block_anchors(batch: Batch, *, seed: int, count: int) -> tuple[jax.Array, jax.Array]:
    """`draw_anchors` for the records of a batch in its pass."""
    return draw_anchors(token_keys(seed, batch), valid_anchors(batch.loss_mask, batch.segment_ids), count)


def block_labels(
    tokens: jax.Array,
    loss_mask: jax.Array,
    segment_ids: jax.Array,
    *,
    anchors: jax.Array,
    kept: jax.Array,
    width: int,
) -> tuple[jax.Array, jax.Array]:
    """Labels [B, A, W] int32 and their mask [B, A, W] bool; slot k of anchor a has label tokens[a + k].

    The mask is the prefix product over slots 1.. of (in bounds, same document, supervised): a verify run
    stops at the first position that is not generated text, so nothing behind it is learned. Slot 0 is
    never a label.
    """
    length = tokens.shape[1]
    index = anchors[:, :, None] + jnp.arange(width)
    inside = index < length
    index = jnp.minimum(index, length - 1)

    def take(values: jax.Array) -> jax.Array:
        return jax.vmap(lambda row, at: row[at])(values, index)

    segments = take(segment_ids)
    good = inside & take(loss_mask) & (segments == segments[:, :, :1]) & kept[:, :, None]
    good = good.at[:, :, 0].set(kept)
    mask = jnp.cumprod(good, axis=-1).astype(bool).at[:, :, 0].set(False)
    return take(tokens), mask
