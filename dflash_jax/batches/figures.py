"""What a plan costs: tokens that its batches hold against tokens of records, and how its buckets take turns.

Time goes with the tokens that a device is given, padding included. So the share of them that belongs to records
is the throughput of the plan, relative to one without padding.
"""

import dataclasses

import numpy as np

from dflash_jax.batches.interleave import longest_runs
from dflash_jax.batches.plan import BatchPlan


@dataclasses.dataclass(frozen=True)
class PlanFigures:
    """One pass. held: tokens of all batches, padding and empty rows included; tokens: those of records;
    longest_run: most batches in a row from one of several buckets, None where there is only one shape or none."""

    batches: int
    tokens: int
    held: int
    longest_run: int | None

    @property
    def useful(self) -> float:
        """Tokens of records over tokens held."""
        return self.tokens / self.held


def plan_figures(plan: BatchPlan, *, tokens: int) -> PlanFigures:
    """The figures of a plan's first pass over records of so many tokens."""
    sizes = zip(plan.batches_per_bucket, plan.rows, plan.edges, strict=True)
    buckets = len(plan.edges)
    return PlanFigures(
        batches=plan.batches_per_epoch,
        tokens=tokens,
        held=sum(count * height * edge for count, height, edge in sizes),
        longest_run=max(longest_runs(plan.order(0), buckets=buckets)) if buckets > 1 else None,
    )


def without_buckets(lengths: np.ndarray, *, tokens_per_batch: int, row_multiple: int) -> PlanFigures:
    """The figures of batches from the shortest record to the longest, each as long as its own longest record.

    The least padding that rows of one record can have; but nearly every batch has a shape of its own, which a
    compiled program cannot follow, and a pass begins with all short records.
    """
    descending = np.sort(lengths)[::-1]
    start, batches, held = 0, 0, 0
    while start < len(descending):
        longest = int(descending[start])
        rows = tokens_per_batch // longest // row_multiple * row_multiple
        start, batches, held = start + rows, batches + 1, held + rows * longest
    return PlanFigures(batches, int(lengths.sum(dtype=np.int64)), held, None)
