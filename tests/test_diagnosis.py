"""The diagnosis of logs: planted faults are named, each alone; healthy logs, made up and real, have no finding."""

import functools
import pathlib

import diagnosis_logs
import numpy as np
import pytest
from diagnosis_logs import HEALTHY, PLANTS, Lines, Shape

from dflash_jax.diagnosis.comparison import compare
from dflash_jax.diagnosis.diagnose import diagnose
from dflash_jax.diagnosis.facts import shared_interval
from dflash_jax.diagnosis.findings import KINDS, Finding
from dflash_jax.diagnosis.levels import past_means, past_median, rolling_median, scatter, step_scatter
from dflash_jax.diagnosis.modes import away_from_trend, borders
from dflash_jax.diagnosis.reading import as_log, read_log
from dflash_jax.errors import UserError

REAL = sorted((pathlib.Path(__file__).parent / "golden" / "logs").glob("*.jsonl.gz"))
SHAPES = (
    Shape(),
    Shape(shares=(1.0,)),
    HEALTHY["six buckets"],
    Shape(steps=500, resumed=(300,)),
    Shape(evaluated=100, noise=0.1),
)
SEEDS = range(10)
PLANTED = [(kind, plant) for kind, plants in PLANTS.items() for plant in plants]


@functools.cache
def made(seed: int, shape: Shape) -> Lines:
    return diagnosis_logs.healthy(seed, shape)


def healthy(seed: int, shape: Shape = Shape()) -> Lines:  # noqa: B008 (frozen)
    return [dict(line) for line in made(seed, shape)]


def findings(lines: Lines) -> list[Finding]:
    return list(diagnose(as_log(lines, name="made")).findings)


def verdicts(finding: Finding) -> dict[str, str]:
    return {explanation.cause: explanation.verdict for explanation in finding.explanations}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_has_no_finding(name):
    for seed in range(2 if HEALTHY[name].steps > 1000 else 5):
        found = findings(healthy(seed, HEALTHY[name]))
        assert found == [], f"seed {seed}"


@pytest.mark.parametrize("file", REAL, ids=lambda file: file.name)
def test_a_real_log_has_no_finding(file):
    assert diagnose(read_log(file)).findings == []


def test_every_kind_is_planted():
    assert set(PLANTS) == set(KINDS)


