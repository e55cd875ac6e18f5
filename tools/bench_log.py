"""What the log costs a step: the lines of a run written again, beside the time that its steps took.

    python tools/bench_log.py run=DIR

Counted is all from a step's values on the host to the line in train_log.jsonl and the points in TensorBoard.
"""

import dataclasses
import pathlib
import statistics
import tempfile
import time

from dflash_jax.arguments import build, parse_assignments, run_entry_point
from dflash_jax.config import MISSING, option
from dflash_jax.errors import UserError
from dflash_jax.monitor.json_lines import read_lines
from dflash_jax.monitor.run_log import RunLog


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """What the benchmark is told."""

    run: str = option(MISSING, "run directory of a training")


def main(arguments: list[str]) -> int:
    config = build(BenchConfig, [("command line", parse_assignments(arguments))])
    lines = list(read_lines(pathlib.Path(config.run) / "train_log.jsonl"))
    if not lines:
        raise UserError(f"run: {config.run} has no train_log.jsonl with a step in it")
    taken = []
    with tempfile.TemporaryDirectory() as folder, RunLog(pathlib.Path(folder), resumed_at=0, warn=print) as log:
        for step, line in enumerate(lines, start=1):
            values = {name: value for name, value in line.items() if name != "step"}
            started = time.perf_counter()
            log.log_step(step, values)
            log.flush()
            taken.append(time.perf_counter() - started)
    written, median = statistics.mean(taken), statistics.median(line["step_s"] for line in lines)
    print(
        f"{len(lines)} lines: {1000 * written:.2f} ms each; the run's median step: {1000 * median:.1f} ms; "
        f"share {written / median:.2%}"
    )
    return 0


if __name__ == "__main__":
    run_entry_point(main, usage=__doc__ or "", schema=BenchConfig)
