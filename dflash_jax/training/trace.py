"""A trace of some steps for JAX's profiler, with the loop's work and the models' parts under their names."""

import pathlib
from typing import Any

import jax

from dflash_jax.errors import UserError


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """First and last step of profile.steps. Raises UserError for anything but two numbers in order."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise UserError(f"profile.steps: found {text!r}, allowed: first:last, such as 20:24 (in a file in quotes)")
    return int(first), int(last)


class Trace:
    """Traces the steps that it is told of from the first to the last of `steps`; None: none of them.

    A context manager, so that a run that ends earlier still has what was traced. Read the folder with XProf or
    TensorBoard's profile plugin, or its perfetto file with ui.perfetto.dev.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: pathlib.Path):
        self._steps, self._folder, self._running = steps, folder, False

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """To be called before a step is dispatched."""
        if self._steps is not None and step == self._steps[0]:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._running = True

    def after(self, step: int, results: Any) -> None:
        """To be called after it, with what it computes."""
        if self._running and self._steps is not None and step >= self._steps[1]:
            jax.block_until_ready(results)
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
