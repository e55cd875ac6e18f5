"""The record of a run: every optimizer step as one line of train_log.jsonl and as points in TensorBoard.

Step N's values stay on the device until step N + 1 has been dispatched, so that logging never waits for
the step that the devices work on. Steps count from 1; none can be missing or written twice.
"""

import collections
import fnmatch
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Self

import jax
import numpy as np
import tensorboardX

from dflash_jax.monitor.json_lines import JsonLines, read_lines

# TensorBoard's group of a value: that of the first pattern which its name matches.
GROUPS = {
    "lr": "optim",
    "grad_norm": "optim",
    "update_ratio": "optim",
    "skipped*": "optim",
    "epoch": "data",
    "epochs": "data",
    "tokens": "data",
    "blocks": "data",
    "rows": "data",
    "seq_len": "data",
    "bucket*": "data",
    "padding": "data",
    "recalled": "data",
    "*_s": "time",
    "*": "train",  # loss and its terms, accuracies, streaks, accept length
}

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


def _points(tag: str, value: float | int | str | list) -> Iterator[tuple[str, float]]:
    """TensorBoard's points of a plain value: one a number, TAG/1, TAG/2, ... of a list, none of text."""
    if isinstance(value, list):
        for position, element in enumerate(value, start=1):
            yield from _points(f"{tag}/{position}", element)
    elif not isinstance(value, str):
        yield tag, value


def _step_points(line: dict) -> Iterator[tuple[str, float]]:
    """TensorBoard's points of a completed line of train_log.jsonl."""
    for name, value in line.items():
        group = next(group for pattern, group in GROUPS.items() if fnmatch.fnmatchcase(name, pattern))
        if name != "step":
            yield from _points(f"{group}/{name}", value)
    for name in ("loss", "accept_len", "bucket_steps"):
        if "bucket" in line and name in line:
            yield from _points(f"bucket_{line['bucket']}/{name.removeprefix('bucket_')}", line[name])


def _line(step: int, values: Mapping[str, Value]) -> dict:
    fetched = jax.device_get(values)  # one wait for all of them; it sorts the names
    return {"step": step, **{name: plain(fetched[name]) for name in values}}


class RunLog:
    """train_log.jsonl, eval_log.jsonl and tensorboard/ of a run directory, continued after step `resumed_at`.

    observer is given every completed line of train_log.jsonl. To be opened by one process of a run.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        resumed_at: int,
        observer: Callable[[dict], None] | None = None,
    ):
        directory.mkdir(parents=True, exist_ok=True)
        self._steps = JsonLines(directory / "train_log.jsonl", resumed_at=resumed_at)
        self._evaluations = JsonLines(directory / "eval_log.jsonl", resumed_at=resumed_at)
        self._board = tensorboardX.SummaryWriter(
            str(directory / "tensorboard"),
            purge_step=resumed_at + 1 if resumed_at else 0,
            max_queue=1000,
            flush_secs=10,
            # TRAP: without it, a run resumed within the same second overwrites the events before.
            filename_suffix=f".after-step-{resumed_at}",
        )
        self._observer = observer
        self._held: tuple[int, dict[str, Value]] | None = None
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

    def log_step(self, step: int, values: dict[str, Value]) -> None:
        """Hold the values of optimizer step `step` and write those of the step before.

        values: scalars, lists or vectors of scalars, or text by name. With a "bucket" among them, the line
        gains "bucket_steps", the number of steps taken in that bucket so far.
        """
        if step != self._last + 1:
            raise ValueError(f"step {step} was logged after step {self._last}; every step has one line.")
        self.flush()
        self._held = step, values
        self._last = step

    def flush(self) -> None:
        """Write the held step, waiting for its values; call before a checkpoint and before an evaluation."""
        if self._held is None:
            return
        step, values = self._held
        self._held = None
        line = _line(step, values)
        if "bucket" in line:
            self._bucket_steps[line["bucket"]] += 1
            line["bucket_steps"] = self._bucket_steps[line["bucket"]]
        self._steps.append(line)
        for tag, number in _step_points(line):
            self._board.add_scalar(tag, number, step)
        if self._observer is not None:
            self._observer(line)

    def log_evaluation(self, step: int, values: Mapping[str, Value]) -> None:
        """Write what an evaluation after optimizer step `step` found, at once."""
        line = _line(step, values)
        self._evaluations.append(line)
        for name in values:
            for tag, number in _points(f"eval/{name}", line[name]):
                self._board.add_scalar(tag, number, step)

    def text(self, name: str, content: str) -> None:
        """Show `content` verbatim among TensorBoard's texts."""
        indented = "".join(f"    {line}\n" for line in content.splitlines())
        self._board.add_text(name, indented, self._last)
