"""Objectives that compare with the target's distributions, and weights that depend on the drafter's own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import GOLDEN, published_drafter, published_tables, random_drafter, specforge_batch

from dflash_jax.batch import Batch
from dflash_jax.objective.anchors import block_labels
from dflash_jax.objective.head import Head, Rule, Slots, head_loss
from dflash_jax.objective.objective import Frozen, TargetStates, anchored_loss, block_states, teacher_states
from dflash_jax.objective.slot_weights import Decay, Dpace
from dflash_jax.objective.terms import TEACHER_TERMS
from dflash_jax.published.weights import names

HALVING = Decay(1 / np.log(2))
EVERY_TEACHER = Rule(tuple((name, 1.0) for name in TEACHER_TERMS), HALVING)


def test_slot_k_is_compared_with_the_target_at_anchor_plus_k_minus_one():
    # Each state says where it is from: 100 * row + position.
    last = (100 * np.arange(2)[:, None] + np.arange(10))[..., None].astype(np.float32)
    found = teacher_states(jnp.asarray(last), jnp.asarray([[3, 0], [5, 8]]), width=4)
    assert found.shape == (2, 2, 3, 1)
    assert found[0, :, :, 0].tolist() == [[3, 4, 5], [0, 1, 2]]
    # Past the end of the row there is no label; any state will do.
    assert found[1, :, :, 0].tolist() == [[105, 106, 107], [108, 109, 109]]


@dataclasses.dataclass(frozen=True)
class Row:
    batch: Batch
    states: TargetStates
    frozen: Frozen


@pytest.fixture(scope="module")
def rows() -> Row:
    random = np.random.default_rng(5)
    mask = np.zeros((2, 24), bool)
    mask[0, 5:14], mask[0, 17:], mask[1, 9:18] = True, True, True
    segments = np.ones((2, 24), np.int32)
    segments[1, 18:] = 0
    table = random.standard_normal((30, 36)).astype(np.float32) / 2
    batch = Batch(
        tokens=jnp.asarray(random.integers(0, 30, (2, 24)), jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(24), (2, 24)),
        segment_ids=jnp.asarray(segments),
        loss_mask=jnp.asarray(mask),
        record_ids=jnp.asarray([[40], [41]]),
        epochs=jnp.zeros(2, jnp.int32),
    )
    features, last = (jnp.asarray(random.standard_normal((2, 24, width)), jnp.float32) for width in (72, 36))
    return Row(batch, TargetStates(features, last), Frozen(jnp.asarray(table), jnp.asarray(table[::-1]), None))


# Blocks of four proposals that do not overlap; the second of row 0 has only two labels.
ANCHORS, KEPT = np.array([[5, 11, 17], [9, 13, 0]]), np.array([[True, True, True], [True, True, False]])
LABELS = (4, 2, 4, 4, 4)


def losses(drafter, rows, frozen, states, rule=EVERY_TEACHER):
    return anchored_loss(
        drafter,
        rows.batch,
        states,
        frozen,
        rule=rule,
        anchors=jnp.asarray(ANCHORS),
        kept=jnp.asarray(KEPT),
        head_chunk=2,
        head_draw=None,
    )


def drafted_states(drafter, rows) -> np.ndarray:
    """[B, A, W, D]."""
    kept = jnp.asarray(KEPT)
    return np.asarray(
        jax.jit(block_states)(
            drafter, rows.batch, rows.states.features, rows.frozen, anchors=jnp.asarray(ANCHORS), kept=kept
        )
    )


def test_a_drafter_that_agrees_with_the_target_loses_nothing(rows):
    drafter = random_drafter(1)
    drafted, last = drafted_states(drafter, rows), np.array(rows.states.last)
    for row, block in np.argwhere(KEPT):
        for k in range(1, 5):
            # The target's prediction of the token at a + k is made at a + k - 1.
            last[row, ANCHORS[row, block] + k - 1] = drafted[row, block, k]
    compiled = jax.jit(lambda last: losses(drafter, rows, rows.frozen, TargetStates(rows.states.features, last)))
    found = compiled(jnp.asarray(last))
    assert found.weight == pytest.approx(4 * 1.875 + 1.5)
    for name, value in found.terms.items():
        assert value / found.weight == pytest.approx(0.0, abs=1e-6), name
    assert found.measures()["loss"] == pytest.approx(0.0, abs=5e-6)
    # Every draft would be accepted.
    assert found.acceptance.blocks == len(LABELS)
    assert found.measures()["expected_accept_len"] == pytest.approx(1 + np.mean(LABELS))
    assert found.measures()["loss_kl"] == pytest.approx(0.0, abs=1e-6)
    # A target that says the same one position later disagrees.
    apart = compiled(jnp.asarray(np.roll(last, 1, axis=1)))
    assert all(value / apart.weight > 0.05 for value in apart.terms.values())
    assert apart.measures()["expected_accept_len"] < 1 + 0.9 * np.mean(LABELS)


def test_a_draft_vocabulary_compares_with_the_target_restricted_to_it(rows):
    drafter, tokens = random_drafter(1), np.asarray(rows.batch.tokens)
    draft_tokens = np.unique(np.concatenate([tokens[0, 6:9], tokens[1, 10:13], [1, 29]]))
    small = Frozen(rows.frozen.embedding, rows.frozen.head[draft_tokens], jnp.asarray(draft_tokens))
    found = jax.jit(lambda: losses(drafter, rows, small, rows.states))()

    labels, mask = (
        np.asarray(array)[:, :, 1:]
        for array in block_labels(
            rows.batch.tokens,
            rows.batch.loss_mask,
            rows.batch.segment_ids,
            anchors=jnp.asarray(ANCHORS),
            kept=jnp.asarray(KEPT),
            width=5,
        )
    )
    known = np.isin(labels, draft_tokens) & mask
    assert 0 < known.sum() < mask.sum()
    head = np.asarray(rows.frozen.head, np.float64)

    def shares(states):
        """Over all tokens first, then renormalised over those of the draft vocabulary."""
        whole = np.exp(states @ head.T)[..., draft_tokens]
        return whole / whole.sum(-1, keepdims=True)

    q = shares(drafted_states(drafter, rows)[:, :, 1:].astype(np.float64))
    at = np.minimum(ANCHORS[:, :, None] + np.arange(4), 23)
    p = shares(np.stack([np.asarray(rows.states.last, np.float64)[row][at[row]] for row in range(2)]))
    alpha = np.minimum(p, q).sum(-1)
    kl, share = (p * np.log(p / q)).sum(-1), np.exp(-3 * alpha)
    expected = {
        "kl": kl,
        "reverse_kl": (q * np.log(q / p)).sum(-1),
        "tv": np.abs(p - q).sum(-1) / 2,
        "lk_alpha": -np.log(alpha),
        "lk_hybrid": share * kl + (1 - share) * (1 - alpha),
    }
    weights = known * 0.5 ** np.arange(4)
    assert found.weight == pytest.approx(weights.sum())
    for name, value in expected.items():
        assert found.terms[name] == pytest.approx((weights * value).sum(), rel=1e-5), name
    assert found.loss == pytest.approx((weights * sum(expected.values())).sum(), rel=1e-5)
    assert found.acceptance.expected == pytest.approx(np.cumprod(np.where(mask, alpha, 0), -1).sum(), rel=1e-5)


def test_the_target_is_not_asked_where_no_term_needs_it(rows):
    rule = Rule((("ce", 1.0),), HALVING)
    alone = jax.jit(
        lambda: losses(random_drafter(1), rows, rows.frozen, TargetStates(rows.states.features), rule)
    )()
    assert "expected_accept_len" not in alone.measures()
    assert alone.acceptance.expected == 0


# D-PACE through the whole drafter, against SpecForge with the gaps of its own label mask.


@pytest.fixture(scope="module")
def specforge():
    """(golden arrays, states of all blocks [M, 8, 64], gradient of the drafter from one of these states)."""
    golden = np.load(GOLDEN / "specforge_loss.npz")
    batch = specforge_batch(golden, golden["loss_mask"] > 0)
    structure, params = nnx.split(published_drafter("full"))

    def states(params):
        return block_states(
            nnx.merge(structure, params),
            batch,
            jnp.asarray(golden["target_hidden"]),
            published_tables(),
            anchors=jnp.asarray(golden["anchors"], jnp.int32),
            kept=jnp.asarray(golden["block_keep_mask"]),
        ).reshape(14, 8, 64)

    return golden, jax.jit(states)(params), jax.jit(lambda slope: jax.vjp(states, params)[1](slope)[0])


@pytest.mark.parametrize(("case", "alpha"), [("dpace", 0.5), ("dpace_a01", 0.1)])
def test_dpace_losses_and_gradients_equal_specforges(specforge, case, alpha):
    golden, states, pull_back = specforge
    expected = np.load(GOLDEN / "specforge_dpace.npz")
    at = np.minimum(golden["anchors"][:, :, None] + np.arange(1, 8), 39)
    labels = np.take_along_axis(golden["input_ids"], at.reshape(2, -1), axis=1).reshape(14, 7)
    mask = golden["weight_mask"].reshape(14, 8)[:, 1:] > 0
    head = Head(published_tables().head, jnp.zeros(211))

    @jax.jit
    def total(states):
        slots = Slots(states[:, 1:], jnp.asarray(labels, jnp.int32), jnp.asarray(mask))
        return head_loss(slots, head, Rule((("ce", 1.0),), Dpace(alpha)), 4).total

    numerator, slope = jax.value_and_grad(total)(states)
    assert numerator == pytest.approx(expected[f"{case}/loss_num"], rel=1e-5)
    # Its gradient is that of the numerator divided by the two rows of the batch.
    assert expected[f"{case}/loss"] == pytest.approx(expected[f"{case}/loss_num"] / 2)
    gradients = {name: np.asarray(leaf[...]) / 2 for name, leaf in names(pull_back(slope)).items()}
    assert len(gradients) == 36
    for name, value in gradients.items():
        assert np.linalg.norm(value) == pytest.approx(expected[f"{case}/gradnorm/{name}"], rel=2e-5), name
    for key in (key for key in expected if key.startswith(f"{case}/grad/")):
        value = gradients[key.removeprefix(f"{case}/grad/")]
        np.testing.assert_allclose(value, expected[key], rtol=0, atol=2e-5 * np.abs(expected[key]).max())
