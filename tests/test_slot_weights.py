"""Slot weights against the numbers of the published recipes."""

import numpy as np
import pytest

from dflash_jax.objective.slot_weights import decay_weights, default_gamma


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
