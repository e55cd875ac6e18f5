"""Teacher-forced evaluation of the drafter on held-out data: always the same blocks."""

import dataclasses
import functools
import operator
from collections.abc import Callable

import jax
from flax import nnx

from dflash_jax.batches.loader import batches
from dflash_jax.dataset import Dataset
from dflash_jax.decode.simulate import Simulated
from dflash_jax.objective.objective import Frozen, LossSums
from dflash_jax.training.features import Featured, FeatureSource


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeldOutSums:
    """losses: loss and acceptance sums; trees: simulated acceptance of the same blocks, None without budgets."""

    losses: LossSums
    trees: Simulated | None

    def __add__(self, other: "HeldOutSums") -> "HeldOutSums":
        return jax.tree.map(lambda a, b: a + b, self, other)

    def measures(self) -> dict[str, jax.Array]:
        """The means these sums stand for, under the names of the log."""
        found = self.losses.measures() | {"walk_tau": self.losses.acceptance.walk_length}
        return found if self.trees is None else found | self.trees.tree_measures()


EvaluateBatch = Callable[[nnx.State, Featured, Frozen], HeldOutSums]


class HeldOut:
    """The held-out records with the plan of one pass; `measure` runs the drafter over all of them."""

    def __init__(self, data: Dataset, frozen: Frozen, *, source: FeatureSource, evaluate: EvaluateBatch):
        self._data, self._frozen = data, frozen
        self._source, self._evaluate = source, evaluate

    def measure(self, params: nnx.State) -> dict[str, jax.Array]:
        """Loss, accuracy, accept length and its make-up by position, over the sampled blocks of all records, and
        accept lengths of trees if the evaluation has budgets."""
        sums = [
            self._evaluate(params, self._source(batch), self._frozen)
            for batch, _ in batches(self._data.records, self._data.plan, start=0)
        ]
        return functools.reduce(operator.add, sums).measures()
