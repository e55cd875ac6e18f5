"""Evaluation while training: trees on held-out data, real decoding of its prompts, and the best checkpoint."""

import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from flax import nnx
from run_files import lines, repeatable, saved_arrays
from tiny_models import NO_RULES, one_device

from dflash_jax import train
from dflash_jax.data.records import Records
from dflash_jax.decode.chain import generate_chain
from dflash_jax.decode.generate import generate
from dflash_jax.errors import UserError
from dflash_jax.experiment import Experiment
from dflash_jax.sharding import replicated
from dflash_jax.training import checkpoint_files
from dflash_jax.training.checkpoint import restore_params
from dflash_jax.training.checkpoint_files import chosen_step
from dflash_jax.training.heldout import HeldOut

SHORT = ["data.buckets=[192]", "drafter.layers=1", "optim.lr=1e-2", "checkpoint.every=5", "checkpoint.keep=2"]
EVALUATED = ["eval.every=3", "eval.budgets=[4,16]"]
PROMPTS, TOKENS = 5, 12
DECODED = ["eval.decode_every=4", f"eval.decode_prompts={PROMPTS}", f"eval.decode_tokens={TOKENS}"]
pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def plain(recipe) -> pathlib.Path:
    """A run with the usual evaluation only."""
    return trained(recipe, "plain", "eval.every=3")


@pytest.fixture(scope="module")
def whole(recipe) -> pathlib.Path:
    """The same with trees and decoding."""
    return trained(recipe, "whole", *EVALUATED, *DECODED)


def trained(recipe: tiny_runs.TinyRecipe, name: str, *more: str, steps: int = 8) -> pathlib.Path:
    assert train.main(recipe.arguments(name, *SHORT, f"train.steps={steps}", *more)) == 0
    return recipe.root / name


def test_each_evaluation_is_logged_at_its_steps_and_at_the_first_and_the_last(whole):
    found = lines(whole, "eval_log.jsonl")
    assert [line["step"] for line in found] == [0, 3, 4, 6, 8]
    assert [line["step"] for line in found if "accept_len" in line] == [0, 3, 6, 8]
    assert [line["step"] for line in found if "decode_accept_len" in line] == [0, 4, 8]


def test_trees_are_measured_on_the_blocks_of_the_evaluation(whole, plain):
    for line, known in zip(evaluations(whole), evaluations(plain), strict=True):
        assert line["accept_len"] <= line["tree4_accept_len"] <= line["tree16_accept_len"] <= 4
        assert line["tree16_accept_len"] > line["accept_len"]
        # No tree of four nodes with four choices of a slot finds what is not among the first four.
        assert line["tree4_accept_len"] <= 1 + line["ddtree_streak4"] + 1e-6
        assert {name: value for name, value in line.items() if "tree" not in name or name in known} == known
        assert {f"tree{budget}_walk_tau" for budget in (4, 16)} <= line.keys()


def evaluations(run: pathlib.Path) -> list[dict]:
    """The lines of eval_log.jsonl that are teacher-forced, without what was decoded."""
    found = [line for line in lines(run, "eval_log.jsonl") if "accept_len" in line]
    return [{key: value for key, value in line.items() if not key.startswith("decode")} for line in found]


def test_decoding_while_training_changes_nothing_else(whole, plain):
    assert repeatable(whole) == repeatable(plain)
    for step in checkpoint_files.saved(plain / "checkpoints"):
        for found, expected in zip(saved_arrays(whole, step), saved_arrays(plain, step), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_decoding_is_that_of_the_saved_drafter_over_the_first_held_out_prompts(recipe, whole):
    """Chain decoding of each prompt by itself, from what stands in the files of the run."""
    loaded, _ = train.read_arguments(recipe.arguments("whole", *SHORT))
    experiment, mesh = Experiment.open(loaded), one_device()
    target = experiment.load_target(mesh, NO_RULES)
    graph, shapes = nnx.split(nnx.eval_shape(experiment.initial_drafter))
    place = replicated(mesh)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)
    drafter = nnx.merge(graph, restore_params(whole / "checkpoints", 8, abstract))
    records = Records.open(whole / "data" / "heldout")
    rows, lengths = np.zeros((PROMPTS, 64), np.int32), np.zeros(PROMPTS, np.int32)
    for row in range(PROMPTS):
        lengths[row] = np.argmax(records[row].loss_mask)
        rows[row, : lengths[row]] = records[row].tokens[: lengths[row]]
    prompts = (jnp.asarray(rows), jnp.asarray(lengths))
    options = {"stop": experiment.stop_tokens, "max_new_tokens": TOKENS}
    chain = jax.jit(functools.partial(generate_chain, taps=experiment.taps, **options))
    found = chain(target, drafter, experiment.frozen(target, mesh, None), *prompts)
    emitted = np.asarray(found.emitted)
    line = lines(whole, "eval_log.jsonl")[-1]
    assert line["decode_accept_len"] == pytest.approx(emitted.sum() / (emitted > 0).sum())
    by_request = emitted.sum(axis=1) / (emitted > 0).sum(axis=1)
    assert line["decode_accept_len_by_request"] == pytest.approx(by_request.mean())
    said = jax.jit(functools.partial(generate, **options))(target, *prompts)
    assert jnp.array_equal(said.lengths, found.rows.lengths)
    for line in lines(whole, "eval_log.jsonl"):
        if "decode_lossless" in line:
            assert line["decode_lossless"] == 1
            assert line["decode_tokens_s"] > 0
            assert line["decode_ratio"] > 0


