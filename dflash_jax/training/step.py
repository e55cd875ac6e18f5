"""One optimizer step, as pure functions: gradient sums of batches, and the update they make.

    g = sum_batches grad(sum of weighted losses) / sum_batches (sum of weights)

The division comes once, after everything is added, so the result does not depend on how the rows of a step are
spread over micro-batches or devices. A step whose loss or gradient is not finite, whose gradient is far above the
usual, or that has nothing to learn from, changes neither parameters nor moments.
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
from dflash_jax.training.state import RECENT, TrainState

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


@jax.named_scope("update")
def apply_gradients(
    state: TrainState,
    total: GradientSums,
    *,
    optimizer: optax.GradientTransformation,
    max_norm_ratio: float | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Update the state with the weighted mean gradient, or leave it if that is not finite, too large or empty.

    max_norm_ratio: how far the gradient's norm may be above the median of recent ones, None: as far as it likes.
    The second result is for the log: the measures of the sums, and lr, grad_norm (before clipping),
    update_ratio (norm of the update over that of the parameters), param_norm (theirs, before it) and skipped (1 if
    nothing was changed).
    """
    sums = total.sums
    grads = jax.tree.map(lambda g: g / jnp.maximum(sums.weight, 1e-9), total.grads)
    norm = optax.tree.norm(grads)
    good = jnp.isfinite(norm) & jnp.isfinite(sums.loss) & (sums.weight > 0)
    recent = state.recent_norms
    if max_norm_ratio is not None:
        usual = jnp.isfinite(recent).sum() >= RECENT // 2
        good &= ~usual | (norm <= max_norm_ratio * jnp.nanmedian(recent))
    updates, opt = optimizer.update(grads, state.opt, state.params)
    update_norm, param_norm = optax.tree.norm(updates), optax.tree.norm(state.params)
    good &= jnp.isfinite(update_norm)  # which broken moments are not
    params = optax.apply_updates(state.params, updates)

    def keep(changed, before):
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), changed, before)

    metrics = {
        **sums.measures(),
        "lr": optax.tree.get(opt, "hyperparams")["learning_rate"],
        "grad_norm": norm,
        "update_ratio": update_norm / param_norm,
        "param_norm": param_norm,
        "skipped": (~good).astype(jnp.int32),
    }
    norms = keep(recent.at[state.step % RECENT].set(norm), recent)
    return TrainState(state.step + 1, keep(params, state.params), keep(opt, state.opt), norms), metrics
