"""Batches of a plan, read and padded by Grain's threads in the plan's order, resumable at any batch."""

import contextlib
import dataclasses
from collections.abc import Generator

import grain
import numpy as np

from dflash_jax.batch import Batch
from dflash_jax.data.plan import BatchPlan, PlannedBatch
from dflash_jax.data.records import Records


@dataclasses.dataclass(frozen=True)
class LoadRows(grain.transforms.Map):
    """Read a planned batch's records and pad them on the right to their bucket's length."""

    records: Records
    edges: tuple[int, ...]

    def map(self, element: PlannedBatch) -> Batch:
        shape = (len(element.record_ids), self.edges[element.bucket])
        tokens, positions, segment_ids = (np.zeros(shape, np.int32) for _ in range(3))
        loss_mask = np.zeros(shape, bool)
        for row, record_id in enumerate(element.record_ids):
            if record_id < 0:
                continue
            encoded = self.records[record_id]
            n = len(encoded.tokens)
            tokens[row, :n], loss_mask[row, :n] = encoded.tokens, encoded.loss_mask
            positions[row, :n], segment_ids[row, :n] = np.arange(n), 1
        epochs = np.full(shape[0], element.epoch, np.int32)
        return Batch(tokens, positions, segment_ids, loss_mask, element.record_ids, epochs)


def batch_dataset(
    records: Records, plan: BatchPlan, *, read_threads: int = 2, prefetch: int = 4
) -> grain.IterDataset[Batch]:
    """The plan's batches as a Grain data set; its iterators' state is {"next_index": batches consumed}."""
    read = grain.ReadOptions(num_threads=read_threads, prefetch_buffer_size=prefetch)
    return grain.MapDataset.source(plan).map(LoadRows(records, plan.edges)).to_iter_dataset(read)


def batches(
    records: Records, plan: BatchPlan, *, start: int, read_threads: int = 2, prefetch: int = 4
) -> Generator[tuple[Batch, int], None, None]:
    """Yield (batch of numpy arrays, cursor), from batch `start` of the plan to its end.

    The cursor belongs to its batch: as `start` of another call it continues right after that batch, however
    far the reading threads or the caller's queues have run ahead. Close the generator to stop the threads.
    """
    dataset = batch_dataset(records, plan, read_threads=read_threads, prefetch=prefetch)
    with contextlib.closing(iter(dataset)) as iterator:
        iterator.set_state({"next_index": start})
        for batch in iterator:
            yield batch, iterator.get_state()["next_index"]
