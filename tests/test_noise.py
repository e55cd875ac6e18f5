"""Noise on the features: its course over a run, what it depends on, and that nothing else is touched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import random_drafter

from dflash_jax import resolve
from dflash_jax.batch import Batch
from dflash_jax.config import ObjectiveSection
from dflash_jax.objective.anchors import token_keys
from dflash_jax.objective.head import Rule
from dflash_jax.objective.noise import noise_schedule, with_noise
from dflash_jax.objective.objective import Frozen, TargetStates, block_loss
from dflash_jax.objective.slot_weights import Decay


def course(shape: str, at: tuple[int, ...], **changes) -> list[float]:
    """Standard deviations at steps of a run of 101 that rises to 0.4 in ten of them and ends with 0.1."""
    given = {"peak": 0.4, "end": 0.1, "warmup": 0.1, "shape": shape, "steps": 101} | changes
    schedule = noise_schedule(**given)
    assert schedule is not None
    return [float(schedule(jnp.asarray(step))) for step in at]


def test_linear_noise_rises_and_falls_along_straight_lines():
    found = course("linear", (0, 5, 10, 40, 55, 100))
    assert found == pytest.approx([0.0, 0.2, 0.4, 0.3, 0.25, 0.1], abs=1e-6)


def test_cosine_noise_falls_slowly_first():
    # A third of the way down: 0.4 - 0.3 (1 - cos 60 degrees) / 2.
    found = course("cosine", (0, 5, 10, 40, 55, 70, 100))
    assert found == pytest.approx([0.0, 0.2, 0.4, 0.325, 0.25, 0.175, 0.1], abs=1e-6)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_noise_without_warmup_starts_at_its_peak_and_may_grow(shape):
    assert course(shape, (0, 50, 100), warmup=0.0) == pytest.approx([0.4, 0.25, 0.1], abs=1e-6)
    assert course(shape, (0, 50, 100), warmup=0.0, peak=0.0) == pytest.approx([0.0, 0.05, 0.1], abs=1e-6)
    assert course(shape, (0,), warmup=0.0, steps=1) == pytest.approx([0.4])
    assert course(shape, (0, 50, 100), warmup=1.0) == pytest.approx([0.0, 0.4 * 50 / 101, 0.4 * 100 / 101])


def test_a_recipe_without_noise_has_no_schedule():
    assert resolve.noise(ObjectiveSection(), 100) is None
    section = ObjectiveSection(noise_peak=0.2, noise_end=0.1, noise_warmup=0.5, noise_schedule="cosine")
    schedule = resolve.noise(section, 41)
    assert schedule is not None
    found = [float(schedule(jnp.asarray(step))) for step in (0, 20, 30, 40)]
    assert found == pytest.approx([0.0, 0.2, 0.15, 0.1], abs=1e-6)


def keys_of(records: list[int], length: int, *, seed: int = 3, epoch: int = 0) -> jax.Array:
    ones = jnp.ones((len(records), length), jnp.int32)
    places, ids = jnp.broadcast_to(jnp.arange(length), ones.shape), jnp.asarray(records)[:, None]
    return token_keys(seed, Batch(ones, places, ones, ones > 0, ids, jnp.full(len(records), epoch)))


def test_noise_belongs_to_seed_pass_and_record_and_not_to_the_row():
    zeros, std = jnp.zeros((3, 6, 8)), jnp.float32(1.0)
    one = with_noise(keys_of([7, 4, 9], 6), zeros, std)
    other = with_noise(keys_of([9, 5, 7], 6), zeros, std)
    np.testing.assert_array_equal(other[jnp.array([2, 0])], one[jnp.array([0, 2])])
    for changed in (
        one[1],
        with_noise(keys_of([7], 6, seed=4), zeros[:1], std)[0],
        with_noise(keys_of([7], 6, epoch=1), zeros[:1], std)[0],
    ):
        assert (np.abs(changed - one[0]) > 1e-4).mean() > 0.9
    # Nor to the padding of the row.
    longer = with_noise(keys_of([7], 11), jnp.zeros((1, 11, 8)), std)
    np.testing.assert_array_equal(longer[0, :6], one[0])


@pytest.mark.parametrize("std", [0.05, 2.0])
def test_noise_has_its_standard_deviation(std):
    features = jnp.full((2, 300, 40), 5.0)
    noise = np.asarray(with_noise(keys_of([1, 2], 300), features, jnp.float32(std))) - 5.0
    assert noise.mean() == pytest.approx(0.0, abs=4 * std / np.sqrt(noise.size))
    assert noise.std() == pytest.approx(std, rel=0.02)
    assert (noise**4).mean() == pytest.approx(3 * std**4, rel=0.1)  # as of a Gaussian; 1.8 if it were uniform
    # Tokens and channels have noise of their own.
    for table, highest in ((noise[0].T, 0.4), (noise[0], 0.9)):
        correlations = np.corrcoef(table)
        assert np.abs(correlations - np.eye(len(table))).max() < highest


def test_noise_keeps_the_dtype_of_the_features():
    features = jnp.ones((1, 4, 8), jnp.bfloat16)
    found = with_noise(keys_of([1], 4), features, jnp.float32(0.5))
    assert found.dtype == jnp.bfloat16
    assert (found != features).any()


@dataclasses.dataclass(frozen=True)
class Example:
    batch: Batch
    states: TargetStates
    frozen: Frozen


@pytest.fixture(scope="module")
def example() -> Example:
    random = np.random.default_rng(2)
    mask = np.zeros((2, 20), bool)
    mask[0, 5:14], mask[1, 9:18] = True, True
    table = jnp.asarray(random.standard_normal((30, 36)), jnp.float32)
    batch = Batch(
        tokens=jnp.asarray(random.integers(0, 30, (2, 20)), jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(20), (2, 20)),
        segment_ids=jnp.ones((2, 20), jnp.int32),
        loss_mask=jnp.asarray(mask),
        record_ids=jnp.asarray([[40], [41]]),
        epochs=jnp.zeros(2, jnp.int32),
    )
    features, last = (jnp.asarray(random.standard_normal((2, 20, width)), jnp.float32) for width in (72, 36))
    return Example(batch, TargetStates(features, last), Frozen(table, table[::-1], None))


@jax.jit
def losses(drafter, example, noise_std):
    return block_loss(
        drafter,
        example.batch,
        example.states,
        example.frozen,
        rule=Rule((("ce", 1.0), ("tv", 1.0)), Decay(4.0)),
        anchor_count=3,
        seed=0,
        head_chunk=3,
        head_draw=None,
        noise_std=noise_std,
    )


jax.tree_util.register_dataclass(Example)


def without_context(drafter):
    """The same drafter with value projections of zero: nothing that it attends to reaches its states."""
    structure, params = nnx.split(drafter)

    def shut(path, leaf):
        return jnp.zeros_like(leaf) if "v_proj" in jax.tree_util.keystr(path) else leaf

    return nnx.merge(structure, jax.tree_util.tree_map_with_path(shut, params))


def test_noise_of_zero_is_no_noise(example):
    drafter = random_drafter(1)
    jax.tree.map(
        np.testing.assert_array_equal,
        losses(drafter, example, jnp.float32(0.0)),
        losses(drafter, example, None),
    )


def test_only_the_features_are_noisy(example):
    drafter, noisy, quiet = random_drafter(1), jnp.float32(0.5), jnp.float32(0.0)
    with_it, without = losses(drafter, example, noisy), losses(drafter, example, quiet)
    assert abs(with_it.loss - without.loss) > 1e-3
    assert with_it.weight == without.weight  # the same anchors
    # A drafter that does not look at features shows that target distributions, anchors and labels are as before.
    blind = without_context(drafter)
    jax.tree.map(np.testing.assert_array_equal, losses(blind, example, noisy), losses(blind, example, quiet))
    changed = dataclasses.replace(example, states=example.states._replace(last=example.states.last + 1.0))
    assert abs(losses(blind, changed, quiet).terms["tv"] - losses(blind, example, quiet).terms["tv"]) > 1e-3
