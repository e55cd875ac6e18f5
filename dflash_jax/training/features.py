"""Features of batches, on the drafter's mesh: from a forward of the frozen target, or from an earlier pass.

The target is frozen, so a row's features never change: with room on the host they are kept after the first pass
and the target is asked only once for each record.
"""

import collections
import dataclasses
import functools

import jax
import numpy as np
from flax import nnx

from dflash_jax.batch import Batch
from dflash_jax.mesh import Meshes
from dflash_jax.models.target import Target
from dflash_jax.objective.objective import TargetStates
from dflash_jax.sharding import rows

MAX_UNFETCHED = 8  # batches whose device memory may wait for the copy to the host


class FeatureCache:
    """States of whole records in host memory, each cut to its length; full means full, nothing is evicted."""

    def __init__(self, limit_bytes: int):
        self._limit, self._size = limit_bytes, 0
        self._kept: dict[int, TargetStates] = {}

    @property
    def full(self) -> bool:
        """Whether nothing more will be kept."""
        return self._size >= self._limit

    def recall(self, batch: Batch) -> TargetStates | None:
        """The states of a batch, [B, S, ..] each, zeros as padding, or None if a record of it is not kept."""
        ids = [int(record_id) for record_id in batch.record_ids]
        if all(record_id < 0 for record_id in ids):
            return None
        if any(record_id >= 0 and record_id not in self._kept for record_id in ids):
            return None
        length = batch.tokens.shape[1]

        def stacked(*kept: np.ndarray) -> np.ndarray:
            whole = np.zeros((len(ids), length, kept[0].shape[-1]), kept[0].dtype)
            rows = [row for row, record_id in enumerate(ids) if record_id >= 0]
            for row, values in zip(rows, kept, strict=True):
                whole[row, : len(values)] = values
            return whole

        return jax.tree.map(stacked, *(self._kept[record_id] for record_id in ids if record_id >= 0))

    def keep(self, batch: Batch, states: TargetStates) -> None:
        """Copy the batch's states to the host, as far as there is room."""
        fetched = jax.tree.map(np.asarray, states)
        for row, record_id in enumerate(batch.record_ids):
            length = int((batch.segment_ids[row] > 0).sum())
            own = jax.tree.map(lambda values, row=row, length=length: values[row, :length], fetched)
            size = sum(values.nbytes for values in jax.tree.leaves(own))
            if record_id >= 0 and int(record_id) not in self._kept and self._size + size <= self._limit:
                self._kept[int(record_id)] = jax.tree.map(np.copy, own)
                self._size += size


@dataclasses.dataclass(frozen=True)
class Featured:
    """A batch with its target states, both on the drafter's mesh; recalled: no target forward was needed."""

    batch: Batch
    states: TargetStates
    recalled: bool


class FeatureSource:
    """Turns host batches into featured batches, in order, without waiting for either mesh.

    teacher: whether the last states are wanted too; without them the layers above the last tap do not run.
    """

    def __init__(
        self, target: Target, *, taps: tuple[int, ...], teacher: bool, meshes: Meshes, cache: FeatureCache
    ):
        self._meshes, self._cache = meshes, cache
        self._structure, self._params = nnx.split(target)
        self._forward = jax.jit(
            functools.partial(_states, structure=self._structure, taps=taps, teacher=teacher),
            out_shardings=rows(meshes.target),
        )
        self._unfetched: collections.deque[tuple[Batch, TargetStates]] = collections.deque()

    def __call__(self, batch: Batch) -> Featured:
        """batch: numpy arrays. The states' dtype is the target's."""
        self._keep_arrived()
        landing = rows(self._meshes.drafter)
        recalled = self._cache.recall(batch)
        if recalled is not None:
            return Featured(jax.device_put(batch, landing), jax.device_put(recalled, landing), recalled=True)
        arguments = (batch.tokens, batch.positions, batch.segment_ids)
        states = self._forward(self._params, *jax.device_put(arguments, rows(self._meshes.target)))
        states = jax.device_put(states, landing)
        if not self._cache.full:
            self._unfetched.append((batch, states))
        return Featured(jax.device_put(batch, landing), states, recalled=False)

    def _keep_arrived(self) -> None:
        """Move features that have been computed to the cache; wait only if too many are outstanding."""
        pending = self._unfetched
        while pending and (_arrived(pending[0][1].features) or len(pending) > MAX_UNFETCHED):
            self._cache.keep(*pending.popleft())


def _states(params, tokens, positions, segment_ids, *, structure, taps, teacher):
    target = nnx.merge(structure, params)
    features, last = target.hidden(tokens, positions, segment_ids=segment_ids, taps=taps)
    return TargetStates(features, last if teacher else None)


def _arrived(array: jax.Array) -> bool:
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  missing in jax's stubs
