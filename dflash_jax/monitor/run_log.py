"""The record of a run: every optimizer step as one line of train_log.jsonl and as points in TensorBoard.

Step N's values stay on the device until step N + 1 has been dispatched, so that logging never waits for
the step that the devices work on. Steps count from 1; none can be missing or written twice.
"""

import collections
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Self

import jax
import numpy as np

from dflash_jax.monitor.board import Board
from dflash_jax.monitor.json_lines import JsonLines, read_lines

Value = jax.Array | np.ndarray | float | int | str | list


def plain(value: Value) -> float | int | str | list:
    """A value as JSON writes it; vectors become lists, and non-finite numbers "nan", "inf" and "-inf".

    Narrow floats keep their own shortest digits: float32 0.1 becomes 0.1, not 0.10000000149011612.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [plain(element) for element in value]
    array = np.asarray(value)
    if array.ndim:
        return [plain(element) for element in array]
    if array.dtype.kind in "biu":
        return int(array)
    number = float(str(array[()]))
    return number if math.isfinite(number) else str(number)


def _line(step: int, values: Mapping[str, Value]) -> dict:
    fetched = jax.device_get(values)  # one wait for all of them; it sorts the names
    return {"step": step, **{name: plain(fetched[name]) for name in values}}


class RunLog:
    """train_log.jsonl, eval_log.jsonl and tensorboard/ of a run directory, continued after step `resumed_at`.

    observers are given every completed line of train_log.jsonl; warn is told what the disk refuses. To be opened
    by one process of a run.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        resumed_at: int,
        warn: Callable[[str], object],
        observers: tuple[Callable[[dict], None], ...] = (),
    ):
        directory.mkdir(parents=True, exist_ok=True)
        self._steps = JsonLines(directory / "train_log.jsonl", resumed_at=resumed_at, warn=warn)
        self._evaluations = JsonLines(directory / "eval_log.jsonl", resumed_at=resumed_at, warn=warn)
        self._board = Board(directory / "tensorboard", resumed_at=resumed_at, warn=warn)
        self._observers = observers
        self._held: tuple[int, dict[str, Value], dict[str, Value]] | None = None
        self._last = resumed_at
        self._bucket_steps = collections.Counter(
            line["bucket"] for line in read_lines(directory / "train_log.jsonl") if "bucket" in line
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            self._steps.close()
            self._evaluations.close()
            self._board.close()

    def log_step(
        self, step: int, values: dict[str, Value], *, if_skipped: Mapping[str, Value] | None = None
    ) -> None:
        """Hold the values of optimizer step `step` and write those of the step before.

        values: scalars, lists or vectors of scalars, or text by name; if_skipped: more of them, for the line of a
        step that says "skipped". With a "bucket" among them, the line gains "bucket_steps", the number of steps
        taken in that bucket so far.
        """
        if step != self._last + 1:
            raise ValueError(f"step {step} was logged after step {self._last}; every step has one line.")
        self.flush()
        self._held = step, values, dict(if_skipped or {})
        self._last = step

    def flush(self) -> None:
        """Write the held step, waiting for its values; call before a checkpoint and before an evaluation."""
        if self._held is None:
            return
        step, values, if_skipped = self._held
        self._held = None
        line = _line(step, values)
        if line.get("skipped"):
            line |= _line(step, if_skipped)
        if "bucket" in line:
            self._bucket_steps[line["bucket"]] += 1
            line["bucket_steps"] = self._bucket_steps[line["bucket"]]
        self._steps.append(line)
        self._board.add_step(line)
        for observe in self._observers:
            observe(line)

    def log_evaluation(self, step: int, values: Mapping[str, Value]) -> None:
        """Write what an evaluation after optimizer step `step` found, at once."""
        line = _line(step, values)
        self._evaluations.append(line)
        self._board.add_evaluation(line)

    def text(self, name: str, content: str) -> None:
        """Show `content` verbatim among TensorBoard's texts."""
        self._board.text(name, content, self._last)
