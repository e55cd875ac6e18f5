"""How fast `prepare` is beside the tokenizer alone, and whether its memory grows with the data.

    python tools/bench_prepare.py target=PATH input=FILES [workers=2] [rows=20000]

The rows of the input are repeated to `rows`, and to four times as many. The tokenizer alone encodes the texts of
the conversations in batches on all cores, without any template, mask or file; `prepare` is the whole command.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from dflash_jax.arguments import build, parse_assignments, run_entry_point
from dflash_jax.chat.tokenizer import load_tokenizer
from dflash_jax.config import MISSING, option
from dflash_jax.data.records import Records
from dflash_jax.sources.conversations import Conversation, parse_row
from dflash_jax.sources.files import find_files, read_parts, rows_of
from dflash_jax.sources.unused import UnusedRow
from dflash_jax.target_path import target_path

BATCH = 1000  # texts; all at once would need gigabytes
TIMES = 4  # how much more data the larger run has


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """What the benchmark is told."""

    target: str = option(MISSING, "model folder, .gguf file, or package:NAME/FILE inside a Python package")
    input: str = option(MISSING, "files of conversations")
    workers: int = option(2, "processes of prepare", low=1)
    rows: int = option(20000, "rows of the smaller run", low=1)


@dataclasses.dataclass(frozen=True)
class Measured:
    """How long it took to make so many tokens: seconds by the clock, and of all cores together.

    parent, worker: peak memory of the command's first process and of the largest other one, in MB.
    """

    tokens: int
    seconds: float
    core_seconds: float
    parent: float = 0.0
    worker: float = 0.0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def __sub__(self, other: "Measured") -> "Measured":
        tokens, seconds = self.tokens - other.tokens, self.seconds - other.seconds
        return Measured(tokens, seconds, self.core_seconds - other.core_seconds)


def main(arguments: list[str]) -> int:
    config = build(BenchConfig, [("command line", parse_assignments(arguments))])
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    rows = [row for row in _rows(config.input) if not isinstance(row, UnusedRow)]
    repeated = list(itertools.islice(itertools.cycle(rows), config.rows))
    tokenizer = load_tokenizer(target_path(config.target))
    texts = [text for row in repeated for text in _rendered(tokenizer, row)]
    with tempfile.TemporaryDirectory() as scratch:
        runs = []
        alone = [tokenised(tokenizer, texts)]
        for times in (1, TIMES):
            source = pathlib.Path(scratch) / f"{times}.jsonl"
            with source.open("w") as out:
                out.writelines(json.dumps(row) + "\n" for row in repeated * times)
            runs.append(prepared(config, source))
        alone.append(tokenised(tokenizer, texts))
    print(report(runs, rows=config.rows, workers=config.workers, alone=max(alone, key=lambda run: run.speed)))
    return 0


def _rows(inputs: str) -> Iterator[Any]:
    for part in read_parts(find_files(inputs)):
        for _, row in rows_of(part):
            yield row


def _rendered(tokenizer: Any, row: dict[str, Any]) -> Iterator[str]:
    parsed = parse_row(row)
    if isinstance(parsed, Conversation):
        yield tokenizer.apply_chat_template(list(parsed.messages), tokenize=False)


def tokenised(tokenizer: Any, texts: list[str]) -> Measured:
    """The tokenizer alone, on all cores."""
    start_s, start_core_s, tokens = time.monotonic(), time.process_time(), 0
    for first in range(0, len(texts), BATCH):
        tokens += sum(map(len, tokenizer(texts[first : first + BATCH], add_special_tokens=False)["input_ids"]))
    return Measured(tokens, time.monotonic() - start_s, time.process_time() - start_core_s)


def prepared(config: BenchConfig, source: pathlib.Path) -> Measured:
    """Run the command over a file, and watch the memory of its processes."""
    output = source.with_suffix("")
    command = [sys.executable, "-m", "dflash_jax.prepare", f"target={config.target}", f"input={source}"]
    start_s, start_core_s = time.monotonic(), _core_seconds()
    process = subprocess.Popen(
        [*command, f"output={output}", f"workers={config.workers}"], stdout=subprocess.DEVNULL
    )
    peaks: dict[int, float] = {}
    while process.poll() is None:
        for pid in (process.pid, *_children(process.pid)):
            peaks[pid] = _peak_memory(pid) or peaks.get(pid, 0.0)
        time.sleep(0.05)
    seconds = time.monotonic() - start_s
    if process.returncode:
        raise SystemExit(process.returncode)
    parent = peaks.pop(process.pid)
    tokens = Records.open(output).manifest["tokens"]
    core_seconds = _core_seconds() - start_core_s
    return Measured(tokens, seconds, core_seconds, parent, max(peaks.values(), default=0.0))


def _core_seconds() -> float:
    """Of all processes that were started here and have ended, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # the process has just ended
        return []


def _peak_memory(pid: int) -> float:
    """Most that a process had in memory so far, in MB; 0 if it has ended."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM:")), 0.0)


def report(runs: list[Measured], *, rows: int, workers: int, alone: Measured) -> str:
    """A line for the tokenizer alone, for each run with the start and the memory of its processes, and without."""

    def line(name: str, run: Measured) -> str:
        cost = run.core_seconds / run.tokens * 1e6
        return f"{name}: {run.speed / 1e3:,.0f} ktok/s, {cost:.2f} core-seconds a million tokens"

    def beside(run: Measured) -> str:
        return f"{run.speed / alone.speed:.2f} of the tokenizer alone"

    lines = [line(f"tokenizer alone, {os.cpu_count()} cores", alone)]
    for run, count in zip(runs, (rows, rows * TIMES), strict=True):
        name = f"prepare, {workers} workers, {count:,} rows in {run.seconds:.1f} s, start included"
        memory = f"peak memory {run.parent:,.0f} MB, each worker {run.worker:,.0f} MB"
        lines.append(f"{line(name, run)}; {beside(run)}; {memory}")
    small, large = runs
    lines.append(f"{line('without the start (their difference)', large - small)}; {beside(large - small)}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_entry_point(main, usage=__doc__, schema=BenchConfig)
