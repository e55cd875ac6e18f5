"""The training loop: batches -> features -> steps, with its log, evaluations and checkpoints."""

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from dflash_jax.batch import Batch
from dflash_jax.batches.plan import BatchPlan
from dflash_jax.config import Recipe
from dflash_jax.monitor.run_log import RunLog
from dflash_jax.objective.objective import Frozen
from dflash_jax.training.checkpoint import Checkpoints, Fingerprint
from dflash_jax.training.features import Featured, FeatureSource
from dflash_jax.training.heldout import HeldOut
from dflash_jax.training.interrupt import StopRequest
from dflash_jax.training.pipeline import look_ahead
from dflash_jax.training.programs import Programs
from dflash_jax.training.rollout import Rollout
from dflash_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Progression:
    """Where a run stands and ends. step, cursor: optimizer steps and batches done; steps: the last step;
    plan: its batches, over as many passes as the steps amount to."""

    step: int
    cursor: int
    steps: int
    plan: BatchPlan


@dataclasses.dataclass(frozen=True)
class Arrived:
    """A featured batch on its way to the step. cursor: batches consumed after it; wait_s: spent on reading it."""

    featured: Featured
    host: Batch
    cursor: int
    wait_s: float


def run_steps(
    state: TrainState,
    batches: Iterable[tuple[Batch, int]],
    *,
    at: Progression,
    recipe: Recipe,
    programs: Programs,
    source: FeatureSource,
    frozen: Frozen,
    log: RunLog,
    checkpoints: Checkpoints,
    fingerprint: Fingerprint,
    held_out: HeldOut | None,
    rollout: Rollout | None,
    stop: StopRequest,
) -> tuple[TrainState, int]:
    """Train from `at` to its last step, or until `stop` has received a signal; returns (state, step).

    Either way the last step taken is saved and logged.
    """
    step, cursor, started = at.step, at.cursor, time.perf_counter()

    def due(interval: int) -> bool:
        return bool(interval) and (step % interval == 0 or step == at.steps)

    def evaluate() -> float | None:
        """Measure and log what is due; the held-out accept length if that was."""
        found: dict[str, Any] = {}
        if held_out is not None and due(recipe.eval.every):
            log.flush()
            # What runs on one mesh must not disturb the rates on the other.
            found |= jax.block_until_ready(held_out.measure(state.params))
        if rollout is not None and due(recipe.eval.decode_every):
            log.flush()
            found |= rollout.measure(state.params)
        if found:
            log.log_evaluation(step, found)
        return float(found["accept_len"]) if "accept_len" in found else None

    def save(accept_len: float | None) -> None:
        # Every line up to this step must be on disk first, or a kill would leave a gap in the log.
        log.flush()
        checkpoints.save(step, state, cursor=cursor, fingerprint=fingerprint, accept_len=accept_len)

    if step == 0:
        evaluate()
    arrived = look_ahead(_featured(batches, source), recipe.pipeline.look_ahead)
    before = time.perf_counter()
    for group in _groups(arrived, recipe.train.accumulate):
        state, metrics = programs.step(state, [item.featured for item in group], frozen)
        step, cursor = step + 1, group[-1].cursor
        now = time.perf_counter()
        described = _described(group, at.plan)
        timing = {
            "tokens_s": described["tokens"] / (now - before),
            "step_s": now - before,
            "elapsed_s": now - started,
            "eta_s": (now - started) / (step - at.step) * (at.steps - step),
        }
        log.log_step(step, {**described, **metrics, **timing})
        # An evaluation comes before the save of its step, so that no resume can skip it.
        accept_len = evaluate()
        best = accept_len is not None and checkpoints.is_best(accept_len)
        if due(recipe.checkpoint.every) or best or stop.received:
            save(accept_len)
        if step == at.steps or stop.received:
            break
        occupied = map(due, (recipe.eval.every, recipe.eval.decode_every, recipe.checkpoint.every))
        before = time.perf_counter() if any(occupied) else now
    log.flush()
    return state, step


def _featured(batches: Iterable[tuple[Batch, int]], source: FeatureSource) -> Iterator[Arrived]:
    asked = time.perf_counter()
    for batch, cursor in batches:
        wait = time.perf_counter() - asked
        yield Arrived(source(batch), batch, cursor, wait)
        asked = time.perf_counter()


def _groups(items: Iterator[Arrived], size: int) -> Iterator[list[Arrived]]:
    while group := list(itertools.islice(items, size)):
        yield group


def _described(group: list[Arrived], plan: BatchPlan) -> dict[str, Any]:
    """What a step trained on, for its log line."""
    hosts = [item.host for item in group]
    tokens = sum(int((host.segment_ids > 0).sum()) for host in hosts)
    room = sum(host.tokens.size for host in hosts)
    lengths = [host.tokens.shape[1] for host in hosts]
    ids = np.concatenate([host.record_ids for host in hosts])
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
        "data_wait_s": sum(item.wait_s for item in group),
    }
