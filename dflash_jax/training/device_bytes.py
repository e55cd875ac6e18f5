"""What stays on each device of a run, in bytes, from shapes and shardings; nothing is allocated."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes
from dflash_jax.sharding import replicated, shardings
from dflash_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Machine:
    """platform: cpu, gpu or tpu; devices: how many jax finds; limits: by id, bytes of a device for arrays."""

    platform: str
    devices: int
    limits: Mapping[int, int]

    @classmethod
    def found(cls) -> Self:
        """The one that this runs on. Not every device tells its limit."""
        said = {device: device.memory_stats() or {} for device in jax.local_devices()}
        limits = {device.id: stats["bytes_limit"] for device, stats in said.items() if "bytes_limit" in stats}
        return cls(jax.default_backend(), jax.device_count(), limits)


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes of arrays on one device. target: its weights; parameters, moments, gradient: the drafter's; ends: the
    target's embedding and head for the drafter's use, as far as they are arrays of their own."""

    target: int = 0
    parameters: int = 0
    moments: int = 0
    gradient: int = 0
    ends: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def memory_by_device(experiment: Experiment, *, state: TrainState, meshes: Meshes) -> dict[int, DeviceBytes]:
    """By id of each device in the meshes, what stays there: neither activations nor features nor batches."""
    recipe = experiment.recipe
    graph, abstract = experiment.files.abstract(jnp.dtype(recipe.target.dtype))
    places = shardings(abstract, meshes.target, meshes.target_rules)
    target, placed = nnx.merge(graph, abstract), nnx.merge(graph, places)
    rows, whole = recipe.drafter.vocab, replicated(meshes.drafter)

    def copied(array: nnx.Variable, place: nnx.Variable) -> int:
        # Arrays that lie as they should already are not copied.
        is_there = place.get_value().is_equivalent_to(whole, 2) and recipe.target.dtype == recipe.drafter.dtype
        return 0 if is_there else math.prod(array.shape) * jnp.dtype(recipe.drafter.dtype).itemsize

    ends = copied(target.embedding, placed.embedding)
    if rows is not None and rows < target.head.shape[0]:
        ends += rows * target.head.shape[1] * jnp.dtype(recipe.drafter.dtype).itemsize
    elif target.head is not target.embedding:
        ends += copied(target.head, placed.head)
    weights = _held(zip(jax.tree.leaves(abstract), jax.tree.leaves(places), strict=True))
    trees = (state.params, state.opt)
    own, moments = (_held((leaf, leaf.sharding) for leaf in jax.tree.leaves(tree)) for tree in trees)
    gradients = 2 if recipe.train.accumulate > 1 else 1  # the sum, and what is added to it
    found = {device.id: DeviceBytes(target=weights) for device in meshes.target.devices.flat}
    for device in meshes.drafter.devices.flat:
        before = found.get(device.id, DeviceBytes())
        found[device.id] = DeviceBytes(before.target, own, moments, gradients * own, ends)
    return found


def _held(placed: Iterable[tuple[jax.ShapeDtypeStruct, Sharding]]) -> int:
    """Bytes of the arrays' shards on each device of their mesh."""
    return sum(math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, place in placed)
