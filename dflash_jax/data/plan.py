"""The order of all batches of a run, as a pure function of lengths, edges, rows, seed and epoch.

Each epoch, each bucket shuffles its records and cuts them into batches; the last one is filled up with record
id -1. Every record appears once an epoch. The buckets are then interleaved so that all of them are spread
evenly and end together:

    batch j of bucket b sits at (j + phase_b) / n_b, phase_b uniform in [0, 1), n_b batches in bucket b

By that rule alone phases may meet by chance and leave long runs of the largest bucket. So the m batches
of the others are put in order first, and the one at rank i sits at (i + 1/2) / m when the largest bucket's n
join: no run of it is longer than ceil(n / m).
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from dflash_jax.data.buckets import bucket_of
from dflash_jax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedBatch:
    """record_ids: [B] int32, -1 in rows without a record."""

    epoch: int
    bucket: int
    record_ids: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class EpochPlan:
    """One pass, batch by batch. buckets: [batches] int32; record_ids: [batches] of [B] int32."""

    buckets: np.ndarray
    record_ids: tuple[np.ndarray, ...]


def plan_epoch(members: Sequence[np.ndarray], *, rows: Sequence[int], seed: int, epoch: int) -> EpochPlan:
    """Order one pass. For each bucket, members: the ids of its records; rows: the rows of a batch."""
    batches, buckets, positions = [], [], []
    for bucket, (ids, height) in enumerate(zip(members, rows, strict=True)):
        rng = np.random.default_rng((seed, epoch, bucket))
        count = -(-len(ids) // height)
        padded = np.full(count * height, -1, np.int32)
        padded[: len(ids)] = rng.permutation(ids)
        batches += list(padded.reshape(count, height))
        buckets.append(np.full(count, bucket, np.int32))
        positions.append((np.arange(count) + rng.uniform()) / max(count, 1))
    order = _interleave(np.concatenate(buckets), np.concatenate(positions))
    return EpochPlan(np.concatenate(buckets)[order], tuple(batches[index] for index in order))


def _interleave(buckets: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Indices that sort the batches; buckets: [batches], grouped and ascending; positions: [batches]."""
    largest = buckets == np.argmax(np.bincount(buckets))
    others = np.flatnonzero(~largest)
    others = others[np.argsort(positions[others], kind="stable")]  # stable: ties go by bucket
    spread = positions.copy()
    spread[others] = (np.arange(len(others)) + 0.5) / max(len(others), 1)
    return np.argsort(spread, kind="stable")


class BatchPlan:
    """All batches of all epochs, by index: a random-access source. One index is a run's whole data position.

    lengths: [records] int32, of every record; edges, rows: each bucket's padded length and rows of a batch;
    record_ids: the records that take part, all when None.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        edges: Sequence[int],
        rows: Sequence[int],
        seed: int,
        epochs: int,
        record_ids: np.ndarray | None = None,
    ):
        taking_part = np.arange(len(lengths)) if record_ids is None else np.asarray(record_ids)
        buckets = bucket_of(lengths[taking_part], edges)
        self.edges, self.rows, self.seed, self.epochs = tuple(edges), tuple(rows), seed, epochs
        self._members = [taking_part[buckets == bucket] for bucket in range(len(self.edges))]
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)
        self.batches_per_bucket = tuple(
            -(-len(ids) // height) for ids, height in zip(self._members, self.rows, strict=True)
        )
        self.batches_per_epoch = sum(self.batches_per_bucket)
        if not self.batches_per_epoch:
            raise UserError("The data holds no record to train on; check the records and the filters on them.")

    def __len__(self) -> int:
        return self.batches_per_epoch * self.epochs

    def __getitem__(self, index: int) -> PlannedBatch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a plan of {len(self)}")
        epoch, offset = divmod(int(index), self.batches_per_epoch)
        plan = self._epoch(epoch)
        return PlannedBatch(epoch, int(plan.buckets[offset]), plan.record_ids[offset])

    def _plan_epoch(self, epoch: int) -> EpochPlan:
        return plan_epoch(self._members, rows=self.rows, seed=self.seed, epoch=epoch)
