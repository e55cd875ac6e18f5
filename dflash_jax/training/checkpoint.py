"""Checkpoints through Orbax: written in the background, whole or absent, restored onto any mesh.

One step holds the train state, the data position that belongs to it (batches consumed) and the run's
fingerprint: what must not change between the runs that share it.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from dflash_jax.errors import UserError
from dflash_jax.training.state import TrainState

Fingerprint = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Restored:
    """state: the train state; cursor: batches of the plan that it has consumed."""

    state: TrainState
    cursor: int


class Checkpoints:
    """The `checkpoints/` folder of a run. A context manager: leaving it waits for the save in flight."""

    def __init__(self, directory: pathlib.Path, *, keep: int):
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep), enable_async_checkpointing=True
        )
        self.directory = directory
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

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
    def set_aside(directory: pathlib.Path, *, after: int) -> None:
        """Move the steps past `after` to a sibling folder, so that training can branch off there."""
        for step in Checkpoints.saved(directory):
            if step > after:
                aside = directory.with_name(f"{directory.name}.after-step-{after}")
                aside.mkdir(exist_ok=True)
                (directory / str(step)).rename(aside / str(step))

    def save(self, step: int, state: TrainState, *, cursor: int, fingerprint: Fingerprint) -> None:
        """Start saving; returns once the arrays are copied, so that the state may be donated at once."""
        self._manager.save(
            step,
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


def chosen_step(steps: list[int], wanted: str, *, key: str) -> int:
    """The saved step that `latest` or a number means. Raises UserError if it is not among `steps`."""
    if wanted == "latest" and steps:
        return steps[-1]
    if not wanted.isdigit() or int(wanted) not in steps:
        saved = ", ".join(map(str, steps)) or "there is none"
        raise UserError(f"{key}: found {wanted!r}, allowed: a saved step ({saved})")
    return int(wanted)
