"""The watch over bad steps: those whose loss or gradient is not finite, or whose gradient is far too large.

The devices have skipped such a step by themselves (training/step.py). Here, once its line has arrived, it is told,
its batches are written down for tools/replay.py, and too many of them in a row end the run.
"""

import math
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from dflash_jax.batch import Batch
from dflash_jax.errors import UserError

FOLDER = "bad_steps"
MOST_KEPT = 20  # batches written down in a run
FIELDS = ("tokens", "positions", "segment_ids", "loss_mask", "record_ids", "epochs")


class Guard:
    """Over the run in `directory`. max_bad_steps: of them in a row end it; warn: told of each."""

    def __init__(self, directory: pathlib.Path, *, max_bad_steps: int, warn: Callable[[str], object]):
        self._directory, self._max_bad_steps, self._warn = directory, max_bad_steps, warn
        self._held: dict[int, Sequence[Batch]] = {}
        self.in_row = 0
        self.sound = True  # parameters and moments, as far as the last line tells

    def hold(self, step: int, batches: Sequence[Batch]) -> None:
        """Keep the batches of a step, numpy arrays, until its line arrives."""
        self._held[step] = batches

    def observe(self, line: dict) -> None:
        """Take in the completed line of a step."""
        batches = self._held.pop(line["step"], ())
        self.sound = _finite(line, "param_norm") and (
            _finite(line, "update_ratio") or not _finite(line, "grad_norm")
        )
        # A step without a block had nothing to learn; that is no fault.
        if not line["skipped"] or line["blocks"] == 0:
            self.in_row = 0
            return
        self.in_row += 1
        place = self._write(line["step"], batches)
        self._warn(
            f"step {line['step']} was skipped: {_reason(line)}; bucket {line['bucket']}, records "
            f"{_ids(batches)}{f', kept in {place}' if place else ''}"
        )

    def check(self) -> None:
        """Raise UserError if too many steps in a row were bad."""
        if self.in_row >= self._max_bad_steps:
            raise UserError(
                f"guard.max_bad_steps: {self.in_row} steps in a row were skipped; the parameters are those of "
                f"before, and so is the last checkpoint; python tools/replay.py {self._directory} shows why"
            )

    def _write(self, step: int, batches: Sequence[Batch]) -> pathlib.Path | None:
        """The file that now holds the batches; None where there are enough of them, or the disk refuses."""
        folder = self._directory / FOLDER
        file = folder / f"step-{step}.npz"
        try:
            folder.mkdir(exist_ok=True)
            if len(list(folder.iterdir())) >= MOST_KEPT:
                return None
            arrays = {
                f"{index}.{name}": getattr(batch, name) for index, batch in enumerate(batches) for name in FIELDS
            }
            np.savez_compressed(file, **arrays)
        except OSError as fault:
            self._warn(f"the batches of step {step} could not be kept in {file}: {fault}")
            return None
        return file


def read_batches(file: pathlib.Path) -> list[Batch]:
    """The batches of a step that the guard has written down. Raises UserError if the file is not whole."""
    try:
        with np.load(file) as found:
            count = len(found.files) // len(FIELDS)
            return [Batch(**{name: found[f"{index}.{name}"] for name in FIELDS}) for index in range(count)]
    except (OSError, ValueError, KeyError) as fault:
        raise UserError(f"{file} does not hold the batches of a step ({fault})") from None


def _finite(line: dict, name: str) -> bool:
    return math.isfinite(float(line[name]))


def _reason(line: dict) -> str:
    broken = [name for name in ("param_norm", "loss", "grad_norm", "update_ratio") if not _finite(line, name)]
    if broken:
        return ", ".join(f"{name} is {line[name]}" for name in broken)
    return f"grad_norm {line['grad_norm']:.3g} is over guard.max_grad_norm_ratio times that of recent steps"


def _ids(batches: Sequence[Batch]) -> str:
    ids = [int(record) for batch in batches for record in np.ravel(batch.record_ids) if record >= 0]
    shown = ", ".join(map(str, ids[:12]))
    return f"{shown}, .. ({len(ids)} in all)" if len(ids) > 12 else shown
