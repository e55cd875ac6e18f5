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
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes
from dflash_jax.models.drafter import Drafter
from dflash_jax.objective.objective import Frozen, LossSums, block_loss
from dflash_jax.objective.slot_weights import decay_weights
from dflash_jax.resolve import decay
from dflash_jax.sharding import materialise, replicated, rows, shardings
from dflash_jax.training.features import Featured
from dflash_jax.training.state import TrainState, initial_state
from dflash_jax.training.step import Objective, apply_gradients, gradient_sums


@dataclasses.dataclass(frozen=True)
class Programs:
    """first_state: makes the initial state in its shards; abstract: its shapes and shardings, to restore into;
    step: one optimizer step from the featured batches of it."""

    first_state: Callable[[], TrainState]
    abstract: TrainState
    step: Callable[[TrainState, Sequence[Featured], Frozen], tuple[TrainState, dict[str, jax.Array]]]


def make_objective(experiment: Experiment, *, anchors: int) -> Objective:
    """The recipe's objective with `anchors` blocks per row."""
    width = experiment.drafter.block_size
    weights = decay_weights(width, decay(experiment.recipe.objective, width))

    def objective(drafter: Drafter, batch: Batch, features: jax.Array, frozen: Frozen) -> LossSums:
        return block_loss(
            drafter,
            batch,
            features,
            frozen,
            slot_weights=jnp.asarray(weights),
            anchor_count=anchors,
            seed=experiment.recipe.train.seed,
            head_chunk=experiment.recipe.objective.head_chunk,
            head_sample=experiment.recipe.objective.head_sample,
        )

    return objective


def make_programs(experiment: Experiment, meshes: Meshes, optimizer: optax.GradientTransformation) -> Programs:
    """Everything that runs on the drafter's mesh. One compilation for each bucket's shape."""
    mesh, rules = meshes.drafter, meshes.drafter_rules
    structure: nnx.GraphDef[Drafter] = nnx.graphdef(nnx.eval_shape(experiment.initial_drafter))
    make_state = functools.partial(initial_state, experiment.initial_drafter, optimizer)
    shapes = jax.eval_shape(make_state)
    places = shardings(shapes, mesh, rules)
    everywhere, split = replicated(mesh), rows(mesh)
    objective = make_objective(experiment, anchors=experiment.recipe.objective.anchors)
    gradients = functools.partial(gradient_sums, structure=structure, objective=objective)
    update = functools.partial(apply_gradients, optimizer=optimizer)

    def whole_step(state, batch, features, frozen):
        return update(state, gradients(state.params, batch, features, frozen))

    inputs = (split, split, everywhere)
    fused = jax.jit(
        whole_step, in_shardings=(places, *inputs), out_shardings=(places, everywhere), donate_argnums=0
    )
    one_batch = jax.jit(gradients, in_shardings=(places.params, *inputs))
    add = jax.jit(lambda total, more: total + more, donate_argnums=0)
    apply = jax.jit(update, out_shardings=(places, everywhere), donate_argnums=0)

    def step(state: TrainState, group: Sequence[Featured], frozen: Frozen):
        if len(group) == 1:
            return fused(state, group[0].batch, group[0].features, frozen)
        parts = (one_batch(state.params, item.batch, item.features, frozen) for item in group)
        return apply(state, functools.reduce(add, parts))

    return Programs(
        first_state=lambda: materialise(make_state, mesh, rules),
        abstract=jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
        ),
        step=step,
    )


def make_evaluation(experiment: Experiment, meshes: Meshes) -> Callable[[nnx.State, Featured, Frozen], LossSums]:
    """The loss sums of one held-out batch, for parameters on the drafter's mesh."""
    structure: nnx.GraphDef[Drafter] = nnx.graphdef(nnx.eval_shape(experiment.initial_drafter))
    objective = make_objective(experiment, anchors=experiment.recipe.eval.anchors)
    everywhere, split = replicated(meshes.drafter), rows(meshes.drafter)

    def measure(params, batch, features, frozen):
        return objective(nnx.merge(structure, params), batch, features, frozen)

    compiled = jax.jit(measure, in_shardings=(None, split, split, everywhere), out_shardings=everywhere)
    return lambda params, item, frozen: compiled(params, item.batch, item.features, frozen)


def parameter_count(state: TrainState) -> int:
    """Trained parameters of a state, abstract or real."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(state.params))
