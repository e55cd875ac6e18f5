"""Show the batches of a data set before training: ``python -m dflash_jax.plan data=DIR [key=value ...]``.

Prints the buckets with their shapes and how they take turns, and what other numbers of buckets and other ways of
batching would cost.
"""

import pathlib
import time

import numpy as np

from dflash_jax.arguments import build, parse_assignments, run_entry_point
from dflash_jax.batches.buckets import choose_edges, fits, parse_buckets, rows_per_batch
from dflash_jax.batches.figures import PlanFigures, plan_figures, without_buckets
from dflash_jax.batches.interleave import longest_runs
from dflash_jax.batches.plan import BatchPlan
from dflash_jax.config import PlanConfig
from dflash_jax.data.records import Records
from dflash_jax.errors import UserError

COUNTS = (4, 6, 8, 12, 16, 24, 32)  # of buckets to compare

USAGE = """\
usage: python -m dflash_jax.plan data=DIR|LENGTHS.npy [debug=true] [key=value ...]

keys, with type, default and meaning:"""


def main(arguments: list[str]) -> int:
    config = build(PlanConfig, [("command line", parse_assignments(arguments))])
    buckets = parse_buckets(config.buckets)
    lengths = read_lengths(config.data)
    if not isinstance(buckets, int):
        inside = fits(lengths, buckets)
        print(f"left out: {np.count_nonzero(~inside)} records longer than {buckets[-1]} tokens")
        lengths = lengths[inside]
    started = time.perf_counter()
    plan = make_plan(lengths, config, buckets)
    order = plan.order(0)
    seconds = time.perf_counter() - started
    tokens, span = lengths.sum(dtype=np.int64), f"{lengths.min()} to {lengths.max()} each"
    print(f"data     {len(lengths)} records, {tokens} tokens, {span}")
    print(f"plan     {plan.batches_per_epoch} batches a pass, made in {seconds:.2f} s\n")
    print(bucket_table(plan, lengths, order))
    print(comparison(lengths, config, plan))
    return 0


def read_lengths(path: str) -> np.ndarray:
    """[records] int32: of a prepared folder, or from a .npy file. Raises UserError where they are not lengths."""
    file = pathlib.Path(path)
    if file.suffix != ".npy":
        return Records.open(file).lengths
    try:
        lengths = np.load(file)
    except (OSError, ValueError) as fault:
        raise UserError(f"data: {file} is not a .npy file of numbers ({fault})") from None
    if lengths.ndim != 1 or not len(lengths) or lengths.dtype.kind not in "iu" or lengths.min() < 1:
        raise UserError(
            f"data: {file} holds {lengths.dtype} of shape {lengths.shape}, allowed: [records] lengths >= 1"
        )
    return lengths.astype(np.int32)


def make_plan(
    lengths: np.ndarray, config: PlanConfig, buckets: tuple[int, ...] | int, *, batching: str = "bucketed"
) -> BatchPlan:
    """One pass over all lengths in these buckets."""
    edges = choose_edges(
        buckets,
        lengths,
        tokens_per_batch=config.tokens_per_batch,
        row_multiple=config.row_multiple,
        pad_multiple=config.pad_multiple,
    )
    rows = rows_per_batch(edges, tokens_per_batch=config.tokens_per_batch, row_multiple=config.row_multiple)
    return BatchPlan(lengths, edges=edges, rows=rows, seed=config.seed, epochs=1, batching=batching)


def bucket_table(plan: BatchPlan, lengths: np.ndarray, order: np.ndarray) -> str:
    """Edges, shapes, shares and runs of the buckets."""
    runs = longest_runs(order, buckets=len(plan.edges))
    shuffled = longest_runs(np.random.default_rng(plan.seed).permutation(order), buckets=len(plan.edges))
    lines = ["row length  rows   records  batches   share  padding  longest run  if shuffled"]
    low = 0
    for bucket, (edge, rows, batches) in enumerate(
        zip(plan.edges, plan.rows, plan.batches_per_bucket, strict=True)
    ):
        inside = lengths[(lengths > low) & (lengths <= edge)]
        padding = 1 - inside.sum(dtype=np.int64) / max(batches * rows * edge, 1)
        lines.append(
            f"{edge:10d}  {rows:4d}  {len(inside):8d}  {batches:7d}  {batches / len(order):6.1%}  {padding:7.1%}"
            f"  {runs[bucket]:11d}  {shuffled[bucket]:11d}"
        )
        low = edge
    return "\n".join(lines) + "\n"


def comparison(lengths: np.ndarray, config: PlanConfig, plan: BatchPlan) -> str:
    """This plan beside other numbers of buckets and other ways of batching."""
    tokens = int(lengths.sum(dtype=np.int64))
    ideal = without_buckets(lengths, tokens_per_batch=config.tokens_per_batch, row_multiple=config.row_multiple)
    found = {f"bucketed, as above ({len(plan.edges)})": plan_figures(plan, tokens=tokens)}
    for count in COUNTS:
        other = make_plan(lengths, config, count)
        found[f"bucketed, auto:{count}"] = plan_figures(other, tokens=tokens)
    for batching in ("packed", "random"):
        other = make_plan(lengths, config, plan.edges, batching=batching)
        found[batching] = plan_figures(other, tokens=tokens)
    found["sorted, a shape for each batch"] = ideal
    lines = ["batching                          batches  tokens held  useful  throughput*  longest run"]
    lines += [_compared(name, figures, ideal) for name, figures in found.items()]
    return (
        "\n".join(lines)
        + "\n* estimated: that of sorted batches without buckets is 1, and time goes with tokens held"
    )


def _compared(name: str, figures: PlanFigures, ideal: PlanFigures) -> str:
    return (
        f"{name:32s}  {figures.batches:7d}  {figures.held:11.4g}  {figures.useful:6.1%}"
        f"  {figures.useful / ideal.useful:11.3f}  {figures.longest_run or '-':>11}"
    )


if __name__ == "__main__":
    run_entry_point(main, usage=USAGE, schema=PlanConfig)
