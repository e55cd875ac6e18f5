"""An experiment's records with the plan of their batches on its meshes."""

import dataclasses
import math
import pathlib
from typing import Self

import numpy as np

from dflash_jax.data.buckets import fits, rows_per_batch
from dflash_jax.data.plan import BatchPlan
from dflash_jax.data.prepare import prepare_records, refuse_mask_token
from dflash_jax.data.records import Records
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes
from dflash_jax.sharding import row_shards


@dataclasses.dataclass(frozen=True)
class Dataset:
    """records and the plan of their batches; record_ids: those that take part."""

    records: Records
    plan: BatchPlan
    record_ids: np.ndarray

    @property
    def left_out(self) -> int:
        """Records that are longer than the last bucket."""
        return len(self.records) - len(self.record_ids)

    @property
    def fingerprint(self) -> dict[str, object]:
        """What decides which rows a batch number means."""
        plan = self.plan
        return {
            "data": self.records.digest,
            "data.buckets": list(plan.edges),
            "rows per batch": list(plan.rows),
            "train.seed": plan.seed,
        }

    def lasting(self, batches: int) -> Self:
        """The same records with a plan of as many whole passes as `batches` batches need."""
        plan = self.plan
        longer = BatchPlan(
            self.records.lengths,
            edges=plan.edges,
            rows=plan.rows,
            seed=plan.seed,
            epochs=math.ceil(batches / plan.batches_per_epoch),
            record_ids=self.record_ids,
        )
        return dataclasses.replace(self, plan=longer)


def open_dataset(experiment: Experiment, source: str, directory: pathlib.Path, *, meshes: Meshes) -> Dataset:
    """Tokenise `source` into `directory` (or recognise that it is done) and plan one pass over it."""
    recipe = experiment.recipe
    records = prepare_records(experiment.tokenizer, pathlib.Path(source), directory)
    refuse_mask_token(records, experiment.drafter.mask_token)
    edges = recipe.data.buckets
    axis = math.lcm(row_shards(meshes.target), row_shards(meshes.drafter))
    rows = rows_per_batch(edges, tokens_per_batch=recipe.data.tokens_per_batch, data_axis=axis)
    record_ids = np.flatnonzero(fits(records.lengths, edges))
    plan = BatchPlan(
        records.lengths, edges=edges, rows=rows, seed=recipe.train.seed, epochs=1, record_ids=record_ids
    )
    return Dataset(records, plan, record_ids)
