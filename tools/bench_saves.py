"""What a save costs the steps around it: written in the background, and written while the training waits.

    python tools/bench_saves.py recipe=quickstart [steps=60] [every=10]

Trains twice, saves every few steps, and compares the steps at a save and after it with the median of all others.
"""

import contextlib
import dataclasses
import pathlib
import statistics
import tempfile

from dflash_jax import train
from dflash_jax.arguments import build, parse_assignments, run_entry_point
from dflash_jax.config import MISSING, option
from dflash_jax.monitor.json_lines import read_lines
from dflash_jax.training.checkpoint import Checkpoints

AROUND = 2  # steps after a save, in which it may still be written


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """What the benchmark is told."""

    recipe: str = option(MISSING, "a name in recipes/ or a file")
    steps: int = option(60, "optimizer steps of each run", low=20)
    every: int = option(10, "optimizer steps between checkpoints", low=4)


def main(arguments: list[str]) -> int:
    config = build(BenchConfig, [("command line", parse_assignments(arguments))])
    for way, waits in (("in the background", False), ("while the training waits", True)):
        with tempfile.TemporaryDirectory() as folder, waiting() if waits else contextlib.nullcontext():
            changes = [f"train.steps={config.steps}", f"checkpoint.every={config.every}", "eval.every=0"]
            train.main([f"recipe={config.recipe}", f"out={folder}", *changes])
            print(f"saves {way}: {told(pathlib.Path(folder), config)}", flush=True)
    return 0


@contextlib.contextmanager
def waiting():
    """Every save is waited for where it begins."""
    begin = Checkpoints.save

    def save(self: Checkpoints, *arguments, **options) -> None:
        begin(self, *arguments, **options)
        self.settle(wait=True)

    Checkpoints.save = save
    try:
        yield
    finally:
        Checkpoints.save = begin


def told(run: pathlib.Path, config: BenchConfig) -> str:
    """The median step, and the longest of those around a save, as a multiple of it."""
    lines = list(read_lines(run / "train_log.jsonl"))
    # From end to end of steps, so that what happens between them counts.
    ends = {line["step"]: line["elapsed_s"] for line in lines}
    taken = {step: ends[step] - ends[step - 1] for step in ends if step - 1 in ends and step > config.every}
    around = {step: seconds for step, seconds in taken.items() if (step - 1) % config.every < AROUND}
    median = statistics.median(seconds for step, seconds in taken.items() if step not in around)
    worst, usual = max(around.values()), statistics.median(around.values())
    return (
        f"median step {median:.3f} s; the {len(around)} steps in which a save begins or goes on: "
        f"median {usual / median:.2f} x, longest {worst / median:.2f} x"
    )


if __name__ == "__main__":
    run_entry_point(main, usage=__doc__ or "", schema=BenchConfig)
