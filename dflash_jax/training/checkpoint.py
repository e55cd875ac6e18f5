"""Checkpoints through Orbax: written in the background, whole or absent, restored onto any mesh.

One step holds the train state, the data position that belongs to it (batches consumed), the run's fingerprint
(what must not change between the runs that share it) and, if it was evaluated, its held-out accept length. The
latest steps are kept, and the one with the longest.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from dflash_jax.errors import UserError
from dflash_jax.training.state import TrainState

Fingerprint = Mapping[str, Any]
ACCEPT_LEN = "accept_len"  # Orbax's metric of a step, tokens per verify step; no entry where it was not evaluated


@dataclasses.dataclass(frozen=True)
class Restored:
    """state: the train state; cursor: batches of the plan that it has consumed."""

    state: TrainState
    cursor: int


class Checkpoints:
    """The `checkpoints/` folder of a run. A context manager: leaving it waits for the save in flight."""

    def __init__(self, directory: pathlib.Path, *, keep: int):
        policies = ocp.checkpoint_managers
        best = policies.BestN(get_metric_fn=_quality, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
            best_fn=_quality,  # Orbax writes no metrics without it
            enable_async_checkpointing=True,
        )
        self.directory = directory
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)
        self._best = max(Checkpoints.accept_lengths(directory).values(), default=-math.inf)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    @staticmethod
    def saved(directory: pathlib.Path) -> list[int]:
        """The steps saved in a folder, ascending; none if it does not exist. Unfinished saves do not count."""
        if not directory.is_dir():
            return []
        return sorted(ocp.utils.checkpoint_steps(directory.absolute()))

    @staticmethod
    def accept_lengths(directory: pathlib.Path) -> dict[int, float]:
        """The held-out accept length of every saved step that was evaluated, by ascending step."""
        steps = Checkpoints.saved(directory)
        if not steps:
            return {}
        options = ocp.CheckpointManagerOptions(create=False, save_interval_steps=0)
        with ocp.CheckpointManager(directory.absolute(), options=options) as manager:
            metrics = {step: manager.metrics(step) or {} for step in steps}
        return {step: found[ACCEPT_LEN] for step, found in metrics.items() if ACCEPT_LEN in found}

    @staticmethod
    def set_aside(directory: pathlib.Path, *, after: int) -> None:
        """Move the steps past `after` to a sibling folder, so that training can branch off there."""
        for step in Checkpoints.saved(directory):
            if step > after:
                aside = directory.with_name(f"{directory.name}.after-step-{after}")
                aside.mkdir(exist_ok=True)
                (directory / str(step)).rename(aside / str(step))

    def is_best(self, accept_len: float) -> bool:
        """Whether a held-out accept length is longer than those of all steps that are saved."""
        return accept_len > self._best

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        cursor: int,
        fingerprint: Fingerprint,
        accept_len: float | None = None,
    ) -> None:
        """Start saving; returns once the arrays are copied, so that the state may be donated at once.

        accept_len: the step's held-out accept length, if it was evaluated.
        """
        self._best = max(self._best, -math.inf if accept_len is None else accept_len)
        self._manager.save(
            step,
            metrics={} if accept_len is None else {ACCEPT_LEN: accept_len},
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                run=ocp.args.JsonSave({"cursor": cursor, "fingerprint": dict(fingerprint)}),
            ),
            force=True,
        )

    def restore(self, step: int, abstract: TrainState, *, fingerprint: Fingerprint) -> Restored:
        """Restore `step` as `abstract` says (shapes, dtypes and shardings of every leaf).

        Raises UserError, naming both values, if the saved fingerprint differs from `fingerprint`.
        """
        run = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        for key, value in fingerprint.items():
            if run["fingerprint"].get(key) != value:
                raise UserError(
                    f"resume: {key} is {value} now, but {self.directory} was trained with "
                    f"{run['fingerprint'].get(key)}; restore the old value or choose another out="
                )
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return Restored(self._manager.restore(step, args=arguments)["state"], run["cursor"])

    def restore_params(self, step: int, abstract: Any) -> Any:
        """Only the drafter's parameters of `step`, as `abstract` (params with shardings) says."""
        arguments = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding), abstract)
        restore = ocp.args.PyTreeRestore(
            {"params": abstract}, restore_args={"params": arguments}, partial_restore=True
        )
        return self._manager.restore(step, args=ocp.args.Composite(state=restore))["state"]["params"]


def chosen_step(directory: pathlib.Path, wanted: str, *, key: str) -> int:
    """The step saved in a `checkpoints/` folder that `latest`, `best` (held-out accept length) or a number means.

    Raises UserError, naming `key` and the saved steps, if there is no such step.
    """
    steps = Checkpoints.saved(directory)
    saved = ", ".join(map(str, steps)) or "there is none"
    if wanted == "latest" and steps:
        return steps[-1]
    if wanted == "best" and steps:
        found = Checkpoints.accept_lengths(directory)
        if not found:
            raise UserError(
                f"{key}: found 'best', but no step in {directory} was evaluated; name a saved step ({saved}), or "
                "train with data.heldout and eval.every"
            )
        return max(found, key=lambda step: (found[step], step))
    if not wanted.isdigit() or int(wanted) not in steps:
        raise UserError(f"{key}: found {wanted!r}, allowed: latest, best, or a saved step ({saved})")
    return int(wanted)


def _quality(metrics: Mapping[str, float]) -> float:
    """What the best step has most of."""
    return metrics.get(ACCEPT_LEN, -math.inf)
