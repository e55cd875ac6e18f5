"""The order of all batches of a run, as a pure function of lengths, shapes, seed and epoch.

Each pass, each bucket shuffles its rows and cuts them into batches; the last one is filled up with rows without a
record. The buckets then take turns by interleave.py. Every record appears once a pass.
"""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Self

import numpy as np

from dflash_jax.batches.buckets import bucket_of
from dflash_jax.batches.interleave import interleave
from dflash_jax.batches.packing import pack
from dflash_jax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedBatch:
    """record_ids: [B, R] int32, the records of each row, -1 where there is none."""

    epoch: int
    bucket: int
    record_ids: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class EpochPlan:
    """One pass. buckets: [batches] int32; places: [batches], each batch's index among those of its bucket;
    record_ids: for each bucket [batches of it, B, R] int32."""

    buckets: np.ndarray
    places: np.ndarray
    record_ids: tuple[np.ndarray, ...]


class BatchPlan:
    """All batches of all passes, by index: a random-access source. One index is a run's whole data position.

    lengths: [records] int32, of every record; edges, rows: each bucket's padded length and rows of a batch;
    record_ids: the records that take part, all when None. batching:

        bucketed    a row holds one record and is as long as its bucket; the buckets take turns
        packed      a row is as long as the last bucket and holds as many records as fit; which of them share a row
                    is settled once, the order of the rows in each pass
        random      a row is as long as the last bucket and holds one record, of any length
        sorted      as bucketed, from the shortest record to the longest, the same in every pass
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
        batching: str = "bucketed",
    ):
        taking_part = np.arange(len(lengths)) if record_ids is None else np.asarray(record_ids)
        if not len(taking_part):
            raise UserError("The data holds no record to train on; check the records and the filters on them.")
        buckets = bucket_of(lengths[taking_part], edges)
        if batching in ("packed", "random"):
            edges, rows, buckets = edges[-1:], rows[-1:], np.zeros_like(buckets)
        if batching == "sorted":
            order = np.argsort(lengths[taking_part], kind="stable")
            taking_part, buckets = taking_part[order], buckets[order]
        self.edges, self.rows, self.seed, self.epochs = tuple(edges), tuple(rows), seed, epochs
        self.batching = batching
        self._members = [taking_part[buckets == bucket, None] for bucket in range(len(self.edges))]
        if batching == "packed":
            packed = pack(lengths[taking_part], self.edges[0], seed=seed)
            self._members = [np.where(packed < 0, -1, taking_part[packed])]
        self.batches_per_bucket = tuple(
            -(-len(contents) // height) for contents, height in zip(self._members, self.rows, strict=True)
        )
        self.batches_per_epoch = sum(self.batches_per_bucket)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)

    def __len__(self) -> int:
        return self.batches_per_epoch * self.epochs

    def __getitem__(self, index: int) -> PlannedBatch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a plan of {len(self)}")
        epoch, offset = divmod(int(index), self.batches_per_epoch)
        plan = self._epoch(epoch)
        bucket = int(plan.buckets[offset])
        return PlannedBatch(epoch, bucket, plan.record_ids[bucket][plan.places[offset]])

    def lasting(self, epochs: int) -> Self:
        """The same plan over so many passes."""
        longer = copy.copy(self)
        longer.epochs = epochs
        longer._epoch = functools.lru_cache(maxsize=2)(longer._plan_epoch)
        return longer

    def order(self, epoch: int) -> np.ndarray:
        """[batches of a pass] int32: the bucket of each batch."""
        return self._epoch(epoch).buckets

    def _plan_epoch(self, epoch: int) -> EpochPlan:
        record_ids = []
        for bucket, (contents, height) in enumerate(zip(self._members, self.rows, strict=True)):
            count = self.batches_per_bucket[bucket]
            padded = np.full((count * height, contents.shape[1]), -1, np.int32)
            if self.batching != "sorted":
                contents = np.random.default_rng((self.seed, epoch, bucket)).permutation(contents)
            padded[: len(contents)] = contents
            record_ids.append(padded.reshape(count, height, contents.shape[1]))
        if self.batching == "sorted":
            order = np.repeat(np.arange(len(self.edges), dtype=np.int32), self.batches_per_bucket)
        else:
            order = interleave(self.batches_per_bucket, np.random.default_rng((self.seed, epoch, len(self.edges))))
        places = np.empty(len(order), np.int64)
        for bucket, count in enumerate(self.batches_per_bucket):
            places[order == bucket] = np.arange(count)
        return EpochPlan(order, places, tuple(record_ids))
