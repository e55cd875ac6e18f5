"""Teacher-forced evaluation of the drafter on held-out data: always the same blocks."""

import functools
import operator
from collections.abc import Callable

import jax
from flax import nnx

from dflash_jax.batches.loader import batches
from dflash_jax.dataset import Dataset
from dflash_jax.objective.objective import Frozen, LossSums
from dflash_jax.training.features import Featured, FeatureSource

EvaluateBatch = Callable[[nnx.State, Featured, Frozen], LossSums]


class HeldOut:
    """The held-out records with the plan of one pass; `measure` runs the drafter over all of them."""

    def __init__(self, data: Dataset, frozen: Frozen, *, source: FeatureSource, evaluate: EvaluateBatch):
        self._data, self._frozen = data, frozen
        self._source, self._evaluate = source, evaluate

    def measure(self, params: nnx.State) -> dict[str, jax.Array]:
        """Loss, accuracy, accept length and its make-up by position, over the sampled blocks of all records."""
        sums = [
            self._evaluate(params, self._source(batch), self._frozen)
            for batch, _ in batches(self._data.records, self._data.plan, start=0)
        ]
        total = functools.reduce(operator.add, sums)
        return total.measures() | {"walk_tau": total.acceptance.walk_length}
