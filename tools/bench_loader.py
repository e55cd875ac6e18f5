"""How fast batches are read, beside how fast a run trained on them.

    python tools/bench_loader.py run=DIR [batches=2000]

The batches are those of the run, from its start; its speed is the median over the second half of its steps.
"""

import dataclasses
import itertools
import pathlib
import statistics
import time

from dflash_jax.arguments import build, find_named, parse_assignments, read_yaml, run_entry_point
from dflash_jax.batches.loader import Reading, batches
from dflash_jax.config import MISSING, MeshLayout, Recipe, option
from dflash_jax.dataset import open_records, training_data
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import make_meshes, prepare_devices
from dflash_jax.monitor.json_lines import read_lines


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """What the benchmark is told."""

    run: str = option(MISSING, "run directory of a training")
    batches: int = option(2000, "batches to read", low=1)


def main(arguments: list[str]) -> int:
    config = build(BenchConfig, [("command line", parse_assignments(arguments))])
    run = pathlib.Path(config.run)
    recipe = build(Recipe, [(str(run / "recipe.yaml"), read_yaml(run / "recipe.yaml") | {"out": config.run})])
    steps = [line for line in read_lines(run / "train_log.jsonl")]
    trained = statistics.median(line["drafter_tok_s"] for line in steps[len(steps) // 2 :])
    read = read_speed(recipe, run, count=config.batches)
    print(f"read {read:.3g} tokens/s, trained {trained:.3g} tokens/s: {read / trained:.0f} times as fast")
    return 0


def read_speed(recipe: Recipe, run: pathlib.Path, *, count: int) -> float:
    """Tokens of records a second, of `count` batches by the recipe's threads."""
    layout = build(MeshLayout, [(recipe.mesh, read_yaml(find_named("meshes", recipe.mesh, key="mesh")))])
    experiment = Experiment.open(recipe)
    prepare_devices(layout)
    records = open_records(experiment, recipe.data.train, run / "data" / "train")
    data = training_data(experiment, records, meshes=make_meshes(layout, recipe.mesh)).lasting(count)
    reading = Reading(recipe.pipeline.read_threads, int(recipe.pipeline.prefetch_mib * 2**20))
    start_s, tokens = time.monotonic(), 0
    for batch, _ in itertools.islice(batches(data.records, data.plan, start=0, reading=reading), count):
        tokens += int((batch.segment_ids > 0).sum())
    return tokens / (time.monotonic() - start_s)


if __name__ == "__main__":
    run_entry_point(main, usage=__doc__, schema=BenchConfig)
