"""The chunked head against plain automatic differentiation of formulas written out here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import LOSS_TERMS
from dflash_jax.objective.head import Head, Rule, Slots, head_loss
from dflash_jax.objective.slot_weights import Decay, Dpace

ONLY_CE = Rule((("ce", 1.0),), Decay(7.0))
EVERY_TERM = Rule(tuple(zip(LOSS_TERMS, (2.0, 0.5, 1.25, 3.0, 0.25, 1.0), strict=True)), Dpace(0.25))


def dense_term(name, logits, teacher, labels):
    """[M, X] losses of a term from whole logits [M, X, V] each."""
    q, p = jax.nn.softmax(logits), jax.nn.softmax(teacher)
    alpha = jnp.minimum(p, q).sum(-1)
    kl, tv = (p * jnp.log(p / q)).sum(-1), jnp.abs(p - q).sum(-1) / 2
    if name == "ce":
        return -jnp.log(jnp.take_along_axis(q, labels[..., None], axis=-1)[..., 0])
    if name == "lk_hybrid":
        share = jax.lax.stop_gradient(jnp.exp(-3 * alpha))
        return share * kl + (1 - share) * tv
    return {"kl": kl, "reverse_kl": (q * jnp.log(q / p)).sum(-1), "tv": tv, "lk_alpha": -jnp.log(alpha)}[name]


def dense_weights(rule, probability, mask) -> np.ndarray:
    """[M, X], slot by slot in plain loops."""
    found = np.zeros(mask.shape)
    for block, slot in np.argwhere(mask):
        if isinstance(rule, Decay):
            found[block, slot] = np.exp(-slot / rule.gamma)
            continue
        for last in range(slot, mask.shape[1]):
            inside = [k for k in range(last + 1) if mask[block, k]]
            chances = [rule.alpha + (1 - rule.alpha) * probability[block, k] for k in inside]
            found[block, slot] += mask[block, last] * np.prod(chances)
    return found


def dense_head(hidden, head, softcap, offsets):
    logits = jnp.einsum("MXD,VD->MXV", hidden, head)
    return (logits if softcap is None else jnp.tanh(logits / softcap) * softcap) + offsets


@functools.cache
def example():
    random = np.random.default_rng(8)
    mask = np.ones((7, 4), bool)
    mask[2], mask[5, 1:], mask[3, 1] = False, False, False
    return (
        Slots(
            jnp.asarray(random.standard_normal((7, 4, 16)), jnp.float32),
            jnp.asarray(random.integers(0, 29, (7, 4))),
            jnp.asarray(mask),
            jnp.asarray(random.standard_normal((7, 4, 16)), jnp.float32),
        ),
        jnp.asarray(random.standard_normal((29, 16)) / 2, jnp.float32),
        jnp.asarray(random.standard_normal(29), jnp.float32),
    )


@functools.cache
def dense(rule, softcap):
    """(3 * total, terms, its gradient, weights, drafter's logits, target's logits) of `example`."""
    slots, rows, offsets = example()

    def student(hidden):
        return dense_head(hidden, rows, softcap, offsets)

    teacher = dense_head(slots.teacher, rows, softcap, 0.0)  # offsets belong to the drafter's softmax alone
    logits = np.asarray(student(slots.hidden))
    chosen = np.take_along_axis(np.asarray(jax.nn.softmax(logits)), np.asarray(slots.labels)[..., None], -1)
    weights = jnp.asarray(dense_weights(rule.weights, chosen[..., 0], np.asarray(slots.mask)), jnp.float32)

    def total(hidden):
        found = {
            name: (weights * dense_term(name, student(hidden), teacher, slots.labels)).sum()
            for name, _ in rule.terms
        }
        return 3 * sum(factor * found[name] for name, factor in rule.terms), found

    (value, terms), slope = jax.jit(jax.value_and_grad(total, has_aux=True))(slots.hidden)
    return value, terms, slope, weights, logits, teacher


def chunked(rule, softcap, chunk):
    slots, rows, offsets = example()
    head = Head(rows, offsets, None if softcap is None else jnp.float32(softcap))

    def total(hidden):
        found = head_loss(slots._replace(hidden=hidden), head, rule, chunk)
        return 3 * found.total, found

    (value, found), slope = jax.jit(jax.value_and_grad(total, has_aux=True))(slots.hidden)
    return value, found, slope


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 3, 7, 500])
def test_the_chunked_head_equals_plain_autodiff(chunk, softcap):
    slots, rows, offsets = example()
    expected, terms, slope, weights, logits, teacher = dense(EVERY_TERM, softcap)
    total, found, gradient = chunked(EVERY_TERM, softcap, chunk)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert found.terms.keys() == set(LOSS_TERMS)
    for name, value in terms.items():
        np.testing.assert_allclose(found.terms[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(found.weight, weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=2e-6)
    np.testing.assert_array_equal(gradient[~slots.mask], 0)
    overlaps = np.minimum(jax.nn.softmax(logits), jax.nn.softmax(teacher)).sum(-1)
    np.testing.assert_allclose(found.overlaps, overlaps, rtol=1e-5)
    chosen = np.take_along_axis(logits, np.asarray(slots.labels)[..., None], -1)
    np.testing.assert_array_equal(found.ranks, (logits > chosen).sum(-1))

    head = Head(rows, offsets, None if softcap is None else jnp.float32(softcap))
    undifferentiated = jax.jit(head_loss, static_argnums=(2, 3))(slots, head, EVERY_TERM, chunk)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), undifferentiated, found)


@pytest.mark.parametrize("rule", [Rule(((name, 1.5),), Decay(4.0)) for name in LOSS_TERMS], ids=str)
def test_each_term_alone_equals_plain_autodiff(rule):
    expected, _, slope, weights, _, _ = dense(rule, 3.0)
    total, found, gradient = chunked(rule, 3.0, 3)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(found.weight, weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-6)


def test_the_teacher_and_the_head_receive_no_gradient():
    slots, rows, offsets = example()

    def total(teacher, rows, softcap):
        return head_loss(slots._replace(teacher=teacher), Head(rows, offsets, softcap), EVERY_TERM, 3).total

    for leaf in jax.grad(total, argnums=(0, 1, 2))(slots.teacher, rows, jnp.float32(3.0)):
        np.testing.assert_array_equal(leaf, 0)


def test_without_a_teacher_there_is_no_overlap():
    slots, rows, offsets = example()
    found = head_loss(slots._replace(teacher=None), Head(rows, offsets), ONLY_CE, 3)
    np.testing.assert_array_equal(found.overlaps, 0)
    with pytest.raises(AssertionError, match="kl needs the target's distribution"):
        head_loss(slots._replace(teacher=None), Head(rows, offsets), EVERY_TERM, 3)


def test_bfloat16_states_have_float32_losses():
    # Logits 100.5 and 100: in bfloat16, whose steps there are 0.5, their difference would survive but the
    # loss, 0.474, would not.
    hidden = jnp.asarray([[[1.0, 0.5]]], jnp.bfloat16)
    head = jnp.asarray([[100.0, 1.0], [100.0, 0.0]], jnp.bfloat16)
    slots = Slots(hidden, jnp.asarray([[0]]), jnp.ones((1, 1), bool), hidden * jnp.asarray([1, 0], jnp.bfloat16))
    found = head_loss(slots, Head(head, jnp.zeros(2)), Rule((("ce", 1.0), ("kl", 1.0)), Decay(7.0)), 1)
    assert found.terms["ce"].dtype == found.terms["kl"].dtype == found.total.dtype == jnp.float32
    assert found.terms["ce"] == pytest.approx(np.log1p(np.exp(-0.5)), abs=1e-5)
    # The teacher's two logits are equal: kl = log 0.5 - (log q_0 + log q_1) / 2.
    q = 1 / (1 + np.exp(-0.5))
    assert found.terms["kl"] == pytest.approx(np.log(0.5) - np.log(q * (1 - q)) / 2, abs=1e-5)


def test_of_equal_logits_the_lower_row_comes_first():
    # Rows 1, 2 and 4 are the same: whatever the states, argmax takes row 1, then 2, then 4.
    rows = jnp.asarray([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]])
    hidden = jnp.asarray([[[1.0, 0.5]] * 5, [[-1.0, 0.0]] * 5, [[0.0, 0.0]] * 5])
    slots = Slots(hidden, jnp.asarray([[0, 1, 2, 3, 4]] * 3), jnp.ones((3, 5), bool))
    found = head_loss(slots, Head(rows, jnp.zeros(5)), ONLY_CE, 2)
    assert found.ranks.tolist() == [[3, 0, 1, 4, 2], [1, 2, 3, 0, 4], [0, 1, 2, 3, 4]]
    logits = np.asarray(Head(rows, jnp.zeros(5)).logits(hidden))[:, 0]
    assert [row.index(0) for row in found.ranks.tolist()] == logits.argmax(-1).tolist()
