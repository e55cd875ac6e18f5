"""One optimizer step, as pure functions: gradient sums of batches, and the update they make.

    g = sum_batches grad(sum of weighted losses) / sum_batches (sum of weights)

The division comes once, after everything is added, so the result does not depend on how the rows of a step are
spread over micro-batches or devices. A step whose loss or gradient is not finite, or that has
nothing to learn from, changes neither parameters nor moments.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dflash_jax.batch import Batch
from dflash_jax.models.drafter import Drafter
from dflash_jax.objective.objective import Frozen, LossSums, TargetStates
from dflash_jax.training.state import TrainState

# (drafter, batch, target states, frozen, steps done: [] int32) -> sums
Objective = Callable[[Drafter, Batch, TargetStates, Frozen, jax.Array], LossSums]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientSums:
    """grads: gradient of the loss sum; sums: loss, weight and acceptance sums of the same batches."""

    grads: nnx.State
    sums: LossSums

    def __add__(self, other: "GradientSums") -> "GradientSums":
        return jax.tree.map(lambda a, b: a + b, self, other)


def gradient_sums(
    params: nnx.State,
    batch: Batch,
    states: TargetStates,
    frozen: Frozen,
    step: jax.Array,
    *,
    structure: nnx.GraphDef[Drafter],
    objective: Objective,
) -> GradientSums:
    """The gradient of one batch's loss sum with respect to params, and the sums. step: steps done before."""

    def total(params: nnx.State) -> tuple[jax.Array, LossSums]:
        sums = objective(nnx.merge(structure, params), batch, states, frozen, step)
        return sums.loss, sums

    (_, sums), grads = jax.value_and_grad(total, has_aux=True)(params)
    return GradientSums(grads, sums)


def apply_gradients(
    state: TrainState, total: GradientSums, *, optimizer: optax.GradientTransformation
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Update the state with the weighted mean gradient, or leave it if that is not finite or empty.

    The second result is for the log: the measures of the sums, and lr, grad_norm (before clipping),
    update_ratio (norm of the update over norm of the parameters) and skipped (1 if nothing was changed).
    """
    sums = total.sums
    grads = jax.tree.map(lambda g: g / jnp.maximum(sums.weight, 1e-9), total.grads)
    norm = optax.tree.norm(grads)
    good = jnp.isfinite(norm) & jnp.isfinite(sums.loss) & (sums.weight > 0)
    updates, opt = optimizer.update(grads, state.opt, state.params)
    params = optax.apply_updates(state.params, updates)

    def keep(changed, before):
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), changed, before)

    ratio = optax.tree.norm(updates) / optax.tree.norm(state.params)
    metrics = {
        **sums.measures(),
        "lr": optax.tree.get(opt, "hyperparams")["learning_rate"],
        "grad_norm": norm,
        "update_ratio": ratio,
        "skipped": (~good).astype(jnp.int32),
    }
    return TrainState(state.step + 1, keep(params, state.params), keep(opt, state.opt)), metrics
