"""What a pass over a data set takes from each of its buckets."""

import dataclasses

import numpy as np

from dflash_jax.batches.buckets import bucket_of
from dflash_jax.dataset import Dataset


@dataclasses.dataclass(frozen=True)
class BucketFigures:
    """One pass of one bucket. edge: tokens of a row; rows: of a batch; tokens: those of its records."""

    edge: int
    rows: int
    records: int
    batches: int
    tokens: int

    @property
    def held(self) -> int:
        """Tokens of its batches, padding and empty rows included."""
        return self.edge * self.rows * self.batches


def bucket_figures(data: Dataset) -> tuple[BucketFigures, ...]:
    """The buckets of a plan; where one holds all records it is the longest."""
    plan, lengths = data.plan, data.records.lengths[data.record_ids]
    bucket = bucket_of(lengths, plan.edges)
    records = np.bincount(bucket, minlength=len(plan.edges))
    tokens = np.bincount(bucket, lengths, minlength=len(plan.edges))
    sizes = zip(plan.edges, plan.rows, records, plan.batches_per_bucket, tokens, strict=True)
    return tuple(BucketFigures(*map(int, size)) for size in sizes)
