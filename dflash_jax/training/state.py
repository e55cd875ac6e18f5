"""What training changes from step to step."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step: optimizer steps taken (skipped ones included); params: the drafter's; opt: the optimizer's state."""

    step: jax.Array
    params: nnx.State
    opt: optax.OptState


def initial_state(make_drafter: Callable[[], nnx.Module], optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; run it through `sharding.materialise` so that it is born sharded."""
    return first_state(nnx.state(make_drafter(), nnx.Param), optimizer)


def first_state(params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step from given parameters."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
