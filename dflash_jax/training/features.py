"""Features of batches, on the drafter's mesh: from a forward of the frozen target, or from an earlier pass.

The target is frozen, so a record's states never change: they are kept after the first pass, in host memory and on
disk as far as there is room, and the target is asked only for batches with a record that is in neither.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from dflash_jax.batch import Batch
from dflash_jax.mesh import Meshes
from dflash_jax.models.target import Target
from dflash_jax.objective.objective import TargetStates
from dflash_jax.sharding import rows
from dflash_jax.training.feature_store import FeatureStore

MAX_UNFETCHED = 8  # batches whose device memory may wait for the copy to the host


class Spot(NamedTuple):
    """Where a batch has a record: its row, and the positions there."""

    record_id: int
    row: int
    at: slice


def spots(batch: Batch) -> list[Spot]:
    """Where the records of a batch of numpy arrays are."""
    found = []
    for row, (record_ids, segment_ids) in enumerate(zip(batch.record_ids, batch.segment_ids, strict=True)):
        for segment, record_id in enumerate(record_ids, start=1):
            if record_id >= 0:
                positions = np.flatnonzero(segment_ids == segment)
                found.append(Spot(int(record_id), row, slice(int(positions[0]), int(positions[-1]) + 1)))
    return found


def cut(states: TargetStates, spot: Spot) -> TargetStates:
    """A copy of one record's states [n, ..] from those of a batch, numpy arrays [B, S, ..]."""
    return jax.tree.map(lambda values: values[spot.row, spot.at].copy(), states)


def joined(shape: tuple[int, int], places: Sequence[Spot], found: Mapping[int, TargetStates]) -> TargetStates:
    """The states [B, S, ..] of a batch of shape [B, S] from those of its records (one or more); padding is 0."""

    def whole(*parts: np.ndarray) -> np.ndarray:
        array = np.zeros((*shape, parts[0].shape[-1]), parts[0].dtype)
        for spot, part in zip(places, parts, strict=True):
            array[spot.row, spot.at] = part
        return array

    return jax.tree.map(whole, *(found[spot.record_id] for spot in places))


class FeatureCache:
    """States of whole records in host memory, each cut to its length; full means full, nothing is evicted."""

    def __init__(self, limit_bytes: int):
        self._limit, self._size = limit_bytes, 0
        self._full = limit_bytes <= 0
        self._kept: dict[int, TargetStates] = {}

    def wants(self, record_id: int) -> bool:
        """Whether `keep` would be of use."""
        return not self._full and record_id not in self._kept

    def recall(self, record_ids: Iterable[int]) -> dict[int, TargetStates]:
        """The states of those records that are kept."""
        return {record_id: self._kept[record_id] for record_id in record_ids if record_id in self._kept}

    def keep(self, record_id: int, states: TargetStates) -> None:
        """Keep a record's states, host arrays [n, ..], if there is room; the first that has none ends it all."""
        size = sum(values.nbytes for values in jax.tree.leaves(states))
        if self._size + size > self._limit:
            self._full = True
        else:
            self._kept[record_id] = states
            self._size += size


@dataclasses.dataclass(frozen=True)
class Featured:
    """A batch with its target states, both on the drafter's mesh; recalled: no target forward was needed."""

    batch: Batch
    states: TargetStates
    recalled: bool

    @property
    def arrived(self) -> bool:
        """Whether the states are computed and on the drafter's mesh."""
        return _arrived(self.states.features)


class FeatureSource:
    """Turns host batches into featured batches, in order, without waiting for either mesh.

    It waits for the disk, while both meshes work on the batches before.
    target: None where the store holds every record. teacher: whether the last states are wanted too; without them
    the layers above the last tap do not run. cache, store: what is asked first, and given what they have room for.
    """

    def __init__(
        self,
        target: Target | None,
        *,
        taps: tuple[int, ...],
        teacher: bool,
        meshes: Meshes,
        cache: FeatureCache,
        store: FeatureStore | None = None,
    ):
        self._meshes, self._cache, self._store = meshes, cache, store
        self._keepers = [cache] if store is None else [cache, store]
        self._forward = None if target is None else _forward(target, taps=taps, teacher=teacher, meshes=meshes)
        self._unfetched: collections.deque[tuple[list[Spot], TargetStates]] = collections.deque()

    def __call__(self, batch: Batch) -> Featured:
        """batch: numpy arrays. The states' dtype is the target's."""
        self._keep_arrived()
        landing, places = rows(self._meshes.drafter), spots(batch)
        found = self._recalled(places)
        if found:
            states = jax.device_put(joined(batch.tokens.shape, places, found), landing)
            return Featured(jax.device_put(batch, landing), states, recalled=True)
        if self._forward is None:
            raise ValueError("a record of the batch is not in the store, and there is no target to ask")
        states = jax.device_put(self._forward(batch), landing)
        if any(self._takers(spot.record_id) for spot in places):
            self._unfetched.append((places, states))
        return Featured(jax.device_put(batch, landing), states, recalled=False)

    def keep_rest(self) -> None:
        """Wait for what is still being computed, and give it to the cache and the store."""
        while self._unfetched:
            self._keep(*self._unfetched.popleft())

    def _recalled(self, places: Sequence[Spot]) -> dict[int, TargetStates]:
        """The states of the records of a batch if each of them is kept somewhere, otherwise none."""
        record_ids = [spot.record_id for spot in places]
        found = self._cache.recall(record_ids)
        missing = [record_id for record_id in record_ids if record_id not in found]
        if not missing:
            return found
        if self._store is None or not self._store.holds(missing):
            return {}
        for record_id, states in self._store.read(missing).items():
            found[record_id] = states
            if self._cache.wants(record_id):
                self._cache.keep(record_id, states)
        return found

    def _keep_arrived(self) -> None:
        """Keep the states that have been computed; wait only if too many are outstanding."""
        pending = self._unfetched
        while pending and (_arrived(pending[0][1].features) or len(pending) > MAX_UNFETCHED):
            self._keep(*pending.popleft())

    def _keep(self, places: Sequence[Spot], states: TargetStates) -> None:
        wanted = [spot for spot in places if self._takers(spot.record_id)]
        if not wanted:
            return
        fetched = jax.tree.map(np.asarray, states)
        for spot in wanted:
            own = cut(fetched, spot)
            for keeper in self._takers(spot.record_id):
                keeper.keep(spot.record_id, own)

    def _takers(self, record_id: int) -> list[FeatureCache | FeatureStore]:
        return [keeper for keeper in self._keepers if keeper.wants(record_id)]


def _forward(target: Target, *, taps: tuple[int, ...], teacher: bool, meshes: Meshes):
    """The target's states of a batch of numpy arrays, on its own mesh."""
    structure, params = nnx.split(target)
    place = rows(meshes.target)
    states = jax.jit(
        functools.partial(_states, structure=structure, taps=taps, teacher=teacher), out_shardings=place
    )

    def forward(batch: Batch) -> TargetStates:
        return states(params, *jax.device_put((batch.tokens, batch.positions, batch.segment_ids), place))

    return forward


def _states(params, tokens, positions, segment_ids, *, structure, taps, teacher):
    target = nnx.merge(structure, params)
    features, last = target.hidden(tokens, positions, segment_ids=segment_ids, taps=taps)
    return TargetStates(features, last if teacher else None)


def _arrived(array: jax.Array) -> bool:
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  missing in jax's stubs
