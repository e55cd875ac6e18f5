"""Anchors, labels, weights, acceptance and the loss: hand-made tables, and SpecForge's numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import GOLDEN, published_drafter, published_tables, random_drafter

from dflash_jax.batch import Batch
from dflash_jax.models.weights import names
from dflash_jax.objective.acceptance import acceptance
from dflash_jax.objective.anchors import block_labels, draw_anchors, row_keys, valid_anchors
from dflash_jax.objective.head import head_loss
from dflash_jax.objective.objective import Frozen, anchored_loss, block_loss, block_states
from dflash_jax.objective.slot_weights import decay_weights, default_gamma

# Anchors and labels.

TWO_ANSWERS = np.array([[0, 0, 1, 1, 1, 0, 0, 1, 1]], bool)


def labels_of(loss_mask, anchors, *, segment_ids=None, kept=None, width=4):
    """Labels of tokens 100, 101, .. and their mask, for one row."""
    rows, length = loss_mask.shape
    tokens = jnp.broadcast_to(100 + jnp.arange(length), (rows, length))
    anchors = jnp.asarray([anchors])
    labels, mask = block_labels(
        tokens,
        jnp.asarray(loss_mask),
        jnp.ones((rows, length), jnp.int32) if segment_ids is None else jnp.asarray(segment_ids),
        anchors=anchors,
        kept=jnp.ones(anchors.shape, bool) if kept is None else jnp.asarray([kept]),
        width=width,
    )
    return np.asarray(labels)[0], np.asarray(mask)[0]


def test_an_anchor_and_the_token_behind_it_are_both_supervised():
    valid = valid_anchors(jnp.asarray(TWO_ANSWERS), jnp.ones((1, 9), jnp.int32))
    assert np.flatnonzero(valid[0]).tolist() == [2, 3, 7]


def test_labels_stop_at_the_end_of_an_answer_and_of_the_row():
    labels, mask = labels_of(TWO_ANSWERS, [2, 3, 7])
    assert mask.astype(int).tolist() == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
    assert labels[0].tolist() == [102, 103, 104, 105]
    assert labels[1].tolist() == [103, 104, 105, 106]
    assert labels[2, 1] == 108


def test_nothing_behind_a_gap_is_learned():
    # Slot 3 of anchor 4 would be supervised text, but a verify run never jumps over the user's turn.
    _, mask = labels_of(TWO_ANSWERS, [4])
    assert not mask.any()
    _, mask = labels_of(np.array([[1, 1, 1, 0, 1, 1]], bool), [0], width=6)
    assert mask.astype(int).tolist() == [[0, 1, 1, 0, 0, 0]]


def test_blocks_do_not_cross_into_the_next_document():
    everything = np.ones((1, 20), bool)
    segments = np.repeat([[1, 2]], 10, axis=1)
    labels, mask = labels_of(everything, [7, 8, 9, 16, 18], segment_ids=segments)
    assert mask.astype(int).tolist() == [
        [0, 1, 1, 0],
        [0, 1, 0, 0],
        [0, 0, 0, 0],
        [0, 1, 1, 1],
        [0, 1, 0, 0],
    ]
    assert labels[3].tolist() == [116, 117, 118, 119]
    valid = valid_anchors(jnp.asarray(everything), jnp.asarray(segments))
    assert np.flatnonzero(~valid[0]).tolist() == [9, 19]


def test_padding_holds_no_anchor():
    valid = valid_anchors(jnp.ones((1, 6), bool), jnp.asarray([[1, 1, 1, 0, 0, 0]]))
    assert np.flatnonzero(valid[0]).tolist() == [0, 1]


def test_unused_anchors_have_no_labels():
    _, mask = labels_of(np.ones((1, 9), bool), [2, 0, 0], kept=[True, False, False])
    assert mask.any(axis=-1).tolist() == [True, False, False]


# The draw.


def keys_of(record_ids, *, seed=0, epoch=0):
    ids = jnp.asarray(record_ids, jnp.int32)
    return row_keys(seed, jnp.full_like(ids, epoch), ids)


def test_anchors_are_distinct_valid_and_ascending():
    valid = jnp.asarray(np.random.default_rng(0).random((50, 40)) < 0.6)
    anchors, kept = draw_anchors(keys_of(range(50)), valid, 12)
    assert anchors.dtype == jnp.int32
    assert kept.all()
    assert (np.diff(anchors, axis=1) > 0).all()
    assert np.take_along_axis(np.asarray(valid), np.asarray(anchors), axis=1).all()


def test_fewer_valid_positions_than_asked_for_are_all_drawn():
    valid = np.zeros((3, 9), bool)
    valid[0, [2, 3, 7]] = True
    valid[1, 0] = True
    for count in (5, 12):  # 12 is more than the row is long
        anchors, kept = draw_anchors(keys_of([4, 5, 6]), jnp.asarray(valid), count)
        assert anchors.shape == kept.shape == (3, count)
        assert kept.sum(axis=1).tolist() == [3, 1, 0]
        assert anchors[0, :3].tolist() == [2, 3, 7]
        assert anchors[1, 0] == 0
        assert (np.asarray(anchors)[~np.asarray(kept)] == 0).all()


def test_every_set_of_anchors_is_equally_likely():
    valid = jnp.zeros((6000, 11), bool).at[:, jnp.array([1, 4, 5, 8])].set(True)
    anchors, _ = draw_anchors(keys_of(range(6000)), valid, 2)
    pairs, counts = np.unique(np.asarray(anchors), axis=0, return_counts=True)
    assert pairs.tolist() == [[1, 4], [1, 5], [1, 8], [4, 5], [4, 8], [5, 8]]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in a thousand draws


def test_a_rows_anchors_depend_on_seed_epoch_and_record_alone():
    valid = jnp.ones((4, 30), bool)
    together, _ = draw_anchors(keys_of([3, 9, 1, 7]), valid, 6)
    reordered, _ = draw_anchors(keys_of([7, 3]), valid[:2], 6)
    alone, _ = draw_anchors(keys_of([9]), valid[:1], 6)
    np.testing.assert_array_equal(reordered[0], together[3])
    np.testing.assert_array_equal(reordered[1], together[0])
    np.testing.assert_array_equal(alone[0], together[1])
    for other in (keys_of([9], epoch=1), keys_of([9], seed=1), keys_of([10])):
        assert (draw_anchors(other, valid[:1], 6)[0] != alone).any()


# Weights and cross-entropy.


@pytest.mark.parametrize(("block_size", "gamma", "total"), [(16, 7.0, 6.631), (10, 5.0, 4.605), (8, 4.0, 3.735)])
def test_slot_weights_of_the_published_recipes(block_size, gamma, total):
    assert default_gamma(block_size) == gamma
    weights = decay_weights(block_size, gamma)
    assert weights.dtype == np.float32
    assert weights[:2].tolist() == [0.0, 1.0]
    assert weights.sum() == pytest.approx(total, abs=6e-4)


def test_slot_weights_by_position():
    assert decay_weights(16, 7.0)[15] == pytest.approx(0.135, abs=5e-4)
    assert decay_weights(16, 10.0)[15] == pytest.approx(0.247, abs=5e-4)


def test_gamma_between_the_published_sizes_is_interpolated():
    assert default_gamma(12) == pytest.approx(5.67, abs=5e-3)
    assert default_gamma(9) == pytest.approx(4.5)
    assert (default_gamma(2), default_gamma(64)) == (4.0, 7.0)


# The head.


@pytest.mark.parametrize("chunk", [1, 3, 7, 500])
def test_the_chunked_head_equals_plain_autodiff(chunk):
    random = np.random.default_rng(8)
    hidden, head = random.standard_normal((7, 4, 16)).astype(np.float32), random.standard_normal((29, 16))
    head = jnp.asarray(head, jnp.float32)
    labels, weights = jnp.asarray(random.integers(0, 29, (7, 4))), random.random((7, 4)).astype(np.float32)
    weights[2], weights[5, 1:] = 0, 0

    def plain(hidden):
        log_shares = jax.nn.log_softmax(hidden @ head.T)
        losses = -jnp.take_along_axis(log_shares, labels[..., None], axis=-1)[..., 0]
        return 3 * (losses * weights).sum(), losses

    def chunked(hidden):
        found = head_loss(hidden, head, labels, jnp.asarray(weights), chunk)
        return 3 * found.total, found

    (expected, losses), slope = jax.value_and_grad(plain, has_aux=True)(jnp.asarray(hidden))
    (total, found), gradient = jax.value_and_grad(chunked, has_aux=True)(jnp.asarray(hidden))
    assert total == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(found.correct, (hidden @ head.T).argmax(-1) == labels)
    undifferentiated = head_loss(jnp.asarray(hidden), head, labels, jnp.asarray(weights), chunk)
    jax.tree.map(np.testing.assert_array_equal, undifferentiated, found)


def test_bfloat16_states_have_float32_losses():
    # Logits 100.5 and 100: in bfloat16, whose steps there are 0.5, their difference would survive but the
    # loss, 0.474, would not.
    hidden = jnp.asarray([[[1.0, 0.5]]], jnp.bfloat16)
    head = jnp.asarray([[100.0, 1.0], [100.0, 0.0]], jnp.bfloat16)
    found = head_loss(hidden, head, jnp.asarray([[0]]), jnp.ones((1, 1)), 1)
    assert found.losses.dtype == jnp.float32
    assert found.losses[0, 0] == pytest.approx(np.log1p(np.exp(-0.5)), abs=1e-5)


# Acceptance.


def accepted(right, mask=None):
    right = jnp.asarray(right, bool)
    return acceptance(right, jnp.ones(right.shape, bool) if mask is None else jnp.asarray(mask))


def test_accept_length_is_a_mean_over_blocks_with_the_bonus_token():
    found = accepted([[1, 1, 1], [0, 0, 0]])
    assert found.accept_length == 2.5  # the product of the slots' accuracies would give 1.875
    assert found.streak == 1.5
    assert found.accuracy == 0.5


def test_a_run_ends_at_the_first_slot_without_label():
    found = accepted([[1, 1, 1]], [[True, False, True]])
    assert found.accept_length == 2.0
    assert found.correct.tolist() == [1, 0, 1]
    assert found.counted.tolist() == [1, 0, 1]


def test_a_run_ends_at_the_first_wrong_draft():
    found = accepted([[1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 1, 1]])
    assert found.survived.tolist() == [3, 2, 1]
    assert found.correct.tolist() == [3, 3, 3]
    assert found.accept_length == 1 + (1 + 0 + 2 + 3) / 4


def test_blocks_without_a_first_label_are_not_counted():
    found = accepted([[[1, 1], [1, 1]]], [[[True, True], [False, False]]])
    assert (found.blocks, found.streak) == (1, 2.0)
    nothing = accepted([[1, 1]], [[False, False]])
    assert (nothing.accept_length, nothing.accuracy) == (1.0, 0.0)


def test_acceptance_sums_add():
    parts = accepted([[1, 1, 1]]) + accepted([[0, 0, 0], [1, 0, 0]])
    whole = accepted([[1, 1, 1], [0, 0, 0], [1, 0, 0]])
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


def test_streaks_equal_specforges_where_it_skips_no_slot():
    golden = np.load(GOLDEN / "specforge_accept_len.npz")
    valid = golden["valid"][:, :, 1:]
    # SpecForge lets a run go on over a slot without label and counts it as a continuation; ours ends there.
    prefix = np.cumprod(valid, axis=-1).astype(bool)
    agree = (prefix == valid).all(-1)
    assert agree.sum() >= 3
    for block in np.argwhere(agree):
        right, mask = (
            array[tuple(block)][None, 1:] for array in (golden["pred"] == golden["target"], golden["valid"])
        )
        found = acceptance(jnp.asarray(right), jnp.asarray(mask))
        assert found.streak == golden["accept_len"][tuple(block)]


# The whole loss against SpecForge.


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "specforge_loss.npz")


def specforge_batch(golden, loss_mask) -> Batch:
    segments = np.ones((2, 40), np.int32)
    segments[1, 29:] = 0
    return Batch(
        tokens=jnp.asarray(golden["input_ids"], jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(40), (2, 40)),
        segment_ids=jnp.asarray(segments),
        loss_mask=jnp.asarray(loss_mask),
        record_ids=jnp.arange(2),
        epochs=jnp.zeros(2, jnp.int32),
    )


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
                jnp.asarray(golden["target_hidden"]),
                published_tables(),
                slot_weights=jnp.asarray(decay_weights(8, 7.0)),
                anchors=jnp.asarray(golden["anchors"], jnp.int32),
                kept=kept,
                head_chunk=4,
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
    assert sums.acceptance.accuracy == pytest.approx(golden[f"{name}/accuracy"], rel=1e-6)


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
        record_ids=jnp.asarray([40, 41]),
        epochs=jnp.zeros(2, jnp.int32),
    )
    features = jnp.asarray(random.standard_normal((2, 24, 72)), jnp.float32)
    return Row(batch, features, Frozen(jnp.asarray(table), jnp.asarray(table[::-1]), None))


WEIGHTS = np.array([0.0, 1.0, 0.5, 0.25, 0.125], np.float32)


@jax.jit
def at_anchors(drafter, batch, features, frozen, anchors, kept):
    return anchored_loss(
        drafter,
        batch,
        features,
        frozen,
        slot_weights=jnp.asarray(WEIGHTS),
        anchors=anchors,
        kept=kept,
        head_chunk=3,
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
    keys = row_keys(3, rows.batch.epochs, rows.batch.record_ids)
    expected = at_anchors(drafter, rows.batch, rows.features, rows.frozen, *draw_anchors(keys, valid, 4))
    drawn = jax.jit(block_loss, static_argnames=("anchor_count", "seed", "head_chunk"))(
        drafter, rows.batch, rows.features, rows.frozen, slot_weights=jnp.asarray(WEIGHTS), anchor_count=4, seed=3
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
        record_ids=batch.record_ids[:1],
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
            rows.features,
            rows.frozen,
            slot_weights=jnp.asarray(WEIGHTS),
            anchor_count=4,
            seed=0,
            head_chunk=3,
        )
        return sums.loss, sums

    (_, sums), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert (sums.loss, sums.weight, sums.acceptance.blocks) == (0, 0, 0)
    for leaf in jax.tree.leaves(gradients):
        np.testing.assert_array_equal(leaf, 0)
    measures = sums.measures()
    assert measures["accept_len"] == 1.0
    assert all(np.isfinite(value).all() for value in measures.values())