@pytest.mark.parametrize(("kind", "plant"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_is_named_alone(kind, plant):
    for seed in SEEDS:
        shape = SHAPES[seed % len(SHAPES)]
        if kind == "bucket runs" and len(shape.shares) == 1:
            continue
        found = findings(plant(healthy(seed, shape), np.random.default_rng(seed)))
        assert {finding.kind for finding in found} == {kind}, f"seed {seed}"


@pytest.mark.parametrize("seed", range(4))
def test_the_events_of_a_real_run_are_found(seed):
    found = findings(diagnosis_logs.real_events(seed))
    jumps, falls, gaps = (
        [finding for finding in found if finding.kind == kind]
        for kind in ("loss jump", "accuracy fall", "step gap")
    )
    assert len(found) == len(jumps) + len(falls) + len(gaps)
    assert ["16.4x" in jumps[0].summary, "9.9x" in jumps[1].summary, len(jumps)] == [True, True, 2]
    assert "13.004 at step 2029" in jumps[0].summary
    assert "7.235 at step 4021" in jumps[1].summary
    for jump in jumps:
        assert verdicts(jump) == {
            "metrics reset": "refuted",
            "NaN": "refuted",
            "checkpoint": "refuted",
            "bucket change": "refuted",
            "learning rate": "refuted",
            "gradient": "refuted",
            "one odd batch": "supported",
        }
    (fall,) = falls
    assert (fall.first, fall.last) == (1304, 1309)
    assert "0.0886 at step 1304 -> 0.0084 at step 1309, lasting 2 logged steps" in fall.summary
    assert any("step 1306" in line and "0.0326" in line for line in fall.evidence)
    assert verdicts(fall)["one odd batch"] == "refuted"
    assert [(gap.first, gap.last) for gap in gaps] == [(2000, 2027), (4001, 4019)]
    assert [gap.summary for gap in gaps] == [
        "26 steps are absent, 2001 to 2026",
        "17 steps are absent, 4002 to 4018",
    ]
    assert any("167 s more" in line for line in gaps[0].evidence)
    assert any("112 s more" in line for line in gaps[1].evidence)
    assert [verdicts(gap)["checkpoint"] for gap in gaps] == ["supported"] * 2
    assert "multiples of 2000" in gaps[0].explanations[0].why


def test_a_jump_between_buckets_is_explained_and_one_beyond_them_is_not():
    lines = healthy(0, Shape(apart=2.0))
    log = as_log(lines, name="made")
    diagnosis = diagnose(log)
    loss, bucket = log.column("loss"), log.column("bucket")
    up = [row for row in range(30, len(loss)) if loss[row] > 2.5 * loss[row - 1]]
    assert up
    assert all(bucket[row] > bucket[row - 1] for row in up)
    assert any("usual for their bucket" in note for note in diagnosis.notes)
    row = next(row for row in up if row > 300)
    lines[row]["loss"] *= 3.0
    (jump,) = findings(lines)
    assert (jump.kind, jump.last) == ("loss jump", row + 1)
    assert verdicts(jump)["bucket change"] == "refuted"


@pytest.mark.parametrize("known", ["bucket", "seq_len", None])
def test_several_losses_are_put_down_to_buckets_where_those_are_known(known):
    lines = healthy(1, Shape(apart=1.9, spread=0.05))
    for line in lines:
        line["loss"] = 2.0 * 1.9 ** line["bucket"] * (line["loss"] / line["loss"] + 0.05 * np.sin(line["step"]))
        for name in {"bucket", "seq_len"} - {known}:
            del line[name]
    diagnosis = diagnose(as_log(lines, name="made"))
    if known is None:
        (finding,) = diagnosis.findings
        assert finding.kind == "several losses"
        assert "3 usual values" in finding.summary
        assert verdicts(finding)["bucket"] == "undecidable"
    else:
        assert diagnosis.findings == []
        assert any(f"{known} explains 99%" in note or f"{known} explains 100%" in note for note in diagnosis.notes)


def test_losses_of_one_bucket_that_differ_refute_the_bucket():
    (finding,) = findings(diagnosis_logs.modes(healthy(3), np.random.default_rng(0)))
    assert verdicts(finding)["bucket"] == "refuted"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"lr": 3e-3}, "learning rate"),
        ({"grad_norm": 90.0}, "gradient"),
        ({"acc": float("nan")}, "NaN"),
        ({"elapsed_s": 5.0}, "metrics reset"),
    ],
)
def test_what_changes_with_a_jump_supports_its_cause(change, cause):
    lines = healthy(5)
    lines[350].update(loss=30.0, **change)
    jump = next(finding for finding in findings(lines) if finding.kind == "loss jump")
    assert {name for name, verdict in verdicts(jump).items() if verdict == "supported"} == {cause, "one odd batch"}


def test_a_jump_right_after_a_save_supports_the_checkpoint():
    lines = healthy(5)
    lines[400]["loss"] = 30.0  # step 401; step 400 was saved
    (jump,) = findings(lines)
    assert verdicts(jump)["checkpoint"] == "supported"
    lines[400]["loss"], lines[450]["loss"] = lines[399]["loss"], 30.0
    (jump,) = findings(lines)
    (checkpoint,) = (e for e in jump.explanations if e.cause == "checkpoint")
    assert checkpoint.verdict == "refuted"
    assert "nearest save 51 steps away, at 400" in checkpoint.why


def test_a_jump_that_lasts_is_no_odd_batch():
    lines = healthy(5)
    for line in lines[350:]:
        line["loss"] *= 4.0
    (jump,) = findings(lines)
    assert verdicts(jump)["one odd batch"] == "refuted"
    assert (jump.first, jump.last) == (350, 600)


