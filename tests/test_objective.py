"""The whole loss: SpecForge's numbers and gradients, draft vocabularies, packed rows, empty batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import GOLDEN, published_drafter, published_tables, random_drafter, specforge_batch

from dflash_jax.batch import Batch
from dflash_jax.objective.anchors import block_labels, draw_anchors, token_keys, valid_anchors
from dflash_jax.objective.head import Rule
from dflash_jax.objective.objective import Frozen, TargetStates, anchored_loss, block_loss, block_states
from dflash_jax.objective.slot_weights import Decay
from dflash_jax.published.weights import names

CE = (("ce", 1.0),)

# The whole loss against SpecForge.


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "specforge_loss.npz")


@pytest.fixture(scope="module", params=["full", "sliding"])
def against_specforge(request, golden):
    """(golden name, sums and gradient of the loss numerator) with SpecForge's label mask.

    Its mask has gaps in two blocks (row 0, anchor 15: slots 5 to 7 behind a gap; row 1, anchor 11: slots 3 to
    7), where ours ends. As the sums are linear in the slots, those slots are added as the difference of two
    prefixes: everything up to the block's end, minus everything up to the gap's end.
    """
    given = golden["loss_mask"] > 0
    kept = golden["block_keep_mask"]
    gapped = np.zeros_like(kept)
    gapped[0, 3] = gapped[1, 1] = True
    to_block_end, to_gap_end = given.copy(), given.copy()
    to_block_end[0, 15:23] = to_block_end[1, 11:19] = True
    to_gap_end[0, 15:20] = to_gap_end[1, 11:14] = True
    to_gap_end[0, 20] = to_gap_end[1, 14] = False
    drafter = published_drafter(request.param)
    structure, params = nnx.split(drafter)

    @jax.jit
    def sums(params, loss_mask, kept):
        def numerator(params):
            found = anchored_loss(
                nnx.merge(structure, params),
                specforge_batch(golden, loss_mask),
                TargetStates(jnp.asarray(golden["target_hidden"])),
                published_tables(),
                rule=Rule(CE, Decay(7.0)),
                anchors=jnp.asarray(golden["anchors"], jnp.int32),
                kept=kept,
                head_chunk=4,
                head_draw=None,
            )
            return found.loss, found

        (_, found), gradient = jax.value_and_grad(numerator, has_aux=True)(params)
        return found, gradient

    ours, more, less = (
        sums(params, given, kept),
        sums(params, to_block_end, gapped),
        sums(params, to_gap_end, gapped),
    )
    whole = jax.tree.map(lambda ours, more, less: ours + more - less, ours, more, less)
    return request.param, ours[0], *whole


def test_loss_and_accuracy_equal_specforges(against_specforge, golden):
    name, _, sums, _ = against_specforge
    assert sums.weight == pytest.approx(golden[f"{name}/loss_den"], rel=1e-6)
    assert sums.loss == pytest.approx(golden[f"{name}/loss_num"], rel=1e-6)
    assert sums.loss / sums.weight == pytest.approx(golden[f"{name}/loss"], rel=1e-6)
    assert sums.acceptance.correct.sum() == golden[f"{name}/correct_num"]
    assert sums.acceptance.counted.sum() == golden[f"{name}/accuracy_den"]
    assert sums.measures()["acc"] == pytest.approx(golden[f"{name}/accuracy"], rel=1e-6)


def test_gradients_equal_specforges(against_specforge, golden):
    name, _, sums, gradient = against_specforge
    gradients = {key: np.asarray(leaf[...] / sums.weight) for key, leaf in names(gradient).items()}
    assert len(gradients) == 36
    for key, value in gradients.items():
        assert np.linalg.norm(value) == pytest.approx(golden[f"{name}/gradnorm/{key}"], rel=1e-5), key
    whole = [key for key in golden if key.startswith(f"{name}/grad/")]
    assert len(whole) == 17
    for key in whole:
        expected = golden[key]
        np.testing.assert_allclose(
            gradients[key.removeprefix(f"{name}/grad/")], expected, rtol=0, atol=2e-5 * np.abs(expected).max()
        )
    total = np.sqrt(sum((value.astype(np.float64) ** 2).sum() for value in gradients.values()))
    assert total == pytest.approx(golden[f"{name}/grad_global_norm"], rel=1e-5)


def test_our_own_mask_weighs_specforges_losses(against_specforge, golden):
    name, sums, _, _ = against_specforge
    mask = np.cumprod(golden["weight_mask"][:, :, 1:], axis=-1)
    weights = mask * np.exp(-np.arange(7) / 7)
    assert sums.weight == pytest.approx(weights.sum(), rel=1e-6)
    assert sums.loss == pytest.approx((weights * golden[f"{name}/neg_log_q"][:, :, 1:]).sum(), rel=1e-6)
    assert sums.acceptance.counted.tolist() == mask.sum((0, 1)).tolist()
    assert sums.acceptance.blocks == 11


# Draft vocabulary, drawn anchors, packed rows.


@dataclasses.dataclass(frozen=True)
class Row:
    batch: Batch
    features: jax.Array
    frozen: Frozen


@pytest.fixture(scope="module")
def rows():
    random = np.random.default_rng(2)
    mask = np.zeros((2, 24), bool)
    mask[0, 5:14], mask[0, 17:], mask[1, 9:18] = True, True, True
    segments = np.ones((2, 24), np.int32)
    segments[1, 18:] = 0
    table = random.standard_normal((30, 36)).astype(np.float32)
    batch = Batch(
        tokens=jnp.asarray(random.integers(0, 30, (2, 24)), jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(24), (2, 24)),
        segment_ids=jnp.asarray(segments),
        loss_mask=jnp.asarray(mask),
        record_ids=jnp.asarray([[40], [41]]),
        epochs=jnp.zeros(2, jnp.int32),
    )
    features = jnp.asarray(random.standard_normal((2, 24, 72)), jnp.float32)
    return Row(batch, features, Frozen(jnp.asarray(table), jnp.asarray(table[::-1]), None))


WEIGHTS = np.array([0.0, 1.0, 0.5, 0.25, 0.125], np.float32)
HALVING = Rule(CE, Decay(1 / np.log(2)))  # gives these weights


@jax.jit
def at_anchors(drafter, batch, features, frozen, anchors, kept):
    return anchored_loss(
        drafter,
        batch,
        TargetStates(features),
        frozen,
        rule=HALVING,
        anchors=anchors,
        kept=kept,
        head_chunk=3,
        head_draw=None,
    )


def test_tokens_outside_the_draft_vocabulary_weigh_nothing_and_are_never_accepted(rows):
    drafter, anchors, kept = random_drafter(1), jnp.asarray([[5, 9, 20], [9, 12, 0]]), jnp.ones((2, 3), bool)
    kept = kept.at[1, 2].set(False)
    tokens = np.asarray(rows.batch.tokens)
    draft_tokens = np.unique(np.concatenate([tokens[0, 6:9], tokens[1, 10:13], [1, 29]]))
    outside = [token for token in range(30) if token not in draft_tokens]
    small = Frozen(rows.frozen.embedding, rows.frozen.head[draft_tokens], jnp.asarray(draft_tokens))
    sums = at_anchors(drafter, rows.batch, rows.features, small, anchors, kept)
    assert np.isfinite(sums.loss)

    # The same by the full head: other tokens can neither be labels nor be drafted.
    labels, mask = block_labels(
        rows.batch.tokens, rows.batch.loss_mask, rows.batch.segment_ids, anchors=anchors, kept=kept, width=5
    )
    known = np.isin(labels, draft_tokens) & np.asarray(mask)
    assert 0 < known.sum() < mask.sum()
    assert sums.weight == pytest.approx((known * WEIGHTS).sum())
    assert sums.acceptance.counted.tolist() == np.asarray(mask)[..., 1:].sum((0, 1)).tolist()
    shut = np.zeros(30, np.float32)
    shut[outside] = -1e9

    states = jax.jit(block_states)(drafter, rows.batch, rows.features, rows.frozen, anchors=anchors, kept=kept)
    logits = np.asarray(states @ rows.frozen.head.T, np.float64) + shut
    log_shares = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_shares -= logits.max(-1, keepdims=True)
    losses = -np.take_along_axis(log_shares, np.asarray(labels)[..., None], -1)[..., 0]
    assert sums.loss == pytest.approx(np.where(known, losses * WEIGHTS, 0).sum(), rel=1e-5)
    right = (logits.argmax(-1) == labels) & np.asarray(mask)
    assert sums.acceptance.correct.tolist() == right[..., 1:].sum((0, 1)).tolist()


def test_an_unknown_token_is_told_from_the_row_it_falls_on():
    frozen = Frozen(jnp.eye(6), jnp.eye(6)[jnp.array([1, 4])], jnp.array([1, 4]))
    index, known = frozen.index_of(jnp.arange(6))
    assert known.tolist() == [False, True, False, False, True, False]
    assert index[jnp.array([1, 4])].tolist() == [0, 1]
    assert frozen.tokens_of(jnp.array([0, 1])).tolist() == [1, 4]
    assert ((index >= 0) & (index < 2)).all()


def test_drawn_anchors_give_the_loss_of_those_anchors(rows):
    drafter = random_drafter(1)
    valid = valid_anchors(rows.batch.loss_mask, rows.batch.segment_ids)
    keys = token_keys(3, rows.batch)
    expected = at_anchors(drafter, rows.batch, rows.features, rows.frozen, *draw_anchors(keys, valid, 4))
    drawn = jax.jit(block_loss, static_argnames=("rule", "anchor_count", "seed", "head_chunk"))(
        drafter,
        rows.batch,
        TargetStates(rows.features),
        rows.frozen,
        rule=HALVING,
        anchor_count=4,
        seed=3,
        head_chunk=3,
        head_draw=None,
    )
    assert drawn.acceptance.blocks == 8
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), drawn, expected)


def test_two_rows_packed_into_one_give_the_same_sums(rows):
    drafter, batch = random_drafter(1), rows.batch
    anchors, kept = jnp.asarray([[5, 11, 21, 22], [9, 13, 15, 16]]), jnp.ones((2, 4), bool)
    apart = at_anchors(drafter, batch, rows.features, rows.frozen, anchors, kept)
    flat = dataclasses.replace(
        batch,
        tokens=batch.tokens.reshape(1, 48),
        positions=batch.positions.reshape(1, 48),
        # Padding stays padding; the second document gets a number of its own.
        segment_ids=(batch.segment_ids * jnp.asarray([[1], [2]])).reshape(1, 48),
        loss_mask=batch.loss_mask.reshape(1, 48),
        record_ids=batch.record_ids.reshape(1, 2),
        epochs=batch.epochs[:1],
    )
    together = at_anchors(
        drafter,
        flat,
        rows.features.reshape(1, 48, 72),
        rows.frozen,
        (anchors + jnp.asarray([[0], [24]])).reshape(1, 8),
        kept.reshape(1, 8),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), together, apart)


def test_a_batch_without_a_single_anchor_gives_zeros_and_finite_gradients(rows):
    structure, params = nnx.split(random_drafter(1))
    empty = dataclasses.replace(
        rows.batch, loss_mask=jnp.zeros((2, 24), bool), segment_ids=jnp.zeros((2, 24), int)
    )

    def loss(params):
        sums = block_loss(
            nnx.merge(structure, params),
            empty,
            TargetStates(rows.features),
            rows.frozen,
            rule=HALVING,
            anchor_count=4,
            seed=0,
            head_chunk=3,
            head_draw=None,
        )
        return sums.loss, sums

    (_, sums), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert (sums.loss, sums.weight, sums.acceptance.blocks) == (0, 0, 0)
    for leaf in jax.tree.leaves(gradients):
        np.testing.assert_array_equal(leaf, 0)
    measures = sums.measures()
    assert measures["accept_len"] == 1.0
    assert all(np.isfinite(value).all() for value in measures.values())
