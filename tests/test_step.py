"""The optimizer step: exact normalisation, the guard against bad gradients, and the learning rate's course."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dflash_jax.config import OptimSection
from dflash_jax.objective.acceptance import acceptance
from dflash_jax.objective.objective import LossSums
from dflash_jax.training.optim import learning_rate, make_optimizer
from dflash_jax.training.state import RECENT, TrainState, first_state
from dflash_jax.training.step import GradientSums, apply_gradients


def sums(loss: float, weight: float, **terms: float) -> LossSums:
    """Without any blocks; terms: ce alone unless they are named."""
    nothing = acceptance(jnp.zeros((1, 3)), jnp.zeros((1, 3), bool), jnp.zeros((1, 3)))
    named = {name: jnp.float32(value) for name, value in (terms or {"ce": loss}).items()}
    return LossSums(jnp.float32(loss), jnp.float32(weight), named, nothing)


def gradients(values: list[float], *, loss: float = 1.0, weight: float = 1.0, **terms: float) -> GradientSums:
    return GradientSums(nnx.State({"w": nnx.Param(jnp.asarray(values))}), sums(loss, weight, **terms))


def start(optimizer: optax.GradientTransformation) -> TrainState:
    params = nnx.State({"w": nnx.Param(jnp.asarray([1.0, -2.0]))})
    return first_state(params, optimizer)


def plain_optimizer(**changes) -> optax.GradientTransformation:
    section = dataclasses.replace(OptimSection(warmup=0.0, schedule="constant", lr=0.1), **changes)
    return make_optimizer(section, learning_rate(section, 10))


def test_two_batches_weigh_by_their_slots_and_not_alike():
    # Worked by hand: batch A has 200 / 100, batch B 60 / 10; the mean over slots is 260 / 110, not 4.
    total = gradients([30.0, 0.0], loss=200, weight=100) + gradients([3.0, 0.0], loss=60, weight=10)
    _, metrics = apply_gradients(start(plain_optimizer()), total, optimizer=plain_optimizer())
    assert metrics["loss"] == pytest.approx(260 / 110)
    assert metrics["grad_norm"] == pytest.approx(33 / 110)


def test_each_term_of_a_mixture_is_logged_as_its_own_mean():
    # loss = 0.5 ce + 0.25 tv: (0.5 * 30 + 0.25 * 8) / 10 and (0.5 * 60 + 0.25 * 4) / 5.
    total = gradients([1.0, 0.0], loss=17, weight=10, ce=30, tv=8)
    total = total + gradients([1.0, 0.0], loss=31, weight=5, ce=60, tv=4)
    _, metrics = apply_gradients(start(plain_optimizer()), total, optimizer=plain_optimizer())
    assert metrics["loss"] == pytest.approx(48 / 15)
    assert metrics["loss_ce"] == pytest.approx(90 / 15)
    assert metrics["loss_tv"] == pytest.approx(12 / 15)
    assert metrics["expected_accept_len"] == 1.0


def test_a_single_term_is_logged_once():
    _, metrics = apply_gradients(start(plain_optimizer()), gradients([1.0, 0.0]), optimizer=plain_optimizer())
    assert not {"loss_ce", "expected_accept_len"} & metrics.keys()
    measured = apply_gradients(
        start(plain_optimizer()), gradients([1.0, 0.0], kl=1.0), optimizer=plain_optimizer()
    )[1]
    assert "loss_kl" not in measured
    assert "expected_accept_len" in measured


def test_first_adamw_step_moves_every_weight_by_the_learning_rate():
    # Bias-corrected moments of a first step are g and g^2, so the update is lr * sign(g).
    optimizer = plain_optimizer()
    state, metrics = apply_gradients(start(optimizer), gradients([0.3, -0.002]), optimizer=optimizer)
    np.testing.assert_allclose(state.params["w"][...], [0.9, -1.9], atol=1e-5)
    assert metrics["lr"] == pytest.approx(0.1)
    assert int(state.step) == 1


def test_moments_decay_as_the_recipe_says():
    optimizer = plain_optimizer()
    state, _ = apply_gradients(start(optimizer), gradients([0.5, 0.5]), optimizer=optimizer)
    (adam,) = [item for item in jax.tree.leaves(state.opt, is_leaf=is_adam) if is_adam(item)]
    np.testing.assert_allclose(adam.mu["w"][...], 0.1 * 0.5, rtol=1e-6)  # 1 - b1 = 0.1
    np.testing.assert_allclose(adam.nu["w"][...], 0.05 * 0.25, rtol=1e-5)  # 1 - b2 = 0.05


def is_adam(item) -> bool:
    return isinstance(item, optax.ScaleByAdamState)


def test_clipping_is_by_global_norm_after_normalisation():
    optimizer = plain_optimizer(clip_norm=1.0)
    clipped, metrics = apply_gradients(start(optimizer), gradients([60.0, 80.0], weight=10), optimizer=optimizer)
    unclipped, _ = apply_gradients(start(optimizer), gradients([0.6, 0.8]), optimizer=optimizer)
    assert metrics["grad_norm"] == pytest.approx(10.0)
    jax.tree.map(np.testing.assert_allclose, clipped.opt, unclipped.opt)


@pytest.mark.parametrize(
    "bad",
    [
        gradients([np.nan, 1.0]),
        gradients([np.inf, 1.0]),
        gradients([0.0, 0.0], loss=np.nan),
        gradients([0.0, 0.0], loss=0.0, weight=0.0),
    ],
    ids=["nan", "inf", "nan loss", "nothing to learn from"],
)
def test_a_bad_step_changes_nothing_and_is_counted(bad):
    optimizer = plain_optimizer()
    before = start(optimizer)
    after, metrics = apply_gradients(before, bad, optimizer=optimizer)
    assert int(metrics["skipped"]) == 1
    assert int(after.step) == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, after.opt, before.opt)


def test_broken_moments_spoil_no_parameter():
    optimizer = plain_optimizer()
    before = start(optimizer)
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan) if leaf.shape else leaf, before.opt)
    after, metrics = apply_gradients(
        dataclasses.replace(before, opt=broken), gradients([1.0, 1.0]), optimizer=optimizer
    )
    assert int(metrics["skipped"]) == 1
    assert np.isfinite(metrics["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)


def norms_after(optimizer, norms: list[float], *, ratio: float | None) -> tuple[TrainState, list[int]]:
    """The state after steps with gradients of these norms, and which of them were skipped."""
    state, skipped = start(optimizer), []
    for norm in norms:
        state, metrics = apply_gradients(
            state, gradients([0.6 * norm, 0.8 * norm]), optimizer=optimizer, max_norm_ratio=ratio
        )
        skipped.append(int(metrics["skipped"]))
    return state, skipped


def test_a_gradient_far_above_the_median_of_recent_ones_is_skipped():
    # Median of 1, 2, 3, 1, 2, 3, ..: 2; five times that is 10, which is still taken, and 10.5 is not.
    usual, tried = [1.0, 2.0, 3.0] * RECENT, [10.0, 10.5, 1e6, 2.0]
    _, skipped = norms_after(plain_optimizer(), usual + tried, ratio=5.0)
    assert skipped == [0] * len(usual) + [0, 1, 1, 0]
    assert sum(norms_after(plain_optimizer(), usual + tried, ratio=None)[1]) == 0


def test_what_is_usual_is_not_known_after_few_steps_and_follows_the_run():
    early = [1.0] * (RECENT // 2 - 1) + [100.0] + [1.0] * RECENT + [100.0]
    assert norms_after(plain_optimizer(), early, ratio=5.0)[1] == [0] * (len(early) - 1) + [1]
    growing = [1.03**step for step in range(4 * RECENT)]  # 2.6 times the median of the last 64
    assert sum(norms_after(plain_optimizer(), growing, ratio=5.0)[1]) == 0
    state, _ = norms_after(plain_optimizer(), [*early, 100.0], ratio=5.0)
    assert np.nanmax(state.recent_norms) < 2  # what was skipped says nothing of what is usual


def test_learning_rate_rises_linearly_then_falls_by_cosine_to_zero():
    section = OptimSection(lr=6e-4, warmup=0.04, schedule="cosine")
    rate = learning_rate(section, 1000)
    assert rate(0) == 0.0
    assert rate(20) == pytest.approx(3e-4)
    assert rate(40) == pytest.approx(6e-4)
    assert rate(520) == pytest.approx(3e-4)
    assert rate(1000) == pytest.approx(0.0, abs=1e-10)
    assert max(float(rate(step)) for step in range(1001)) <= 6e-4 * (1 + 1e-6)


def test_wsd_is_stable_then_falls_over_the_last_fifth():
    rate = learning_rate(OptimSection(lr=1e-3, warmup=0.1, schedule="wsd"), 100)
    assert rate(5) == pytest.approx(5e-4)
    assert rate(10) == rate(79) == pytest.approx(1e-3)
    assert rate(90) == pytest.approx(5e-4)
    assert rate(100) == pytest.approx(0.0, abs=1e-9)


def test_constant_schedule_stays_at_its_peak():
    rate = learning_rate(OptimSection(lr=1e-3, warmup=0.1, schedule="constant"), 100)
    assert rate(5) == pytest.approx(5e-4)
    assert rate(10) == rate(99) == pytest.approx(1e-3)