def test_decoding_needs_no_other_evaluation_and_works_with_all_features_on_disk(recipe):
    hybrid = ["data.features=hybrid", f"data.features_dir={recipe.root / 'features'}"]
    run = trained(recipe, "filling", *hybrid, *DECODED, "eval.every=0")
    again = trained(recipe, "filled", *hybrid, *DECODED, "eval.every=0")
    assert all(line["recalled"] == 1 for line in lines(again))
    assert [line["step"] for line in lines(run, "eval_log.jsonl")] == [0, 4, 8]
    assert repeatable(again, "eval_log.jsonl") == repeatable(run, "eval_log.jsonl")
    with pytest.raises(UserError, match=r"step: found 'best', but no step in .* was evaluated"):
        chosen_step(run / "checkpoints", "best", key="step")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("data.features=cached", r"eval.decode_every: found 4, but with data.features=cached the target is not"),
        ("data.heldout=null", r"eval.decode_every: found 4, but there are no prompts to decode: data.heldout is"),
    ],
)
def test_decoding_without_target_or_prompts_is_refused_before_anything_is_done(recipe, more, named):
    with pytest.raises(UserError, match=named):
        train.main(recipe.arguments("refused", *SHORT, *DECODED, more))
    assert not (recipe.root / "refused").exists()


# The best checkpoint.


@pytest.fixture
def accept_lengths(monkeypatch) -> dict[int, float]:
    """What evaluations find, by how many there were before in this run."""
    given: dict[int, float] = {}
    measure = HeldOut.measure

    def told(self, params):
        self.before = getattr(self, "before", -1) + 1
        return measure(self, params) | {"accept_len": jnp.float32(given[self.before])}

    monkeypatch.setattr(HeldOut, "measure", told)
    return given


def test_an_evaluation_better_than_all_before_is_saved_and_stays(recipe, accept_lengths):
    every = "eval.every=2"
    # At steps 0, 2, 4, 6, 8: what is untrained is not saved, whatever it is worth.
    accept_lengths.update(enumerate([9.0, 1.5, 2.5, 2.0, 2.25]))
    run = trained(recipe, "best", every)
    assert checkpoint_files.saved(run / "checkpoints") == [4, 5, 8]
    assert checkpoint_files.accept_lengths(run / "checkpoints") == {4: 2.5, 8: 2.25}
    assert chosen_step(run / "checkpoints", "best", key="step") == 4
    # From step 5 on, with steps 6 and 8 again: the best is still that of before.
    shutil.copytree(run, recipe.root / "worse")
    accept_lengths.update(enumerate([2.25, 2.375]))
    trained(recipe, "worse", every, "resume=5")
    assert checkpoint_files.saved(recipe.root / "worse" / "checkpoints") == [4, 5, 8]
    shutil.copytree(run, recipe.root / "better")
    accept_lengths.update(enumerate([2.75, 2.0]))
    trained(recipe, "better", every, "resume=5")
    assert checkpoint_files.saved(recipe.root / "better" / "checkpoints") == [6, 8]
    # And from the best itself; only what it sets aside was better.
    accept_lengths.update(enumerate([2.0, 2.5]))
    trained(recipe, "better", every, "resume=best", steps=9)
    assert checkpoint_files.saved(recipe.root / "better" / "checkpoints") == [6, 9]


@pytest.mark.slow
def test_what_was_set_aside_is_not_compared_with(recipe, accept_lengths):
    accept_lengths.update(enumerate([1.0, 1.0, 1.5, 3.0]))
    run = trained(recipe, "aside", "eval.every=3")  # at steps 0, 3, 6, 8
    assert checkpoint_files.saved(run / "checkpoints") == [6, 8]
    accept_lengths.update(enumerate([2.0, 1.25]))
    trained(recipe, "aside", "eval.every=3", "resume=6", steps=10)
    assert checkpoint_files.accept_lengths(run / "checkpoints") == {9: 2.0, 10: 1.25}


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_evaluations_and_the_same_checkpoints(recipe, whole, compiled_once):
    run = recipe.root / "killed"
    command = [sys.executable, "-m", "dflash_jax.train"]
    command += recipe.arguments("killed", *SHORT, "train.steps=8", *EVALUATED, *DECODED)
    environment = os.environ | compiled_once
    start = functools.partial(
        subprocess.Popen, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    process = start()
    deadline, log = time.monotonic() + 240, run / "train_log.jsonl"
    while not log.exists() or log.read_text().count("\n") < 6:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)  # at the evaluation of step 6, or right after it
    process.communicate()
    assert checkpoint_files.saved(run / "checkpoints")
    resumed = start()
    output, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, output
    assert "continuing" in output
    assert repeatable(run) == repeatable(whole)
    assert repeatable(run, "eval_log.jsonl") == repeatable(whole, "eval_log.jsonl")
    steps = checkpoint_files.saved(whole / "checkpoints")
    assert checkpoint_files.saved(run / "checkpoints") == steps
    lengths = checkpoint_files.accept_lengths(whole / "checkpoints")
    assert checkpoint_files.accept_lengths(run / "checkpoints") == lengths
    for step in steps:
        for found, expected in zip(saved_arrays(run, step), saved_arrays(whole, step), strict=True):
            np.testing.assert_array_equal(found, expected)
