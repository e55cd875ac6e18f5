"""Accept lengths by hand, SpecForge's, and the walk against simulated and against real decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import GOLDEN, frozen_of, load_target, random_drafter

from dflash_jax.batch import Batch
from dflash_jax.decode.chain import generate_chain
from dflash_jax.objective.acceptance import TREE_WIDTHS, Acceptance, acceptance, walk
from dflash_jax.objective.anchors import valid_anchors
from dflash_jax.objective.head import Rule
from dflash_jax.objective.objective import TargetStates, anchored_loss
from dflash_jax.objective.slot_weights import Decay


def ranked(ranks, mask=None, overlaps=None) -> Acceptance:
    ranks = jnp.asarray(ranks)
    mask = jnp.ones(ranks.shape, bool) if mask is None else jnp.asarray(mask)
    return acceptance(ranks, mask, jnp.zeros(ranks.shape) if overlaps is None else jnp.asarray(overlaps))


def accepted(right, mask=None) -> Acceptance:
    """Of slots whose label is the first choice or far from it."""
    return ranked(jnp.where(jnp.asarray(right, bool), 0, 1000), mask)


def test_accept_length_is_a_mean_over_blocks_with_the_bonus_token():
    found = accepted([[1, 1, 1], [0, 0, 0]]).measures()
    assert found["accept_len"] == 2.5  # the product of the slots' accuracies would give 1.875
    assert found["streak"] == 1.5
    assert found["acc"] == 0.5


def test_a_run_ends_at_the_first_slot_without_label():
    found = accepted([[1, 1, 1]], [[True, False, True]])
    assert found.measures()["accept_len"] == 2.0
    assert found.correct.tolist() == [1, 0, 1]
    assert found.counted.tolist() == [1, 0, 1]


def test_a_run_ends_at_the_first_wrong_draft():
    found = accepted([[1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 1, 1]])
    assert found.survived.tolist() == [3, 2, 1]
    assert found.correct.tolist() == [3, 3, 3]
    assert found.measures()["accept_len"] == 1 + (1 + 0 + 2 + 3) / 4
    assert found.measures()["acc_by_position"].tolist() == [0.75, 0.75, 0.75]
    assert found.measures()["survival_by_position"].tolist() == [0.75, 0.5, 0.25]


def test_blocks_without_a_first_label_are_not_counted():
    found = accepted([[[1, 1], [1, 1]]], [[[True, True], [False, False]]])
    assert (found.blocks, found.measures()["streak"]) == (1, 2.0)
    nothing = accepted([[1, 1]], [[False, False]]).measures()
    assert (nothing["accept_len"], nothing["acc"]) == (1.0, 0.0)
    assert all(np.isfinite(value).all() for value in nothing.values())


def test_acceptance_sums_add():
    parts = [ranked([[0, 3, 9]], overlaps=[[0.5, 0.25, 1.0]]), ranked([[0, 0, 5], [7, 0, 0]])]
    whole = ranked([[0, 3, 9], [0, 0, 5], [7, 0, 0]], overlaps=[[0.5, 0.25, 1.0], [0, 0, 0], [0, 0, 0]])
    jax.tree.map(np.testing.assert_array_equal, parts[0] + parts[1], whole)


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
        assert accepted(right, mask).measures()["streak"] == golden["accept_len"][tuple(block)]


def test_labels_among_the_first_choices_by_hand():
    assert TREE_WIDTHS == (4, 8)
    # The last slot of the second block has no label: it counts nowhere and ends a run.
    found = ranked(
        [[0, 3, 4, 1], [3, 7, 0, 0], [8, 0, 0, 0]], [[True] * 4, [True, True, True, False], [True] * 4]
    ).measures()
    assert found["acc"] == pytest.approx(5 / 11)
    assert found["top4_acc"] == pytest.approx((3 + 2 + 3) / 11)
    assert found["top8_acc"] == pytest.approx((4 + 3 + 3) / 11)
    assert found["streak"] == pytest.approx((1 + 0 + 0) / 3)
    assert found["ddtree_streak4"] == pytest.approx((2 + 1 + 0) / 3)
    assert found["ddtree_streak8"] == pytest.approx((4 + 3 + 0) / 3)


def test_expected_drafts_are_summed_products_of_overlaps():
    found = ranked([[0, 0, 0], [5, 5, 5]], overlaps=[[0.8, 0.5, 0.5], [0.25, 1.0, 0.5]])
    # 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.5 and 0.25 + 0.25 + 0.125; ranks play no part.
    assert found.expected == pytest.approx(1.4 + 0.625)
    cut = ranked([[0, 0, 0]], [[True, False, True]], [[0.8, 0.5, 0.5]])
    assert cut.expected == pytest.approx(0.8)


# The walk.


def simulated(streaks, anchors, kept, valid) -> tuple[int, int]:
    """(tokens, rounds) by following each answer of each row on its own; an answer is a run of valid positions."""
    tokens = rounds = 0
    for row in range(len(valid)):
        if kept[row].sum() != valid[row].sum():
            continue
        streak_at = {int(a): int(s) for a, s, k in zip(anchors[row], streaks[row], kept[row], strict=True) if k}
        position = 0
        while position < len(valid[row]):
            if not valid[row][position]:
                position += 1
                continue
            end = position
            while end < len(valid[row]) and valid[row][end]:
                end += 1
            tokens += end - position
            while position < end:
                rounds += 1
                position += streak_at[position] + 1
            position = end
    return tokens, rounds


ROWS, LENGTH = 3, 13
compiled_walk = jax.jit(walk)


@st.composite
def walks(draw):
    """Arrays for `walk`: rows of any number of answers, some lacking a block; unused anchors are 0."""
    flags = st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH)
    valid = np.array([draw(flags) for _ in range(ROWS)])
    valid[:, -1] = False  # a block needs a token behind its anchor
    anchors, kept = np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), bool)
    for row in range(ROWS):
        positions = np.flatnonzero(valid[row])
        if len(positions) and draw(st.integers(0, 3)) == 0:
            positions = np.delete(positions, draw(st.integers(0, len(positions) - 1)))
        anchors[row, : len(positions)], kept[row, : len(positions)] = positions, True
    streaks = draw(st.lists(st.integers(0, 4), min_size=ROWS * LENGTH, max_size=ROWS * LENGTH))
    return np.array(streaks).reshape(ROWS, LENGTH), anchors, kept, valid


@settings(max_examples=300, deadline=None)
@given(walks())
def test_walk_equals_a_simulation(arrays):
    assert tuple(map(int, compiled_walk(*arrays))) == simulated(*arrays)


def test_walk_by_hand():
    # Two answers of four and two blocks in row 0; row 1 lacks a block of its only answer and is left out.
    valid = np.array([[0, 1, 1, 1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0, 0, 0]], bool)
    anchors = np.array([[1, 2, 3, 4, 6, 7], [1, 3, 0, 0, 0, 0]])
    kept = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]], bool)
    streaks = np.array([[1, 3, 0, 1, 0, 2], [2, 2, 2, 2, 2, 2]])
    # 1 accepts one and the bonus -> 3 -> 4 -> beyond the answer; then 6 -> 7 -> end.
    assert tuple(map(int, walk(*map(jnp.asarray, (streaks, anchors, kept, valid))))) == (6, 5)
    nothing = ranked([[0]], [[False]])
    assert nothing.walk_length == 0.0


def test_walk_over_greedy_text_is_what_greedy_decoding_does(few_tokens_llama):
    """Tokens and verify steps of real chain decoding, and the same from one teacher-forced pass over its text."""
    target, drafter = load_target(few_tokens_llama.path), random_drafter(4)
    frozen, lengths, new, taps = frozen_of(target), np.array([9, 4, 1, 6]), 24, (0, 1)
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, 7, (4, 9)), jnp.int32)
    decoded = jax.jit(generate_chain, static_argnames=("taps", "max_new_tokens"))(
        target, drafter, frozen, prompts, jnp.asarray(lengths), taps=taps, stop=(10**6,), max_new_tokens=new
    )
    tokens = decoded.rows.tokens
    at = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    known = at < lengths[:, None] + new
    answer = known & (at >= lengths[:, None])
    arrays = map(jnp.asarray, (tokens, at, known.astype(np.int32), answer))
    batch = Batch(*arrays, record_ids=jnp.arange(4)[:, None], epochs=jnp.zeros(4, jnp.int32))
    valid = np.array(valid_anchors(batch.loss_mask, batch.segment_ids))
    assert valid.sum() == 4 * (new - 1)

    @jax.jit
    def measured(kept):
        features, _ = target.hidden(tokens, batch.positions, segment_ids=batch.segment_ids, taps=taps)
        return anchored_loss(
            drafter,
            batch,
            TargetStates(features),
            frozen,
            rule=Rule((("ce", 1.0),), Decay(7.0)),
            anchors=jnp.where(kept, batch.positions, 0),
            kept=kept,
            head_chunk=32,
            head_draw=None,
        ).acceptance

    emitted = np.asarray(decoded.emitted)
    rounds = (emitted > 0).sum(axis=1)
    found = measured(jnp.asarray(valid))
    assert found.walk_tokens == emitted.sum() == 4 * (new - 1)
    assert found.walk_rounds == rounds.sum()
    assert found.walk_length == pytest.approx(4 * (new - 1) / rounds.sum())
    assert (emitted > 1).sum() > 3  # some drafts were accepted
    # A row that lacks a block has an unknown way.
    valid[2, 5] = False
    found = measured(jnp.asarray(valid))
    assert found.walk_tokens == 3 * (new - 1)
    assert found.walk_rounds == rounds[[0, 1, 3]].sum()
