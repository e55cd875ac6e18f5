"""Where blocks may start, which of those places are drawn, and what the slots must predict: hand-made tables."""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.batch import Batch
from dflash_jax.objective.anchors import block_labels, draw_anchors, token_keys, valid_anchors

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


def keys_of(record_ids, length, *, seed=0, epoch=0):
    ids = jnp.asarray(record_ids, jnp.int32)[:, None]
    ones = jnp.ones((len(ids), length), jnp.int32)
    places = jnp.broadcast_to(jnp.arange(length), ones.shape)
    return token_keys(seed, Batch(ones, places, ones, ones > 0, ids, jnp.full(len(ids), epoch)))


def test_anchors_are_distinct_valid_and_ascending():
    valid = jnp.asarray(np.random.default_rng(0).random((50, 40)) < 0.6)
    anchors, kept = draw_anchors(keys_of(range(50), 40), valid, 12)
    assert anchors.dtype == jnp.int32
    assert kept.all()
    assert (np.diff(anchors, axis=1) > 0).all()
    assert np.take_along_axis(np.asarray(valid), np.asarray(anchors), axis=1).all()


def test_fewer_valid_positions_than_asked_for_are_all_drawn():
    valid = np.zeros((3, 9), bool)
    valid[0, [2, 3, 7]] = True
    valid[1, 0] = True
    for count in (5, 12):  # 12 is more than the row is long
        anchors, kept = draw_anchors(keys_of([4, 5, 6], 9), jnp.asarray(valid), count)
        assert anchors.shape == kept.shape == (3, count)
        assert kept.sum(axis=1).tolist() == [3, 1, 0]
        assert anchors[0, :3].tolist() == [2, 3, 7]
        assert anchors[1, 0] == 0
        assert (np.asarray(anchors)[~np.asarray(kept)] == 0).all()


def test_every_set_of_anchors_is_equally_likely():
    valid = jnp.zeros((6000, 11), bool).at[:, jnp.array([1, 4, 5, 8])].set(True)
    anchors, _ = draw_anchors(keys_of(range(6000), 11), valid, 2)
    pairs, counts = np.unique(np.asarray(anchors), axis=0, return_counts=True)
    assert pairs.tolist() == [[1, 4], [1, 5], [1, 8], [4, 5], [4, 8], [5, 8]]
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in a thousand draws


def test_a_rows_anchors_depend_on_seed_epoch_and_record_alone():
    valid = jnp.ones((4, 30), bool)
    together, _ = draw_anchors(keys_of([3, 9, 1, 7], 30), valid, 6)
    reordered, _ = draw_anchors(keys_of([7, 3], 30), valid[:2], 6)
    alone, _ = draw_anchors(keys_of([9], 30), valid[:1], 6)
    np.testing.assert_array_equal(reordered[0], together[3])
    np.testing.assert_array_equal(reordered[1], together[0])
    np.testing.assert_array_equal(alone[0], together[1])
    for other in (keys_of([9], 30, epoch=1), keys_of([9], 30, seed=1), keys_of([10], 30)):
        assert (draw_anchors(other, valid[:1], 6)[0] != alone).any()


def test_a_record_draws_the_same_in_a_row_of_its_own_and_packed_behind_another():
    lengths = (9, 7)
    alone = [
        np.asarray(jax.random.key_data(keys_of([record], n)))[0] for record, n in zip((3, 8), lengths, strict=True)
    ]
    segments = np.repeat([1, 2, 0], [*lengths, 2])[None]
    places = np.concatenate([*map(np.arange, lengths), [0, 0]])[None]
    packed = Batch(places, places, segments, segments > 0, np.array([[3, 8, -1]]), np.zeros(1, int))
    together = np.asarray(jax.random.key_data(token_keys(0, jax.tree.map(jnp.asarray, packed))))[0]
    np.testing.assert_array_equal(together[:16], np.concatenate(alone))
