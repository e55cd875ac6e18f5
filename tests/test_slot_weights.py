"""Slot weights against the numbers of the published recipes, SpecForge's and speculators'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import GOLDEN

from dflash_jax.objective.slot_weights import Decay, Dpace, default_gamma, slot_weights


def weights_of(rule, mask, probability=None):
    """[W - 1]; mask by slot from 1."""
    mask = jnp.asarray(mask, jnp.float32)
    found = rule(jnp.zeros(mask.shape) if probability is None else jnp.asarray(probability), mask)
    assert found.dtype == jnp.float32
    return found


@pytest.mark.parametrize(("block_size", "gamma", "total"), [(16, 7.0, 6.631), (10, 5.0, 4.605), (8, 4.0, 3.735)])
def test_slot_weights_of_the_published_recipes(block_size, gamma, total):
    assert default_gamma(block_size) == gamma
    weights = weights_of(Decay(gamma), np.ones(block_size - 1))
    assert weights[0] == 1.0
    assert weights.sum() == pytest.approx(total, abs=6e-4)


def test_slot_weights_by_position():
    assert weights_of(Decay(7.0), np.ones(15))[14] == pytest.approx(0.135, abs=5e-4)
    assert weights_of(Decay(10.0), np.ones(15))[14] == pytest.approx(0.247, abs=5e-4)


def test_gamma_between_the_published_sizes_is_interpolated():
    assert default_gamma(12) == pytest.approx(5.67, abs=5e-3)
    assert default_gamma(9) == pytest.approx(4.5)
    assert (default_gamma(2), default_gamma(64)) == (4.0, 7.0)


@pytest.mark.parametrize("rule", [Decay(4.0), Decay(float("inf")), Dpace(0.5), Dpace(1.0)], ids=str)
def test_slots_without_a_label_weigh_nothing(rule):
    weights = weights_of(rule, [[1, 0, 1], [0, 0, 0]], [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]])
    assert (weights[0] > 0).tolist() == [True, False, True]
    assert weights[1].tolist() == [0, 0, 0]


def test_uniform_weighs_all_slots_alike():
    assert weights_of(slot_weights("uniform", gamma=7.0, alpha=0.5), [1, 1, 0, 1]).tolist() == [1, 1, 0, 1]


def test_a_name_takes_its_own_constant():
    assert slot_weights("decay", gamma=3.0, alpha=0.25) == Decay(3.0)
    assert slot_weights("dpace", gamma=3.0, alpha=0.25) == Dpace(0.25)


def test_dpace_by_hand():
    # alpha 0.5: c = 0.95, 0.9, 0.65, 0.55, their products 0.95, 0.855, 0.556, 0.306, summed from behind.
    found = weights_of(Dpace(0.5), [1, 1, 1, 1], [0.9, 0.8, 0.3, 0.1])
    np.testing.assert_allclose(found, [2.666, 1.716, 0.861, 0.306], atol=6e-4)
    assert found.sum() == pytest.approx(5.55, abs=1e-3)


def test_dpace_passes_over_a_slot_without_label():
    # Products 0.95, (0.95), 0.6175, 0.340: the missing slot neither shrinks them nor adds to the sums.
    found = weights_of(Dpace(0.5), [1, 0, 1, 1], [0.9, 0.8, 0.3, 0.1])
    np.testing.assert_allclose(found, [1.907, 0.0, 0.957, 0.340], atol=6e-4)


def test_dpace_without_regard_to_the_drafter_counts_the_slots_ahead():
    found = weights_of(Dpace(1.0), [1, 1, 0, 1], [0.0, 0.3, 0.1, 0.9])
    np.testing.assert_allclose(found, [3, 2, 0, 1], rtol=1e-6)


def test_dpace_is_a_constant_of_the_gradient():
    slope = jax.grad(lambda q: Dpace(0.5)(q, jnp.ones(4)).sum())(jnp.asarray([0.9, 0.8, 0.3, 0.1]))
    np.testing.assert_array_equal(slope, 0)


@pytest.mark.parametrize(("case", "alpha"), [("dpace", 0.5), ("dpace_a01", 0.1)])
def test_dpace_weighs_as_specforges(case, alpha):
    """Its numerator before the division by the rows of the batch; its mask has gaps."""
    golden, expected = np.load(GOLDEN / "specforge_loss.npz"), np.load(GOLDEN / "specforge_dpace.npz")
    losses, mask = golden["full/neg_log_q"][:, :, 1:], golden["weight_mask"][:, :, 1:]
    assert (np.cumprod(mask, axis=-1) != mask).any()
    weights = weights_of(Dpace(alpha), mask, np.exp(-losses))
    assert (weights * losses).sum() == pytest.approx(expected[f"{case}/loss_num"], rel=1e-6)


@pytest.mark.parametrize("term", ["ce", "kl_div", "rkl", "tv", "nla", "lk_hybrid"])
def test_dpace_weighs_as_speculators(term):
    """It takes exp(-loss) of each term for the label's probability and divides by the count of labels."""
    golden = np.load(GOLDEN / "speculators_loss.npz")
    losses, mask = (golden[name].reshape(6, 8)[:, 1:] for name in (f"elementwise/{term}", "loss_mask"))
    weights = weights_of(Dpace(0.5), mask, np.exp(-losses))
    assert (weights * losses).sum() / mask.sum() == pytest.approx(golden[f"{term}/dpace/loss"], rel=2e-6)
