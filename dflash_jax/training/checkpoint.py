"""Checkpoints: arrays through Orbax, written in the background, whole or absent, restored onto any mesh.

Of a save the training only waits for the copy of its arrays. The rest happens in a thread: Orbax writes, the index
of what it has written is read back, checksums are made, the folder gets its name, and only then are older steps
removed. What a disk refuses is a warning until it has refused several saves in a row.
"""

import concurrent.futures
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from dflash_jax.errors import UserError
from dflash_jax.training import checkpoint_files
from dflash_jax.training.checkpoint_files import STATE, WRITING, Fingerprint, Position
from dflash_jax.training.state import TrainState

# What a disk's refusal looks like: of Python's own calls, and of tensorstore's.
REFUSALS = (OSError, ValueError)


class Checkpoints:
    """The `checkpoints/` folder of a run. A context manager: leaving it waits for the save in flight.

    keep: latest steps that stay, besides the best and multiples of keep_every; max_failures: so many saves that
    fail in a row are an error; warn: told of each.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        keep: int,
        warn: Callable[[str], object],
        keep_every: int | None = None,
        max_failures: int = 1,
    ):
        self.directory = directory.absolute()
        self._keep, self._keep_every, self._max_failures = keep, keep_every, max_failures
        self._warn = warn
        self._writer = _writer()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # step, accept length, and the end of its save
        self._in_flight: tuple[int, float | None, concurrent.futures.Future[None]] | None = None
        self._failures = 0
        self._unraisable_before = sys.unraisablehook
        checkpoint_files.clean(self.directory)
        self.last_step = max(checkpoint_files.saved(self.directory), default=0)
        self._best = max(checkpoint_files.accept_lengths(self.directory).values(), default=-math.inf)

    def __enter__(self) -> Self:
        sys.unraisablehook = self._unraisable
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.finish()
        except UserError:
            # What has already gone wrong is told first; the failed save has been warned of.
            if kind is None:
                raise
        finally:
            self._thread.shutdown()
            self._writer.close()
            sys.unraisablehook = self._unraisable_before

    @property
    def saving(self) -> bool:
        """Whether a save is in flight."""
        return self._in_flight is not None and not self._in_flight[2].done()

    def is_best(self, accept_len: float) -> bool:
        """Whether a held-out accept length is longer than those of all steps that are saved."""
        self.settle(wait=True)
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

        accept_len: the step's held-out accept length, if it was evaluated. Raises UserError as `settle` does.
        """
        self.settle(wait=True)
        folder, belongs = self.directory / f"{step}{WRITING}", Position(cursor, dict(fingerprint), accept_len)
        try:
            folder.mkdir(parents=True)
            self._writer.save(folder / STATE, args=ocp.args.StandardSave(state))
        except REFUSALS as fault:
            self._failed(step, fault)
        else:
            ended = self._thread.submit(self._complete, step, folder, belongs, _shapes(state))
            self._in_flight = step, accept_len, ended

    def settle(self, *, wait: bool = False) -> None:
        """Take note of the save in flight if it has ended, or in any case with `wait`.

        Raises UserError once max_failures saves in a row have failed.
        """
        if self._in_flight is None or not (wait or self._in_flight[2].done()):
            return
        (step, accept_len, ended), self._in_flight = self._in_flight, None
        try:
            ended.result()
        except REFUSALS as fault:
            self._failed(step, fault)
        else:
            self._failures, self.last_step = 0, step
            self._best = max(self._best, -math.inf if accept_len is None else accept_len)

    def finish(self) -> None:
        """Wait for the save in flight. Raises UserError if it, or the one before that ended last, has failed."""
        self.settle(wait=True)
        if self._failures:
            raise UserError(
                f"the last state could not be saved in {self.directory}; {self._whole()}. Once the disk takes "
                "files again, the same command goes on"
            )

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, int]:
        """The state of `step` as `abstract` says (shapes, dtypes and shardings of every leaf), and its cursor."""
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            state = reader.restore(self.directory / str(step) / STATE, args=ocp.args.StandardRestore(abstract))
        return state, checkpoint_files.position(self.directory, step).cursor

    def _complete(self, step: int, folder: pathlib.Path, belongs: Position, shapes: list[tuple[int, ...]]) -> None:
        """Wait for what Orbax writes, check it, name it, and remove what is no longer kept. In the thread."""
        self._writer.wait_until_finished()
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            written = reader.metadata(folder / STATE).item_metadata
        if _shapes(written.tree) != shapes:
            raise ValueError(f"{folder} does not hold what was to be written")
        checkpoint_files.seal(folder, belongs, final=self.directory / str(step))
        checkpoint_files.prune(self.directory, keep=self._keep, keep_every=self._keep_every)

    def _failed(self, step: int, fault: Exception) -> None:
        self._failures += 1
        # TRAP: a writer that has met one refusal may tell of it again at its next save.
        self._writer = _writer()
        checkpoint_files.clean(self.directory)
        # Of tensorstore's report the last clause is the disk's.
        said = " ".join(str(fault).split()).rsplit('": ', 1)[-1]
        self._warn(f"checkpoint {step} could not be saved in {self.directory}: {said}; {self._whole()}")
        if self._failures >= self._max_failures:
            raise UserError(
                f"checkpoint.max_failures: {self._failures} saves in a row have failed, the last at step {step}; "
                f"{self._whole()}. Once the disk takes files again, the same command goes on"
            )

    def _unraisable(self, found: "sys.UnraisableHookArgs") -> None:
        """Say nothing of writes that go on after the refused one, and find that nobody waits for them."""
        if str(found.exc_value) != "Event loop is closed":
            self._unraisable_before(found)

    def _whole(self) -> str:
        if not self.last_step:
            return "nothing is saved yet"
        return f"the last whole checkpoint is that of step {self.last_step}"


def restore_params(directory: pathlib.Path, step: int, abstract: Any) -> Any:
    """Only the drafter's parameters of a saved step, as `abstract` (params with shardings) says."""
    arguments = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding), abstract)
    restore = ocp.args.PyTreeRestore(
        {"params": abstract}, restore_args={"params": arguments}, partial_restore=True
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(directory.absolute() / str(step) / STATE, args=restore)["params"]


def read_arrays(directory: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a saved step by its name, such as params.fc.kernel, in memory of this process."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        folder = directory.absolute() / str(step) / STATE
        shapes = reader.metadata(folder).item_metadata
        assert shapes is not None
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes.tree)
        state = reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=arguments))
    named = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in named}


def _writer() -> ocp.AsyncCheckpointer:
    return ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    """The shapes of all arrays; what Orbax says of a tree it has written names them in another order."""
    return sorted(tuple(leaf.shape) for leaf in jax.tree.leaves(tree))
