"""What training changes from step to step."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

RECENT = 64  # steps whose gradient norms say what is usual


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step: optimizer steps taken (skipped ones included); params: the drafter's; opt: the optimizer's state;
    recent_norms: [RECENT] float32 gradient norms of the last steps that were not skipped, NaN before the first."""

    step: jax.Array
    params: nnx.State
    opt: optax.OptState
    recent_norms: jax.Array


def initial_state(make_drafter: Callable[[], nnx.Module], optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; run it through `sharding.materialise` so that it is born sharded."""
    return first_state(nnx.state(make_drafter(), nnx.Param), optimizer)


def first_state(params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step from given parameters."""
    unknown = jnp.full(RECENT, jnp.nan, jnp.float32)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), unknown)
