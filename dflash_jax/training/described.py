"""What the log says of a step besides what the devices have measured: its batches, its queues, its time."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_jax.batch import Batch
from dflash_jax.batches.plan import BatchPlan
from dflash_jax.training.features import Featured


@dataclasses.dataclass(frozen=True)
class Arrived:
    """A featured batch on its way to the step. cursor: batches consumed after it; data_wait_s, feature_wait_s:
    spent on reading it and on requesting its features; ready: batches that were read and waited then."""

    featured: Featured
    host: Batch
    cursor: int
    data_wait_s: float
    feature_wait_s: float
    ready: int


@dataclasses.dataclass(frozen=True)
class Clock:
    """Seconds: started, before, now of time.perf_counter(), of the run, of the step's beginning and of its end."""

    started: float
    before: float
    now: float


def records_of(group: Sequence[Arrived]) -> np.ndarray:
    """[rows, R] record ids of a step's batches, -1 where there is none."""
    return np.concatenate([item.host.record_ids for item in group])


def trained_on(group: Sequence[Arrived], plan: BatchPlan) -> dict[str, Any]:
    """The batches of a step: where they stand in the plan, what they hold, and a digest of their records."""
    hosts = [item.host for item in group]
    tokens = sum(_tokens(host) for host in hosts)
    room = sum(host.tokens.size for host in hosts)
    lengths = [host.tokens.shape[1] for host in hosts]
    ids = records_of(group)
    return {
        "epoch": group[-1].cursor / plan.batches_per_epoch,
        "epochs": plan.epochs,
        "tokens": tokens,
        "rows": int((ids[:, 0] >= 0).sum()),
        "sequences": int((ids >= 0).sum()),
        "records": hashlib.sha256(ids.tobytes()).hexdigest()[:16],
        "seq_len": max(lengths),
        "bucket": plan.edges.index(max(lengths)),
        "padding": 1.0 - tokens / room,
        "recalled": sum(item.featured.recalled for item in group) / len(group),
    }


def queues(group: Sequence[Arrived], waiting: Sequence[Arrived]) -> dict[str, Any]:
    """What stood ready as the step was dispatched, and what it was waited for.

    prefetch_queue: batches that were read; feature_queue: later batches whose features are computed.
    """
    return {
        "prefetch_queue": group[-1].ready,
        "feature_queue": sum(item.featured.arrived for item in waiting),
        "data_wait_s": sum(item.data_wait_s for item in group),
        "feature_wait_s": sum(item.feature_wait_s for item in group),
    }


def rates(group: Sequence[Arrived], clock: Clock, *, steps_done: int, steps_left: int) -> dict[str, Any]:
    """The step's time, the tokens a second of both meshes in it, and how long the run takes.

    target_tok_s counts the batches of the step whose features the target computed, when it did.
    """
    step_s, elapsed_s = clock.now - clock.before, clock.now - clock.started
    computed = sum(_tokens(item.host) for item in group if not item.featured.recalled)
    return {
        "drafter_tok_s": sum(_tokens(item.host) for item in group) / step_s,
        "target_tok_s": computed / step_s,
        "step_s": step_s,
        "elapsed_s": elapsed_s,
        "eta_s": elapsed_s / steps_done * steps_left,
    }


def _tokens(batch: Batch) -> int:
    return int((batch.segment_ids > 0).sum())
