"""Whole trainings on a tiny target: what they write, where their arrays live, and that a kill changes nothing."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from run_files import lines, repeatable, saved_arrays

from dflash_jax import evaluate, train
from dflash_jax.arguments import build, find_named, read_yaml
from dflash_jax.batches.loader import batches
from dflash_jax.config import MeshLayout
from dflash_jax.dataset import open_records, training_data
from dflash_jax.errors import UserError
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import make_meshes
from dflash_jax.training import checkpoint_files
from dflash_jax.training.features import FeatureCache, FeatureSource
from dflash_jax.training.optim import learning_rate, make_optimizer
from dflash_jax.training.programs import make_programs

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def finished(recipe) -> pathlib.Path:
    """A run of twenty steps, never interrupted."""
    assert train.main(recipe.arguments("whole")) == 0
    return recipe.root / "whole"


def start(arguments: list[str], compiled: dict[str, str]) -> subprocess.Popen:
    command, environment = [sys.executable, "-m", "dflash_jax.train", *arguments], {**os.environ, **compiled}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(process: subprocess.Popen, run: pathlib.Path, step: int) -> None:
    deadline = time.monotonic() + 240
    log = run / "train_log.jsonl"
    while not log.exists() or log.read_text().count("\n") < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_run_directory_holds_what_the_readme_says(finished):
    assert [line["step"] for line in lines(finished)] == list(range(1, 21))
    assert [line["step"] for line in lines(finished, "eval_log.jsonl")] == [0, 10, 20]
    assert checkpoint_files.saved(finished / "checkpoints") == [15, 20]
    assert (finished / "recipe.yaml").is_file()
    assert list((finished / "tensorboard").glob("events*"))
    first, last = lines(finished)[0], lines(finished)[-1]
    assert last["loss"] < first["loss"]
    assert first["lr"] == 0.0
    assert last["accept_len"] == pytest.approx(1 + last["streak"])
    assert last["epoch"] == pytest.approx(20 / train_batches(finished))


def train_batches(run: pathlib.Path) -> int:
    """Batches of one pass, counted from the log: the epoch rises by their inverse."""
    return round(1 / (lines(run)[1]["epoch"] - lines(run)[0]["epoch"]))


def test_killed_run_resumes_bit_equal(recipe, finished, compiled_once):
    arguments = recipe.arguments("killed")
    run = recipe.root / "killed"
    process = start(arguments, compiled_once)
    wait_for_step(process, run, 12)  # past the save at 10, in the middle of a pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # The save of step 10 is asynchronous and may or may not have been whole; either way the run goes on from one.
    assert checkpoint_files.saved(run / "checkpoints") in ([5], [5, 10], [10])
    resumed = start(arguments, compiled_once)
    output, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, output
    assert "continuing" in output
    assert repeatable(run) == repeatable(finished)
    assert lines(run, "eval_log.jsonl") == lines(finished, "eval_log.jsonl")
    for found, expected in zip(saved_arrays(run, 20), saved_arrays(finished, 20), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_saves_and_says_how_to_go_on(recipe, number, compiled_once):
    run = recipe.root / f"stopped-{number.name}"
    process = start(recipe.arguments(run.name, "train.steps=5000", "checkpoint.every=5000"), compiled_once)
    wait_for_step(process, run, 3)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert f"stopped by {number.name}" in output
    assert "the same command continues" in output
    (step,) = checkpoint_files.saved(run / "checkpoints")
    assert [line["step"] for line in lines(run)] == list(range(1, step + 1))


def test_finished_run_has_nothing_to_do(recipe, finished, capsys):
    before = (finished / "train_log.jsonl").read_bytes()
    assert train.main(recipe.arguments("whole")) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (finished / "train_log.jsonl").read_bytes() == before


def test_resume_from_an_older_step_sets_the_later_ones_aside(recipe, finished):
    run = recipe.root / "branch"
    shutil.copytree(finished, run)
    assert train.main(recipe.arguments("branch", "resume=15")) == 0
    assert checkpoint_files.saved(run / "checkpoints") == [15, 20]
    assert (run / "checkpoints.after-step-15" / "20").is_dir()
    assert repeatable(run) == repeatable(finished)
    aside = (run / "train_log.after-step-15.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in aside] == [16, 17, 18, 19, 20]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("drafter.block_size=5", "drafter.block_size"),
        ("drafter.taps=[0,1,3]", "drafter.taps"),
        ("data.buckets=[160,192]", "data.buckets"),
        ("train.seed=1", "train.seed"),
        ("target.dtype=bfloat16", "target.dtype"),
    ],
)
def test_resume_refuses_what_would_change_the_meaning_of_the_weights(recipe, finished, change, named):
    with pytest.raises(UserError, match=rf"resume: {named} is .* was trained with"):
        train.main(recipe.arguments("whole", "train.steps=30", change))


def test_never_resume_refuses_an_existing_run(recipe, finished):
    with pytest.raises(UserError, match=r"out: .* holds a run already"):
        train.main(recipe.arguments("whole", "resume=never"))


def test_every_array_lives_on_its_mesh(recipe):
    loaded, _ = train.read_arguments(recipe.arguments("places"))
    experiment = Experiment.open(loaded)
    layout = build(MeshLayout, [("cpu8", read_yaml(find_named("meshes", "cpu8", key="mesh")))])
    meshes = make_meshes(layout, "cpu8")
    six, seventh = set(jax.devices()[:6]), {jax.devices()[6]}
    target = experiment.load_target(meshes.target, meshes.target_rules)
    optimizer = make_optimizer(loaded.optim, learning_rate(loaded.optim, 20))
    programs = make_programs(experiment, meshes, optimizer)
    state = programs.first_state()
    frozen = experiment.frozen(target, meshes.drafter, None)
    records = open_records(experiment, loaded.data.train, recipe.root / "places" / "data")
    data = training_data(experiment, records, meshes=meshes)
    source = FeatureSource(target, taps=experiment.taps, teacher=True, meshes=meshes, cache=FeatureCache(0))
    batch, _ = next(batches(data.records, data.plan, start=0))
    item = source(batch)
    state, _ = programs.step(state, [item], frozen)

    def places(tree) -> set:
        return {frozenset(leaf.sharding.device_set) for leaf in jax.tree.leaves(tree)}

    assert places(target) == {frozenset(six)}
    assert places((state, frozen, item.states, item.batch)) == {frozenset(seventh)}


@pytest.fixture(scope="module")
def other_split(tmp_path_factory) -> pathlib.Path:
    """Four groups of devices where cpu8 has two."""
    by_model = dict.fromkeys(["heads", "kv_heads", "mlp", "vocab"], "model")
    layout = {
        "platform": "cpu",
        "device_count": 8,
        "target": {"devices": [0, 1, 2, 3, 4, 5], "axes": {"data": 3, "model": 2}, "rules": by_model},
        "drafter": {"devices": [6, 7], "axes": {"data": 2}},
    }
    file = tmp_path_factory.mktemp("mesh") / "split.yaml"
    file.write_text(json.dumps(layout))
    return file


def test_another_split_is_a_file_and_changes_nothing(recipe, finished, other_split):
    assert train.main(recipe.arguments("split", f"mesh={other_split}")) == 0
    for ours, theirs in zip(lines(recipe.root / "split"), lines(finished), strict=True):
        assert ours["records"] == theirs["records"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


def test_a_run_goes_on_with_another_mesh_and_learning_rate_on_the_same_batches(
    recipe, finished, other_split, capfd
):
    run = recipe.root / "moved"
    shutil.copytree(finished, run)
    changes = ["resume=15", f"mesh={other_split}", "optim.lr=1e-3"]
    assert train.main(recipe.arguments("moved", *changes)) == 0
    assert [line["records"] for line in lines(run)] == [line["records"] for line in lines(finished)]
    assert [line["lr"] for line in lines(run)[15:]] == pytest.approx(
        [line["lr"] / 3 for line in lines(finished)[15:]]
    )
    noted = {
        line["key"]: (line["step"], line["before"], line["now"]) for line in lines(run, "recipe_changes.jsonl")
    }
    assert noted.pop("out")[0] == 15
    assert noted == {"mesh": (15, "cpu8", str(other_split)), "optim.lr": (15, 3e-3, 1e-3)}
    assert "optim.lr is 0.001, was 0.003" in capfd.readouterr().err


def test_what_a_checkpoint_means_may_only_change_by_name(recipe, finished):
    run = recipe.root / "allowed"
    shutil.copytree(finished, run)
    other = ["train.seed=1", "train.steps=21"]
    with pytest.raises(
        UserError, match=r"resume: train.seed is 1 .* trained with 0; .* resume_allow=\[train.seed\]"
    ):
        train.main(recipe.arguments("allowed", *other, "resume_allow=[drafter.taps]"))
    with pytest.raises(UserError, match=r"resume_allow: found drafter.width, allowed: .*drafter.block_size, "):
        train.main(recipe.arguments("allowed", *other, "resume_allow=drafter.width"))
    assert train.main(recipe.arguments("allowed", *other, "resume_allow=[train.seed]")) == 0
    assert [line["step"] for line in lines(run)] == list(range(1, 22))


@pytest.mark.parametrize("head_sample", [pytest.param("null", marks=pytest.mark.slow), "260"])
def test_accumulated_batches_make_the_step_of_one_large_batch(recipe, head_sample):
    one_bucket = ["data.buckets=[192]", "train.steps=2", "eval.every=0", "optim.warmup=0"]
    one_bucket.append(f"objective.head_sample={head_sample}")
    large = recipe.arguments(f"large-{head_sample}", *one_bucket, f"data.tokens_per_batch={192 * 12}")
    small = recipe.arguments(
        f"small-{head_sample}", *one_bucket, f"data.tokens_per_batch={192 * 6}", "train.accumulate=2"
    )
    assert train.main(large) == 0
    assert train.main(small) == 0
    names = (f"{size}-{head_sample}" for size in ("small", "large"))
    for ours, theirs in zip(*(lines(recipe.root / name) for name in names), strict=True):
        assert ours["blocks"] == theirs["blocks"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_mixed_terms_with_noise_are_logged_and_do_not_depend_on_the_feature_cache(recipe):
    mixed = [
        "objective.terms={ce: 0.5, tv: 0.5}",
        "objective.slot_weights=dpace",
        "objective.noise_peak=0.25",
        "objective.noise_end=0.05",
        "objective.noise_warmup=0.2",
        "data.buckets=[192]",
        "train.steps=15",
        "eval.every=15",
    ]
    assert train.main(recipe.arguments("cached", *mixed)) == 0
    assert train.main(recipe.arguments("uncached", *mixed, "pipeline.feature_cache_gib=0")) == 0
    cached, uncached = recipe.root / "cached", recipe.root / "uncached"
    assert any(line["recalled"] for line in lines(cached))
    assert not any(line["recalled"] for line in lines(uncached))
    assert repeatable(cached) == repeatable(uncached)
    assert lines(cached, "eval_log.jsonl") == lines(uncached, "eval_log.jsonl")
    for line in (*lines(cached), *lines(cached, "eval_log.jsonl")):
        assert line["loss"] == pytest.approx(0.5 * line["loss_ce"] + 0.5 * line["loss_tv"], rel=1e-5)
        assert 0 < line["loss_tv"] < 1
        assert 1 < line["expected_accept_len"] < 4
        assert line["top4_acc"] <= line["top8_acc"] <= 1
        assert line["streak"] <= line["ddtree_streak4"] <= line["ddtree_streak8"]
    assert lines(cached)[-1]["loss"] < lines(cached)[0]["loss"]
    deviations = [line["noise_std"] for line in lines(cached)]
    assert deviations[:4] == pytest.approx([0, 0.25 / 3, 0.5 / 3, 0.25])
    assert deviations[-1] == pytest.approx(0.05)


def test_evaluation_is_without_noise(recipe, finished):
    loud = ["objective.noise_peak=25", "objective.noise_warmup=0", "train.steps=1", "eval.every=1"]
    assert train.main(recipe.arguments("loud", *loud)) == 0
    run = recipe.root / "loud"
    assert lines(run)[0]["noise_std"] == 25
    assert lines(run)[0]["records"] == lines(finished)[0]["records"]
    assert lines(run)[0]["loss"] != lines(finished)[0]["loss"]
    assert lines(run, "eval_log.jsonl")[0] == lines(finished, "eval_log.jsonl")[0]
    assert "noise_std" not in lines(run, "eval_log.jsonl")[0].keys() | lines(finished)[0].keys()


@pytest.mark.slow
def test_a_drafter_narrower_than_its_target_learns_and_decodes_without_changing_a_token(recipe):
    assert train.main(recipe.arguments("narrow", "drafter.width=24", "optim.lr=1e-2", "eval.every=0")) == 0
    run = recipe.root / "narrow"
    assert lines(run)[-1]["loss"] < 0.9 * lines(run)[0]["loss"]
    assert evaluate.main([f"run={run}", "max_new_tokens=24", "limit=1", "simulate=false"]) == 0
    *_, whole = json.loads((run / "report" / "evaluation.json").read_text())["sets"]
    assert whole["ways"][1]["identical"] == whole["prompts"] == 2


def test_evaluation_decodes_without_changing_a_token(recipe, finished, capsys):
    assert evaluate.main([f"run={finished}", "max_new_tokens=24", "limit=2"]) == 0
    sets = json.loads((finished / "report" / "evaluation.json").read_text())["sets"]
    assert [item["set"] for item in sets] == ["set-0", "set-1", "all"]
    assert sets[-1]["ways"][1]["identical"] == sets[-1]["prompts"] == 4
    assert (finished / "report" / "training.png").stat().st_size > 10_000
    assert "accept length" in capsys.readouterr().out


def test_moved_run_is_evaluated_where_it_is(recipe, finished, tmp_path):
    moved = tmp_path / "elsewhere"
    os.symlink(finished, moved)
    assert evaluate.main([f"run={moved}", "max_new_tokens=24", "limit=2", "step=15"]) == 0
    assert json.loads((moved / "report" / "evaluation.json").read_text())["drafters"][0]["step"] == 15


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["recipe=quickstrat"], "recipe"),
        (["recipe=quickstart", "optim.learning_rate=1"], "optim.learning_rate"),
        (["recipe=quickstart", "mesh=cpu9"], "mesh"),
        (["recipe=quickstart", "data.train=nowhere.jsonl"], "data.train"),
        (["recipe=quickstart", "target.path=/nowhere"], "target.path"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(arguments, named):
    command = [sys.executable, "-m", "dflash_jax.train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert named in line
