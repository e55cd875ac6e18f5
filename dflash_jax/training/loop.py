"""The training loop: batches -> features -> steps, with its log, evaluations and checkpoints."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from dflash_jax.batches.plan import BatchPlan
from dflash_jax.config import Recipe
from dflash_jax.errors import HangError, UserError
from dflash_jax.monitor.run_log import RunLog
from dflash_jax.objective.objective import Frozen
from dflash_jax.training.checkpoint import Checkpoints
from dflash_jax.training.checkpoint_files import Fingerprint
from dflash_jax.training.described import Arrived, Clock, queues, rates, records_of, trained_on
from dflash_jax.training.features import FeatureSource
from dflash_jax.training.guard import Guard
from dflash_jax.training.heldout import HeldOut
from dflash_jax.training.interrupt import StopRequest
from dflash_jax.training.pipeline import look_ahead
from dflash_jax.training.programs import Programs
from dflash_jax.training.read_ahead import ReadAhead, ReadingFault, StuckReader
from dflash_jax.training.rollout import Rollout
from dflash_jax.training.state import TrainState
from dflash_jax.training.trace import Trace
from dflash_jax.training.usage import Usage


@dataclasses.dataclass(frozen=True)
class Progression:
    """Where a run stands and ends. step, cursor: optimizer steps and batches done; steps: the last step;
    plan: its batches, over as many passes as the steps amount to."""

    step: int
    cursor: int
    steps: int
    plan: BatchPlan


@dataclasses.dataclass(frozen=True)
class Training:
    """Everything that a loop works with."""

    recipe: Recipe
    programs: Programs
    source: FeatureSource
    frozen: Frozen
    held_out: HeldOut | None
    rollout: Rollout | None
    fingerprint: Fingerprint
    checkpoints: Checkpoints
    log: RunLog
    guard: Guard
    usage: Usage
    trace: Trace
    stop: StopRequest


def run_steps(training: Training, state: TrainState, batches: ReadAhead, *, at: Progression) -> int:
    """Train from `at` to its last step, or until a signal has come; returns the last step taken.

    It is saved and logged in either case, and also where the data fails, before the UserError that says so.
    """
    recipe, log, checkpoints, guard = training.recipe, training.log, training.checkpoints, training.guard
    step, cursor, started = at.step, at.cursor, time.perf_counter()
    saved = step

    def due(interval: int) -> bool:
        return bool(interval) and (step % interval == 0 or step == at.steps)

    def evaluate() -> float | None:
        """Measure and log what is due; the held-out accept length if that was."""
        found: dict[str, Any] = {}
        if training.held_out is not None and due(recipe.eval.every):
            log.flush()
            # What runs on one mesh must not disturb the rates on the other.
            found |= jax.block_until_ready(training.held_out.measure(state.params))
        if training.rollout is not None and due(recipe.eval.decode_every):
            log.flush()
            found |= training.rollout.measure(state.params)
        if found:
            log.log_evaluation(step, found)
        return float(found["accept_len"]) if "accept_len" in found else None

    def save(accept_len: float | None) -> None:
        nonlocal saved
        # Every line up to this step must be on disk first, or a kill would leave a gap in the log.
        log.flush()
        guard.check()
        if not guard.sound:
            # Broken parameters are not to push good ones out.
            if step == at.steps or training.stop.received:
                raise UserError(
                    f"parameters or moments are not finite after step {step}, and are not saved; the last "
                    f"checkpoint is that of step {checkpoints.last_step}"
                )
            return
        with jax.profiler.TraceAnnotation("save"):
            checkpoints.save(step, state, cursor=cursor, fingerprint=training.fingerprint, accept_len=accept_len)
        saved = step

    if step == 0:
        evaluate()
    arrived = look_ahead(_featured(batches, training.source), recipe.pipeline.look_ahead)
    before, owed = time.perf_counter(), False
    try:
        for group, waiting in _groups(arrived, recipe.train.accumulate):
            training.trace.before(step + 1)
            with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
                featured = [item.featured for item in group]
                state, metrics = training.programs.step(state, featured, training.frozen)
            step, cursor = step + 1, group[-1].cursor
            clock = Clock(started, before, time.perf_counter())
            guard.hold(step, [item.host for item in group])
            values = {
                **trained_on(group, at.plan),
                **metrics,
                **queues(group, waiting),
                **rates(group, clock, steps_done=step - at.step, steps_left=at.steps - step),
                **training.usage.measures(group, step_s=clock.now - clock.before),
                "checkpoint": checkpoints.last_step,
                "saving": int(checkpoints.saving),
            }
            with jax.profiler.TraceAnnotation("log"):
                log.log_step(step, values, if_skipped={"record_ids": records_of(group).ravel()})
            training.trace.after(step, state)
            guard.check()
            checkpoints.settle()
            # An evaluation comes before the save of its step, so that no resume can skip it.
            accept_len = evaluate()
            best = accept_len is not None and checkpoints.is_best(accept_len)
            owed |= due(recipe.checkpoint.every)
            if owed or best or training.stop.received:
                save(accept_len)
                owed &= saved != step
            if step == at.steps or training.stop.received:
                break
            occupied = map(due, (recipe.eval.every, recipe.eval.decode_every, recipe.checkpoint.every))
            before = time.perf_counter() if any(occupied) else clock.now
    except ReadingFault as fault:
        if saved < step:
            save(None)
        checkpoints.settle(wait=True)
        planned = at.plan[batches.cursor]
        ids = ", ".join(map(str, planned.record_ids[planned.record_ids >= 0][:12]))
        kind = HangError if isinstance(fault, StuckReader) else UserError
        raise kind(
            f"data: batch {batches.cursor} of the plan (bucket {planned.bucket}, records {ids}, ..) could not be "
            f"read: {fault}; step {checkpoints.last_step} is the last one saved, from which the same command "
            "continues"
        ) from fault
    log.flush()
    guard.check()
    return step


def _featured(batches: ReadAhead, source: FeatureSource) -> Iterator[Arrived]:
    while True:
        asked = time.perf_counter()
        with jax.profiler.TraceAnnotation("read"):
            item = next(batches, None)
        if item is None:
            return
        read = time.perf_counter()
        with jax.profiler.TraceAnnotation("request_features"):
            featured = source(item[0])
        requested = time.perf_counter()
        yield Arrived(
            featured,
            *item,
            data_wait_s=read - asked,
            feature_wait_s=requested - read,
            ready=batches.ready,
        )


def _groups(
    items: Iterator[tuple[Arrived, Sequence[Arrived]]], size: int
) -> Iterator[tuple[list[Arrived], Sequence[Arrived]]]:
    """The batches of each step, and those requested beyond them."""
    while group := list(itertools.islice(items, size)):
        yield [item for item, _ in group], group[-1][1]