def test_a_fall_over_many_steps_has_its_length():
    lines = healthy(2)
    for row in range(300, 340):
        lines[row]["acc"] *= 0.5
    (fall,) = findings(lines)
    assert fall.first in range(297, 302)
    assert fall.last in range(338, 345)


def test_evaluations_beside_the_log_explain_pauses(tmp_path):
    lines = healthy(4)
    for at in (111, 307):
        for line in lines[at:]:
            line["elapsed_s"] += 60.0
    diagnosis_logs.save(lines, tmp_path / "train_log.jsonl")
    assert {(f.kind, f.first) for f in diagnose(read_log(tmp_path)).findings} == {
        ("time gap", 111),
        ("time gap", 307),
    }
    diagnosis_logs.save([{"step": 0}, {"step": 111}, {"step": 307}], tmp_path / "eval_log.jsonl")
    diagnosis = diagnose(read_log(tmp_path))
    assert diagnosis.findings == []
    assert any("pauses after steps 111, 307" in note for note in diagnosis.notes)


def test_a_save_that_blocks_is_found_where_evaluations_are_known(tmp_path):
    lines = healthy(4)
    for line in lines[400:]:
        line["elapsed_s"] += 112.0
    diagnosis_logs.save(lines, tmp_path / "train_log.jsonl")
    assert diagnose(read_log(tmp_path)).findings == []
    diagnosis_logs.save([{"step": 0}, {"step": 300}], tmp_path / "eval_log.jsonl")
    (pause,) = diagnose(read_log(tmp_path)).findings
    assert (pause.kind, pause.first, pause.last) == ("time gap", 400, 401)
    assert verdicts(pause) == {"checkpoint": "supported", "restart": "refuted", "waiting for data": "refuted"}


def test_a_drift_within_each_pass_is_found():
    lines = healthy(6)
    for row, line in enumerate(lines):
        line["feature_queue"] += (row % 200) // 5
    (drift,) = findings(lines)
    assert "feature_queue grows over pass 1" in drift.summary


def test_even_queues_of_workers_are_no_finding():
    lines = healthy(6)
    for line in lines:
        line["feature_queue"] = [11, 12, 12, 12, 12, 12]
    assert findings(lines) == []


def test_skipped_steps_name_their_batches():
    lines = healthy(7)
    for row in (200, 300):
        lines[row].update(skipped=1, loss="nan", grad_norm="inf", records="the same")
    found = {finding.kind: finding for finding in findings(lines)}
    assert set(found) == {"not finite", "skipped steps"}
    skipped = found["skipped steps"]
    assert "2 of 600 steps were skipped: 201, 301" in skipped.summary
    assert any("records the same" in line for line in skipped.evidence)
    assert verdicts(skipped) == {"NaN": "supported", "gradient": "undecidable", "same records": "supported"}
    assert verdicts(found["not finite"])["update left out"] == "supported"


def test_a_decaying_rate_is_no_plateau_and_a_constant_one_is_no_fault():
    lines = healthy(8, HEALTHY["constant"])
    assert findings(lines) == []
    level = lines[420]["loss"]
    for line in lines[421:]:  # a cosine's end: the rate is below a fifth and nothing moves any more
        line.update(lr=1e-5, loss=level * (1 + 0.02 * np.sin(line["step"])))
    assert findings(lines) == []


def test_a_log_with_steps_and_losses_alone_can_be_read():
    lines = [{"step": line["step"], "loss": line["loss"]} for line in healthy(0, HEALTHY["packed"])]
    diagnosis = diagnose(as_log(lines, name="made"))
    assert diagnosis.findings == []
    assert len(diagnosis.unknown) >= 6


