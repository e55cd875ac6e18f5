"""Cross-entropy through the frozen head, a few blocks at a time, with its gradient computed in the same pass.

    l = W h;   CE = log sum exp l - l_y;   d(sum w CE) / dh = W^T (w (softmax l - onehot y))

The head has no gradient of its own, so the logits of a chunk can be used up on the spot: nothing of size
[blocks, slots, V] is ever alive, and nothing is computed twice.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class HeadResult(NamedTuple):
    """total: sum of weights * losses; losses: [M, X] float32; correct: [M, X], label has the highest logit."""

    total: jax.Array
    losses: jax.Array
    correct: jax.Array


class Head(NamedTuple):
    """The frozen output layer. rows: [V, D]; offsets: [V] float32, added to the logits."""

    rows: jax.Array
    offsets: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def head_loss(hidden: jax.Array, head: Head, labels: jax.Array, weights: jax.Array, chunk: int) -> HeadResult:
    """Weighted cross-entropy of M blocks with X slots each; only `hidden` receives a gradient, from `total`.

    hidden: [M, X, D]; labels: [M, X] int32 rows of the head; weights: [M, X] float32;
    chunk: blocks whose logits are alive at a time. Products accumulate in float32.
    """
    result, _ = _in_chunks(hidden, head, labels, weights, chunk=chunk, differentiate=False)
    return result


def _forward(hidden, head, labels, weights, chunk):
    result, gradient = _in_chunks(hidden, head, labels, weights, chunk=chunk, differentiate=True)
    return result, (gradient, head, weights)


def _backward(chunk, residuals, cotangent: HeadResult):
    gradient, head, weights = residuals
    scaled = (cotangent.total * gradient.astype(jnp.float32)).astype(gradient.dtype)
    return scaled, jax.tree.map(jnp.zeros_like, head), None, jnp.zeros_like(weights)


head_loss.defvjp(_forward, _backward)


def _in_chunks(hidden, head, labels, weights, *, chunk: int, differentiate: bool):
    blocks = hidden.shape[0]
    chunk = min(chunk, blocks)
    count = -(-blocks // chunk)

    def cut(values: jax.Array) -> jax.Array:
        padding = ((0, count * chunk - blocks),) + ((0, 0),) * (values.ndim - 1)
        return jnp.pad(values, padding).reshape(count, chunk, *values.shape[1:])

    def joined(values: jax.Array) -> jax.Array:
        return values.reshape(count * chunk, *values.shape[2:])[:blocks]

    def one(part):
        return _one_chunk(*part, head=head, differentiate=differentiate)

    losses, correct, gradient = jax.lax.map(one, (cut(hidden), cut(labels), cut(weights)))
    losses, correct = joined(losses), joined(correct)
    return HeadResult((losses * weights).sum(), losses, correct), joined(gradient)


def _one_chunk(hidden, labels, weights, *, head: Head, differentiate: bool):
    rows = head.rows.astype(hidden.dtype)
    logits = jnp.einsum("MXD,VD->MXV", hidden, rows, preferred_element_type=jnp.float32) + head.offsets
    highest = logits.max(axis=-1)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    exponentials = jnp.exp(logits - highest[..., None])
    total = exponentials.sum(axis=-1)
    losses = jnp.log(total) + highest - chosen
    if not differentiate:
        return losses, chosen >= highest, jnp.zeros_like(hidden)
    is_label = jnp.arange(rows.shape[0]) == labels[..., None]
    slope = exponentials * (weights / total)[..., None] - jnp.where(is_label, weights[..., None], 0.0)
    gradient = jnp.einsum("MXV,VD->MXD", slope.astype(hidden.dtype), rows, preferred_element_type=jnp.float32)
    return losses, chosen >= highest, gradient.astype(hidden.dtype)
