"""Accept lengths by hand, and SpecForge's."""

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import GOLDEN

from dflash_jax.objective.acceptance import acceptance


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