def test_two_runs_are_compared_at_equal_tokens():
    first, second = healthy(0), healthy(1)
    for line in second:  # half as many tokens a step, at the same speed in steps; a third lower loss
        line["tokens"] //= 2
        line["loss"] /= 1.5
    logs = as_log(first, name="a"), as_log(second, name="b")
    compared = compare(*logs)
    assert compared.tokens[-1] == pytest.approx(logs[1].column("tokens").sum())
    assert len(compared.tokens) == 6
    assert "loss is better in the second run" in compared.verdict[0]
    assert "the first run is faster" in compared.verdict[-1]
    for place, tokens in enumerate(compared.tokens):
        seen = np.cumsum(logs[0].column("tokens"))
        near = logs[0].column("loss")[: np.searchsorted(seen, tokens, side="right")][-30:]
        assert compared.levels["loss"][place][0].mean == pytest.approx(near.mean())


def test_a_running_total_of_tokens_is_taken_as_such():
    single, running = healthy(0), healthy(0)
    total = 0
    for line in running:
        total += line["tokens"]
        line["tokens"] = total
    compared = compare(as_log(single, name="a"), as_log(running, name="b"))
    assert compared.tokens[-1] == pytest.approx(total)
    assert all(first.mean == second.mean for first, second in compared.levels["loss"])
    assert "does not differ" in compared.verdict[0]
    assert "as fast" in compared.verdict[-1]


def test_schedules_that_differ_are_named_beside_a_comparison():
    short = healthy(0, Shape(steps=300))
    compared = compare(as_log(healthy(0), name="a"), as_log(short, name="b"))
    (line,) = [line for line in compared.verdict if "learning rate" in line]
    assert line.endswith("the schedules explain a part of it")


def test_runs_without_tokens_cannot_be_compared():
    log = as_log([{"step": 1, "loss": 1.0}], name="bare")
    with pytest.raises(UserError, match="bare: no tokens"):
        compare(log, log)


def test_medians_are_those_of_each_window():
    values = np.random.default_rng(0).standard_normal(57)
    centred = [np.median(values[max(at - 3, 0) : at + 4]) for at in range(57)]
    np.testing.assert_allclose(rolling_median(values, 7), centred)
    before = [np.median(values[max(at - 6, 0) : at]) for at in range(1, 57)]
    np.testing.assert_allclose(past_median(values, 6), [np.nan, *before])
    means = [values[at - 4 : at + 1].mean() for at in range(4, 57)]
    np.testing.assert_allclose(past_means(values, 5), [*[np.nan] * 4, *means])


def test_scatter_is_that_of_the_usual_values():
    values = np.random.default_rng(0).normal(5.0, 2.0, 20_000)
    values[::50] = 1e6
    assert scatter(values) == pytest.approx(2.0, rel=0.05)
    values[::50] = np.nan
    assert step_scatter(values + np.linspace(0, 300, 20_000)) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    ("steps", "slack", "interval"),
    [
        ([2000, 4001], 2, 2000),
        ([150, 300, 450], 0, 150),
        ([1000], 1, 1000),
        ([317], 0, None),
        ([7, 500], 1, None),
        ([], 1, None),
    ],
)
def test_an_interval_is_seen_only_where_it_is_no_chance(steps, slack, interval):
    assert shared_interval(steps, slack=slack) == interval


def test_modes_are_counted_and_parted():
    rng = np.random.default_rng(0)
    centres = np.array([0.0, 1.0, 3.0])[rng.choice(3, 900, p=(0.6, 0.2, 0.2))]
    first, second = borders(centres + 0.1 * rng.standard_normal(900))
    assert 0.25 < first < 0.75
    assert 1.3 < second < 2.7
    assert len(borders(rng.standard_normal(900))) == 0
    assert len(borders(np.repeat([0.0, 1.0], 450) + 0.1 * rng.standard_normal(900))) == 0  # a change, not modes
    assert len(borders(np.zeros(900))) == 0


def test_a_trend_is_taken_away_and_its_outliers_stay():
    steps = np.arange(1, 401)
    values = 3.0 - 0.4 * np.log(steps + 50.0)
    values[200] += 5.0
    away = away_from_trend(steps, values)
    assert away[200] == pytest.approx(5.0, abs=0.05)
    assert np.abs(np.delete(away, 200)).max() < 0.05
