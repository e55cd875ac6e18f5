"""The frozen head and the losses behind it, a few blocks at a time, with their gradient found in the same pass.

    l = softcap(W h + offset);   log q = log softmax l;   total = sum_slots w_k sum_terms c_t loss_t(q, p, label)

The head has no gradient of its own, so the logits of a chunk can be used up on the spot: its losses, its weights
and d total / d h come out together, and nothing of size [blocks, slots, V] is ever alive. All of it is float32.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.models.layers import product
from dflash_jax.objective.slot_weights import SlotWeights
from dflash_jax.objective.terms import overlap, term_loss


class Head(NamedTuple):
    """The frozen output layer. rows: [V, E]; offsets: [V] float32, added to the drafter's logits;
    softcap: [] float32, c in c tanh(l / c), or None."""

    rows: jax.Array
    offsets: jax.Array
    softcap: jax.Array | None = None

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., V] float32 logits of hidden states [..., E], without the offsets."""
        logits = product(hidden, self.rows, dtype=jnp.float32)
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)


class Slots(NamedTuple):
    """Proposals of M blocks with X slots each. hidden: [M, X, E] drafter states; labels: [M, X] int32 rows of
    the head; mask: [M, X] bool, has a label; teacher: [M, X, E] target states for the same tokens, or None."""

    hidden: jax.Array
    labels: jax.Array
    mask: jax.Array
    teacher: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Rule:
    """How slots become one number. terms: (name, factor) pairs (objective/terms.py); weights: of the slots."""

    terms: tuple[tuple[str, float], ...]
    weights: SlotWeights

    def __str__(self) -> str:
        return f"{' + '.join(f'{factor:g} {name}' for name, factor in self.terms)}, slots by {self.weights}"


class HeadResult(NamedTuple):
    """total: sum of weighted losses, the one that is differentiated; weight: sum of the weights;
    terms: by name the sum of weighted losses of a term, without its factor; ranks: [M, X] int32, how many tokens
    the drafter puts before the label; overlaps: [M, X] float32, sum min(p, q), 0 without a teacher."""

    total: jax.Array
    weight: jax.Array
    terms: dict[str, jax.Array]
    ranks: jax.Array
    overlaps: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def head_loss(slots: Slots, head: Head, rule: Rule, chunk: int) -> HeadResult:
    """Losses of all slots; only `slots.hidden` receives a gradient, from `total`.

    chunk: blocks whose logits are alive at a time.
    """
    return _in_chunks(slots, head, rule, chunk=chunk, differentiate=False)[0]


def _forward(slots, head, rule, chunk):
    result, gradient = _in_chunks(slots, head, rule, chunk=chunk, differentiate=True)
    return result, (gradient, slots, head)


def _backward(rule, chunk, residuals, cotangent: HeadResult):
    gradient, slots, head = residuals
    scaled = (cotangent.total * gradient.astype(jnp.float32)).astype(gradient.dtype)
    teacher = None if slots.teacher is None else jnp.zeros_like(slots.teacher)
    return Slots(scaled, None, None, teacher), jax.tree.map(jnp.zeros_like, head)  # pyright: ignore[reportArgumentType]


head_loss.defvjp(_forward, _backward)


def _in_chunks(slots: Slots, head: Head, rule: Rule, *, chunk: int, differentiate: bool):
    blocks = slots.hidden.shape[0]
    chunk = min(chunk, blocks)
    count = -(-blocks // chunk)

    def cut(values: jax.Array) -> jax.Array:
        padding = ((0, count * chunk - blocks),) + ((0, 0),) * (values.ndim - 1)
        return jnp.pad(values, padding).reshape(count, chunk, *values.shape[1:])

    def joined(values: jax.Array) -> jax.Array:
        return values.reshape(count * chunk, *values.shape[2:])[:blocks]

    def one(part: Slots):
        def total(hidden: jax.Array) -> tuple[jax.Array, HeadResult]:
            result = _one_chunk(part._replace(hidden=hidden), head, rule)
            return result.total, result

        if differentiate:
            (_, result), gradient = jax.value_and_grad(total, has_aux=True)(part.hidden)
            return result, gradient
        return total(part.hidden)[1], None

    results, gradient = jax.lax.map(one, jax.tree.map(cut, slots))
    sums = jax.tree.map(lambda values: values.sum(axis=0), results._replace(ranks=None, overlaps=None))
    result = sums._replace(ranks=joined(results.ranks), overlaps=joined(results.overlaps))
    return result, joined(gradient) if differentiate else None


def _one_chunk(slots: Slots, head: Head, rule: Rule) -> HeadResult:
    logits = head.logits(slots.hidden) + head.offsets
    is_label = jnp.arange(logits.shape[-1]) == slots.labels[..., None]
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # A sum, not a gather: its gradient is a selection too, where that of a gather would be a scatter.
    chosen = jnp.where(is_label, logits, 0.0).sum(axis=-1)
    ce, log_q = log_total[..., 0] - chosen, logits - log_total
    log_p, overlaps = None, jnp.zeros_like(ce)
    if slots.teacher is not None:
        log_p = jax.nn.log_softmax(head.logits(slots.teacher), axis=-1)
        overlaps = overlap(log_p, log_q)
    weights = jax.lax.stop_gradient(rule.weights(jnp.exp(-ce), slots.mask.astype(jnp.float32)))
    terms = {name: (weights * term_loss(name, ce=ce, log_q=log_q, log_p=log_p)).sum() for name, _ in rule.terms}
    total = sum(factor * terms[name] for name, factor in rule.terms)
    # Ties go to the lower row, as argmax does while decoding.
    before = (logits == chosen[..., None]) & (jnp.arange(logits.shape[-1]) < slots.labels[..., None])
    ranks = ((logits > chosen[..., None]) | before).sum(axis=-1)
    return HeadResult(jnp.asarray(total), weights.sum(), terms, ranks, overlaps)
