"""What plans cost, counted by hand on small ones and by walking through the batches on large ones."""

import numpy as np
import pytest
import tool_files

from dflash_jax import plan as entry
from dflash_jax.batches.figures import plan_figures, without_buckets
from dflash_jax.batches.plan import BatchPlan
from dflash_jax.errors import UserError

LENGTHS = np.clip(np.random.default_rng(2).lognormal(4, 0.7, 5000), 4, 400).astype(np.int32)


@pytest.mark.parametrize("batching", ["bucketed", "packed", "random", "sorted"])
def test_tokens_held_are_those_of_all_batches(batching):
    plan = BatchPlan(LENGTHS, edges=(60, 150, 400), rows=(24, 9, 3), seed=1, epochs=2, batching=batching)
    figures = plan_figures(plan, tokens=int(LENGTHS.sum()))
    walked = [plan[index] for index in range(plan.batches_per_epoch)]
    assert figures.batches == len(walked)
    assert figures.held == sum(len(batch.record_ids) * plan.edges[batch.bucket] for batch in walked)
    ids = np.concatenate([batch.record_ids.ravel() for batch in walked])
    assert figures.useful == pytest.approx(LENGTHS[ids[ids >= 0]].sum() / figures.held)


def test_sorted_batches_without_buckets_are_as_long_as_their_longest_record():
    # Rows of 12 // 5 = 2 for 5 and 4, of 12 // 3 = 4 for the rest.
    figures = without_buckets(np.array([1, 5, 3, 2, 4, 3]), tokens_per_batch=12, row_multiple=1)
    assert (figures.batches, figures.held, figures.tokens) == (2, 2 * 5 + 4 * 3, 18)
    # In pairs of rows: 5 and 4 alone, then 3 3 2 1.
    figures = without_buckets(np.array([1, 5, 3, 2, 4, 3]), tokens_per_batch=14, row_multiple=2)
    assert (figures.batches, figures.held) == (2, 2 * 5 + 4 * 3)


def test_the_command_shows_the_buckets_and_compares(tmp_path, capsys):
    file = tmp_path / "lengths.npy"
    np.save(file, LENGTHS)
    given = [f"data={file}", "tokens_per_batch=4096", "row_multiple=2", "pad_multiple=8"]
    assert entry.main([*given, "buckets=[64,160,400]"]) == 0
    shown = capsys.readouterr().out
    assert "left out: 0 records longer than 400 tokens" in shown
    rows = [line.split() for line in shown.splitlines() if line.strip().startswith(("64 ", "160 ", "400 "))]
    assert [row[:3] for row in rows] == [
        [str(edge), str(4096 // edge // 2 * 2), str(int(((low < LENGTHS) & (edge >= LENGTHS)).sum()))]
        for low, edge in ((0, 64), (64, 160), (160, 400))
    ]
    useful = {line[:20].strip(): line for line in shown.splitlines() if "%" in line}
    assert "bucketed, auto:32" in useful
    assert "packed" in useful


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.array([[1, 2]]), r"shape \(1, 2\)"),
        (np.array([1.5]), "float64"),
        (np.array([0, 3]), "lengths >= 1"),
        (np.array([], int), "lengths"),
    ],
)
def test_what_are_not_lengths_is_refused(tmp_path, content, message):
    np.save(tmp_path / "lengths.npy", content)
    with pytest.raises(UserError, match=message):
        entry.main([f"data={tmp_path / 'lengths.npy'}"])


@pytest.mark.parametrize(
    "buckets", ["auto:0", "auto:65", "auto:x", "best", "[]", "[5,5]", "[1.5]", "[a]", "7", "[0,4]"]
)
def test_what_are_not_buckets_is_refused(tmp_path, buckets):
    with pytest.raises(UserError, match=r"data\.buckets"):
        entry.main([f"data={tmp_path / 'absent.npy'}", f"buckets={buckets}"])


def test_the_plan_benchmark_has_the_shape_of_the_real_run(monkeypatch, capsys):
    bench = tool_files.load("bench_plan")
    lengths = bench.real_lengths(bench.RECORDS)
    assert (len(lengths), lengths.min(), lengths.max()) == (902_087, 64, 8192)
    assert np.mean(lengths <= 770) == pytest.approx(0.173, abs=0.002)
    assert np.mean(lengths > 3296) == pytest.approx(0.202, abs=0.002)
    monkeypatch.setattr(bench, "RECORDS", 3000)
    assert bench.main(["buckets=[1024,8192]"]) == 0
    assert "peak memory" in capsys.readouterr().out
