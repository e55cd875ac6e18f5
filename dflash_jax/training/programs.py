"""The compiled programs of training, with explicit shardings in and out and the state donated."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from dflash_jax.batch import Batch
from dflash_jax.decode.simulate import simulate
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes
from dflash_jax.models.drafter import Drafter
from dflash_jax.objective.anchors import block_anchors
from dflash_jax.objective.head_sample import Draw
from dflash_jax.objective.noise import NoiseSchedule
from dflash_jax.objective.objective import Frozen, LossSums, TargetStates, block_loss
from dflash_jax.resolve import rule
from dflash_jax.sharding import materialise, replicated, rows, shardings
from dflash_jax.training.features import Featured
from dflash_jax.training.heldout import EvaluateBatch, HeldOutSums
from dflash_jax.training.state import TrainState, first_state, initial_state
from dflash_jax.training.step import GradientSums, Objective, apply_gradients, gradient_sums


@dataclasses.dataclass(frozen=True)
class Programs:
    """first_state: makes the initial state in its shards; abstract: its shapes and shardings, to restore into;
    step: one optimizer step from the featured batches of it."""

    first_state: Callable[[], TrainState]
    abstract: TrainState
    step: Callable[[TrainState, Sequence[Featured], Frozen], tuple[TrainState, dict[str, jax.Array]]]


def make_objective(experiment: Experiment, *, anchors: int, noise: NoiseSchedule | None = None) -> Objective:
    """The recipe's objective with `anchors` blocks per row and `noise` on the features."""
    section, seed = experiment.recipe.objective, experiment.recipe.train.seed
    chosen, size = rule(section, experiment.drafter.block_size), section.head_sample

    def objective(
        drafter: Drafter, batch: Batch, states: TargetStates, frozen: Frozen, step: jax.Array
    ) -> LossSums:
        return block_loss(
            drafter,
            batch,
            states,
            frozen,
            rule=chosen,
            noise_std=None if noise is None else noise(step),
            anchor_count=anchors,
            seed=seed,
            head_chunk=section.head_chunk,
            head_draw=None if size is None else Draw.of_step(step, seed=seed, size=size),
        )

    return objective


def make_programs(
    experiment: Experiment,
    meshes: Meshes,
    optimizer: optax.GradientTransformation,
    *,
    noise: NoiseSchedule | None = None,
) -> Programs:
    """Everything that runs on the drafter's mesh. One compilation for each bucket's shape."""
    mesh, rules = meshes.drafter, meshes.drafter_rules
    structure: nnx.GraphDef[Drafter] = nnx.graphdef(nnx.eval_shape(experiment.initial_drafter))
    make_state = functools.partial(initial_state, experiment.initial_drafter, optimizer)
    shapes = jax.eval_shape(make_state)
    places = shardings(shapes, mesh, rules)
    everywhere, split = replicated(mesh), rows(mesh)
    objective = make_objective(experiment, anchors=experiment.recipe.objective.anchors, noise=noise)
    gradients = functools.partial(gradient_sums, structure=structure, objective=objective)

    def update(state: TrainState, total: GradientSums):
        changed, metrics = apply_gradients(
            state, total, optimizer=optimizer, max_norm_ratio=experiment.recipe.guard.max_grad_norm_ratio
        )
        return changed, metrics if noise is None else {**metrics, "noise_std": noise(state.step)}

    def whole_step(state, batch, states, frozen):
        return update(state, gradients(state.params, batch, states, frozen, state.step))

    inputs = (split, split, everywhere)
    fused = jax.jit(
        whole_step, in_shardings=(places, *inputs), out_shardings=(places, everywhere), donate_argnums=0
    )
    one_batch = jax.jit(gradients, in_shardings=(places.params, *inputs, everywhere))
    add = jax.jit(lambda total, more: total + more, donate_argnums=0)
    apply = jax.jit(update, out_shardings=(places, everywhere), donate_argnums=0)

    def step(state: TrainState, group: Sequence[Featured], frozen: Frozen):
        if len(group) == 1:
            return fused(state, group[0].batch, group[0].states, frozen)
        parts = (one_batch(state.params, item.batch, item.states, frozen, state.step) for item in group)
        return apply(state, functools.reduce(add, parts))

    def begin() -> TrainState:
        params = experiment.initial_params(shapes.params, places.params)
        if params is None:
            return materialise(make_state, mesh, rules)
        complete = functools.partial(first_state, optimizer=optimizer)
        return jax.jit(complete, out_shardings=places, donate_argnums=0)(params)

    return Programs(
        first_state=begin,
        abstract=jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
        ),
        step=step,
    )


def make_evaluation(experiment: Experiment, meshes: Meshes) -> EvaluateBatch:
    """The sums of one held-out batch, for parameters on the drafter's mesh."""
    recipe, section = experiment.recipe, experiment.recipe.eval
    structure: nnx.GraphDef[Drafter] = nnx.graphdef(nnx.eval_shape(experiment.initial_drafter))
    objective = make_objective(experiment, anchors=section.anchors)
    everywhere, split = replicated(meshes.drafter), rows(meshes.drafter)

    def measure(params, batch, states, frozen):
        drafter = nnx.merge(structure, params)
        losses = objective(drafter, batch, states, frozen, jnp.zeros((), jnp.int32))
        if not section.budgets:
            return HeldOutSums(losses, None)
        anchors, kept = block_anchors(batch, seed=recipe.train.seed, count=section.anchors)
        trees = simulate(
            drafter,
            batch,
            states.features,
            frozen,
            anchors=anchors,
            kept=kept,
            budgets=tuple(section.budgets),
            head_chunk=recipe.objective.head_chunk,
        )
        return HeldOutSums(losses, trees)

    compiled = jax.jit(measure, in_shardings=(None, split, split, everywhere), out_shardings=everywhere)
    return lambda params, item, frozen: compiled(params, item.batch, item.states, frozen)


def parameter_count(state: TrainState) -> int:
    """Trained parameters of a state, abstract or real."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(state.params))
