"""Teacher-forced evaluation of the drafter on held-out data while it trains: always the same blocks."""

import functools
import operator
from collections.abc import Callable

import jax
from flax import nnx

from dflash_jax.data.loader import batches
from dflash_jax.data.plan import BatchPlan
from dflash_jax.data.records import Records
from dflash_jax.objective.objective import Frozen, LossSums
from dflash_jax.training.features import Featured, FeatureSource

Measure = Callable[[nnx.State, Featured, Frozen], LossSums]


class HeldOut:
    """The held-out records with one pass's plan; `measure` runs the drafter over all of them."""

    def __init__(self, records: Records, plan: BatchPlan, *, source: FeatureSource, measure: Measure):
        self._records, self._plan = records, plan
        self._source, self._measure = source, measure

    def measure(self, params: nnx.State, frozen: Frozen) -> dict[str, jax.Array]:
        """Loss, accuracy, accept length and its make-up by position, over the sampled blocks of all records."""
        sums = [
            self._measure(params, self._source(batch), frozen)
            for batch, _ in batches(self._records, self._plan, start=0)
        ]
        return functools.reduce(operator.add, sums).measures()
