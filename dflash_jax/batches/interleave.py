"""The order in which buckets take turns: each spread evenly, all ending together, runs as short as they can be.

Buckets join one after another, the smallest first. Where n batches of a bucket join m that are in order already,
let c be the fewer of the two and d the others. The d keep their order at (j + 1/2) / d, and the c are set between
them, evenly apart:

    (i + phase) / c,  phase uniform in the middle half of [0, 1)   no run of the d is longer than ceil(d / c)
    (i + 1) / (c + 1),  where runs get shorter by it               no run of the d is longer than ceil(d / (c + 1))

A bucket with a run of more than two is cut to two by the next larger one; what remains is the largest bucket, with
the shortest run that its share allows. Runs of three and more only occur where it has over two thirds.
"""

from collections.abc import Sequence

import numpy as np


def interleave(counts: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """[sum of counts] int32: the bucket of each batch. counts: batches of each bucket; rng: draws the phases."""
    order = np.zeros(0, np.int32)
    for bucket in np.argsort(counts, kind="stable"):
        joining = np.full(counts[bucket], bucket, np.int32)
        few, many = sorted((order, joining), key=len)
        c, d = len(few), len(many)
        apart = np.arange(c) + rng.uniform(0.25, 0.75)
        apart = apart / c if c and -(-d // c) == -(-d // (c + 1)) else np.arange(1, c + 1) / (c + 1)
        spread = (np.arange(d) + 0.5) / max(d, 1)
        places = np.argsort(np.concatenate([apart, spread]), kind="stable")
        order = np.concatenate([few, many])[places]
    return order


def longest_runs(order: np.ndarray, *, buckets: int) -> tuple[int, ...]:
    """For each bucket, how many batches of it follow each other at most in `order` [batches]."""
    ends = np.flatnonzero(np.append(order[1:] != order[:-1], len(order) > 0))
    lengths = np.diff(ends, prepend=-1)
    return tuple(int(lengths[order[ends] == bucket].max(initial=0)) for bucket in range(buckets))
