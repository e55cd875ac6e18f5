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
from dflash_jax.sharding import rows

MAX_UNFETCHED = 8  # batches whose device memory may wait for the copy to the host


class FeatureCache:
    """Features of whole records in host memory, each cut to its length; full means full, nothing is evicted."""

    def __init__(self, limit_bytes: int):
        self._limit, self._size = limit_bytes, 0
        self._kept: dict[int, np.ndarray] = {}

    @property
    def full(self) -> bool:
        """Whether nothing more will be kept."""
        return self._size >= self._limit

    def recall(self, batch: Batch) -> np.ndarray | None:
        """[B, S, T * E] of a batch, zeros as padding, or None if a record of it is not kept."""
        ids = [int(record_id) for record_id in batch.record_ids if record_id >= 0]
        if not ids or any(record_id not in self._kept for record_id in ids):
            return None
        first = self._kept[ids[0]]
        features = np.zeros((*batch.tokens.shape, first.shape[-1]), first.dtype)
        for row, record_id in enumerate(batch.record_ids):
            if record_id >= 0:
                kept = self._kept[int(record_id)]
                features[row, : len(kept)] = kept
        return features

    def keep(self, batch: Batch, features: jax.Array) -> None:
        """Copy the batch's features to the host, as far as there is room."""
        fetched = np.asarray(features)
        for row, record_id in enumerate(batch.record_ids):
            length = int((batch.segment_ids[row] > 0).sum())
            size = length * fetched.shape[-1] * fetched.dtype.itemsize
            if record_id >= 0 and int(record_id) not in self._kept and self._size + size <= self._limit:
                self._kept[int(record_id)] = fetched[row, :length].copy()
                self._size += size


@dataclasses.dataclass(frozen=True)
class Featured:
    """A batch with its features, both on the drafter's mesh; recalled: no target forward was needed."""

    batch: Batch
    features: jax.Array
    recalled: bool


class FeatureSource:
    """Turns host batches into featured batches, in order, without waiting for either mesh."""

    def __init__(self, target: Target, *, taps: tuple[int, ...], meshes: Meshes, cache: FeatureCache):
        self._meshes, self._cache = meshes, cache
        self._structure, self._params = nnx.split(target)
        self._forward = jax.jit(
            functools.partial(_features, structure=self._structure, taps=taps),
            out_shardings=rows(meshes.target),
        )
        self._unfetched: collections.deque[tuple[Batch, jax.Array]] = collections.deque()

    def __call__(self, batch: Batch) -> Featured:
        """batch: numpy arrays. The features' dtype is the target's."""
        self._keep_arrived()
        landing = rows(self._meshes.drafter)
        recalled = self._cache.recall(batch)
        if recalled is not None:
            return Featured(jax.device_put(batch, landing), jax.device_put(recalled, landing), recalled=True)
        arguments = (batch.tokens, batch.positions, batch.segment_ids)
        features = self._forward(self._params, *jax.device_put(arguments, rows(self._meshes.target)))
        features = jax.device_put(features, landing)
        if not self._cache.full:
            self._unfetched.append((batch, features))
        return Featured(jax.device_put(batch, landing), features, recalled=False)

    def _keep_arrived(self) -> None:
        """Move features that have been computed to the cache; wait only if too many are outstanding."""
        pending = self._unfetched
        while pending and (_arrived(pending[0][1]) or len(pending) > MAX_UNFETCHED):
            self._cache.keep(*pending.popleft())


def _features(params, tokens, positions, segment_ids, *, structure, taps):
    target = nnx.merge(structure, params)
    features, _ = target.hidden(tokens, positions, segment_ids=segment_ids, taps=taps)
    return features


def _arrived(array: jax.Array) -> bool:
    return array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  missing in jax's stubs
