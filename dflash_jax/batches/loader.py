"""Batches of a plan, read and padded by Grain's threads in the plan's order, resumable at any batch."""

import contextlib
import dataclasses
from collections.abc import Generator

import grain
import numpy as np

from dflash_jax.batch import Batch
from dflash_jax.batches.plan import BatchPlan, PlannedBatch
from dflash_jax.data.records import Records
from dflash_jax.errors import UserError

BYTES_PER_TOKEN = 13  # tokens, positions and segment_ids of 4 bytes, loss_mask of one


@dataclasses.dataclass(frozen=True)
class HostShare:
    """Which rows of every batch this host reads: the index-th of `count` equal parts."""

    index: int = 0
    count: int = 1

    def of(self, rows: int) -> slice:
        """The share of a batch's rows. Raises UserError where they do not divide."""
        if rows % self.count:
            raise UserError(f"{rows} rows of a batch do not divide over {self.count} hosts; change the mesh")
        size = rows // self.count
        return slice(self.index * size, (self.index + 1) * size)


@dataclasses.dataclass(frozen=True)
class Reading:
    """How batches are read: by so many threads, and as far ahead as memory allows (bytes; at least one batch)."""

    threads: int = 2
    ahead_bytes: int = 2**28
    share: HostShare = HostShare()

    def batches_ahead(self, plan: BatchPlan) -> int:
        """How many batches of the plan's largest shape the memory holds."""
        largest = max(edge * height for edge, height in zip(plan.edges, plan.rows, strict=True))
        return max(1, self.ahead_bytes * self.share.count // (largest * BYTES_PER_TOKEN))


@dataclasses.dataclass(frozen=True)
class LoadRows(grain.transforms.Map):
    """Read a planned batch's records into rows, one behind the other, padded on the right to the bucket."""

    records: Records
    edges: tuple[int, ...]
    share: HostShare

    def map(self, element: PlannedBatch) -> Batch:
        record_ids = element.record_ids[self.share.of(len(element.record_ids))]
        shape = (len(record_ids), self.edges[element.bucket])
        tokens, positions, segment_ids = (np.zeros(shape, np.int32) for _ in range(3))
        loss_mask = np.zeros(shape, bool)
        for row, contents in enumerate(record_ids):
            start = 0
            for segment, record_id in enumerate(contents[contents >= 0], start=1):
                encoded = self.records[record_id]
                stop = start + len(encoded.tokens)
                tokens[row, start:stop], loss_mask[row, start:stop] = encoded.tokens, encoded.loss_mask
                positions[row, start:stop], segment_ids[row, start:stop] = np.arange(stop - start), segment
                start = stop
        epochs = np.full(shape[0], element.epoch, np.int32)
        return Batch(tokens, positions, segment_ids, loss_mask, record_ids, epochs)


def batch_dataset(records: Records, plan: BatchPlan, reading: Reading) -> grain.IterDataset[Batch]:
    """The plan's batches as a Grain data set; its iterators' state is {"next_index": batches consumed}."""
    options = grain.ReadOptions(num_threads=reading.threads, prefetch_buffer_size=reading.batches_ahead(plan))
    rows = LoadRows(records, plan.edges, reading.share)
    return grain.MapDataset.source(plan).map(rows).to_iter_dataset(options)


def batches(
    records: Records, plan: BatchPlan, *, start: int, reading: Reading | None = None
) -> Generator[tuple[Batch, int], None, None]:
    """Yield (batch of numpy arrays, cursor), from batch `start` of the plan to its end.

    The cursor belongs to its batch: as `start` of another call it continues right after that batch, however
    far the reading threads or the caller's queues have run ahead, and on however many hosts. Close the generator
    to stop the threads.
    """
    dataset = batch_dataset(records, plan, reading or Reading())
    with contextlib.closing(iter(dataset)) as iterator:
        iterator.set_state({"next_index": start})
        for batch in iterator:
            yield batch, iterator.get_state()["next_index"]
