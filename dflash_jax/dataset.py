"""An experiment's records with the plan of their batches on its meshes."""

import dataclasses
import math
import pathlib

import numpy as np

from dflash_jax.data.buckets import fits, rows_per_batch
from dflash_jax.data.plan import BatchPlan
from dflash_jax.data.prepare import prepare_records, refuse_mask_token
from dflash_jax.data.records import Records
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes


@dataclasses.dataclass(frozen=True)
class Dataset:
    """records and the plan of all their batches; left_out: records longer than the last bucket."""

    records: Records
    plan: BatchPlan
    left_out: int

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


def open_dataset(
    experiment: Experiment,
    source: str,
    directory: pathlib.Path,
    *,
    meshes: Meshes,
    batches_wanted: int | None,
) -> Dataset:
    """Tokenise `source` (or recognise that it is done) and plan its batches: for `batches_wanted`, or one pass."""
    recipe = experiment.recipe
    records = prepare_records(experiment.tokenizer, pathlib.Path(source), directory)
    refuse_mask_token(records, experiment.drafter.mask_token)
    edges = recipe.data.buckets
    axis = math.lcm(meshes.target.shape["data"], meshes.drafter.shape["data"])
    rows = rows_per_batch(edges, tokens_per_batch=recipe.data.tokens_per_batch, data_axis=axis)
    inside = np.flatnonzero(fits(records.lengths, edges))
    left_out = len(records) - len(inside)

    def plan(epochs: int) -> BatchPlan:
        return BatchPlan(
            records.lengths, edges=edges, rows=rows, seed=recipe.train.seed, epochs=epochs, record_ids=inside
        )

    one_pass = plan(1)
    if batches_wanted is None:
        return Dataset(records, one_pass, left_out)
    return Dataset(records, plan(math.ceil(batches_wanted / one_pass.batches_per_epoch)), left_out)
