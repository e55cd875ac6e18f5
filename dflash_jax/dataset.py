"""An experiment's records with the plan of their batches on its meshes."""

import dataclasses
import math
import os
import pathlib
from typing import Self

import numpy as np

from dflash_jax.batches.buckets import choose_edges, parse_buckets, rows_per_batch
from dflash_jax.batches.plan import BatchPlan
from dflash_jax.data.origin import check_origin
from dflash_jax.data.prepare import Progress, prepare_records, refuse_mask_token
from dflash_jax.data.records import LENGTHS, MANIFEST, Records
from dflash_jax.errors import UserError, named
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes
from dflash_jax.sharding import row_shards
from dflash_jax.sources.files import find_files

ONE_WORKER_BYTES = 2**24  # of conversations: fewer are tokenised before a worker process has started
HELDOUT_BUCKETS = 4  # read once an evaluation: not worth more compilations


@dataclasses.dataclass(frozen=True)
class Dataset:
    """records and the plan of their batches; record_ids: those that take part."""

    records: Records
    plan: BatchPlan
    record_ids: np.ndarray

    @property
    def left_out(self) -> int:
        """Records that are too long for the buckets."""
        return len(self.records) - len(self.record_ids)

    @property
    def fingerprint(self) -> dict[str, object]:
        """What decides which rows a batch number means."""
        plan = self.plan
        return {
            "data": self.records.digest,
            "data.buckets": list(plan.edges),
            "data.batching": plan.batching,
            "rows per batch": list(plan.rows),
            "train.seed": plan.seed,
        }

    def lasting(self, batches: int) -> Self:
        """The same records with a plan of as many whole passes as `batches` batches need."""
        return dataclasses.replace(self, plan=self.plan.lasting(math.ceil(batches / self.plan.batches_per_epoch)))


def check_source(source: str, *, key: str) -> None:
    """Raise UserError, naming the key, where there is nothing at `source` that could be read."""
    with named(key):
        if (pathlib.Path(source) / LENGTHS).exists() or is_prepared(source):
            Records.open(source)
        else:
            find_files(source)


def open_records(
    experiment: Experiment, source: str, directory: pathlib.Path, *, on_progress: Progress | None = None
) -> Records:
    """The records of a folder that `prepare` wrote, or those of files, tokenised into `directory` if need be.

    Raises UserError where they do not belong to the experiment's target and template, or contain its MASK token.
    """
    preparation = experiment.preparation
    with named("data.train" if source == experiment.recipe.data.train else "data.heldout"):
        if is_prepared(source):
            records = Records.open(source)
            check_origin(records, preparation)
        else:
            files = find_files(source)
            many = sum(file.stat().st_size for file in files) > ONE_WORKER_BYTES
            records = prepare_records(
                files,
                directory,
                preparation=preparation,
                workers=len(os.sched_getaffinity(0)) if many else 1,
                on_progress=on_progress,
            )
    refuse_mask_token(records, experiment.drafter.mask_token)
    return records


def is_prepared(source: str) -> bool:
    """Whether it is a folder that `prepare` wrote."""
    return (pathlib.Path(source) / MANIFEST).exists()


def training_data(experiment: Experiment, records: Records, *, meshes: Meshes) -> Dataset:
    """The records with a plan of one pass by the recipe's batching."""
    section = experiment.recipe.data
    return _planned(experiment, records, parse_buckets(section.buckets), meshes=meshes, batching=section.batching)


def heldout_data(experiment: Experiment, records: Records, *, meshes: Meshes) -> Dataset:
    """The records with a plan of one pass, each in a row of its own."""
    buckets = parse_buckets(experiment.recipe.data.buckets)
    if isinstance(buckets, int):
        buckets = min(buckets, HELDOUT_BUCKETS)
    return _planned(experiment, records, buckets, meshes=meshes, batching="bucketed")


def _planned(
    experiment: Experiment, records: Records, buckets: tuple[int, ...] | int, *, meshes: Meshes, batching: str
) -> Dataset:
    section = experiment.recipe.data
    limit = section.max_length if isinstance(buckets, int) else buckets[-1]
    record_ids = np.flatnonzero(records.lengths <= limit)
    if not len(record_ids):
        key = "data.max_length" if isinstance(buckets, int) else "data.buckets"
        raise UserError(
            f"{key}: {records.directory} holds no record of at most {limit} tokens, the shortest has "
            f"{records.lengths.min()}; raise data.max_length and the last of data.buckets"
        )
    # Both meshes split the rows of a batch.
    multiple = math.lcm(row_shards(meshes.target), row_shards(meshes.drafter))
    edges = choose_edges(
        buckets,
        records.lengths[record_ids],
        tokens_per_batch=section.tokens_per_batch,
        row_multiple=multiple,
        pad_multiple=section.pad_multiple,
    )
    plan = BatchPlan(
        records.lengths,
        edges=edges,
        rows=rows_per_batch(edges, tokens_per_batch=section.tokens_per_batch, row_multiple=multiple),
        seed=experiment.recipe.train.seed,
        epochs=1,
        record_ids=record_ids,
        batching=batching,
    )
    return Dataset(records, plan, record_ids)
