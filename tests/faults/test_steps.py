"""Numbers that are not finite, wherever they come from, spoil nothing; and a reader that fails loses nothing."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_files import lines, repeatable, saved_arrays

from dflash_jax import train
from dflash_jax.batches.loader import LoadRows
from dflash_jax.errors import UserError
from dflash_jax.training import checkpoint_files, programs
from dflash_jax.training.features import FeatureSource
from dflash_jax.training.guard import read_batches
from dflash_jax.training.state import RECENT

SHORT = ["train.steps=14", "eval.every=0", "checkpoint.every=4", "guard.max_bad_steps=3"]
pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def whole(recipe) -> pathlib.Path:
    """A run that nothing happens to."""
    assert train.main(recipe.arguments("whole", *SHORT)) == 0
    return recipe.root / "whole"


def same_end(run: pathlib.Path, whole: pathlib.Path) -> None:
    """Both runs have the same log and the same last state, bit for bit."""
    assert repeatable(run) == repeatable(whole)
    for found, expected in zip(saved_arrays(run, 14), saved_arrays(whole, 14), strict=True):
        np.testing.assert_array_equal(found, expected)


def spoiled(tree):
    return jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.nan), tree)


def test_features_that_are_not_finite_cost_their_step_alone(recipe, whole, monkeypatch, capfd):
    featured, calls = FeatureSource.__call__, []

    def spoil_the_sixth(self, batch):
        calls.append(batch)
        found = featured(self, batch)
        return dataclasses.replace(found, states=spoiled(found.states)) if len(calls) == 6 else found

    monkeypatch.setattr(FeatureSource, "__call__", spoil_the_sixth)
    assert train.main(recipe.arguments("features", *SHORT)) == 0
    run = recipe.root / "features"
    assert [line["skipped"] for line in lines(run)] == [0] * 5 + [1] + [0] * 8
    bad, before = lines(run)[5], lines(whole)[5]
    assert (bad["loss"], bad["grad_norm"]) == ("nan", "nan")
    assert (bad["records"], bad["bucket"]) == (before["records"], before["bucket"])
    ids = [record for record in bad["record_ids"] if record >= 0]
    assert len(ids) == bad["sequences"]
    assert all(isinstance(line["loss"], float) for line in lines(run)[6:])
    assert lines(run)[:5] != lines(run)[6:]
    warning = next(line for line in capfd.readouterr().err.splitlines() if "step 6 was skipped" in line)
    assert (
        f"loss is nan, grad_norm is nan, update_ratio is nan; bucket {bad['bucket']}, records {ids[0]}, "
        in warning
    )
    (kept,) = read_batches(run / "bad_steps" / "step-6.npz")
    for name in ("tokens", "loss_mask", "record_ids"):
        np.testing.assert_array_equal(getattr(kept, name), getattr(calls[5], name))
    # Only of the steps that were not taken there is no norm.
    unknown = sum(np.isnan(leaf).sum() for leaf in saved_arrays(run, 14))
    assert unknown == RECENT - 13


def test_a_parameter_that_is_not_finite_ends_the_run_and_is_not_saved(recipe, whole, monkeypatch):
    make = programs.make_programs

    def spoil_after_five(*arguments, **options):
        made, steps = make(*arguments, **options), []

        def step(state, group, frozen):
            steps.append(state)
            if len(steps) == 6:
                state = dataclasses.replace(state, params=spoiled(state.params))
            return made.step(state, group, frozen)

        return dataclasses.replace(made, step=step)

    monkeypatch.setattr(train, "make_programs", spoil_after_five)
    with pytest.raises(UserError, match=r"guard.max_bad_steps: 3 steps in a row .* tools/replay.py .*parameter"):
        train.main(recipe.arguments("parameter", *SHORT))
    run = recipe.root / "parameter"
    assert [line["skipped"] for line in lines(run)] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert {line["param_norm"] for line in lines(run)[5:]} == {"nan"}
    assert checkpoint_files.saved(run / "checkpoints") == [4]  # though one was due at step 8
    monkeypatch.undo()
    assert train.main(recipe.arguments("parameter", *SHORT)) == 0
    same_end(run, whole)


def test_a_record_that_is_not_finite_costs_its_batch_in_every_pass(recipe, monkeypatch):
    featured, holds = FeatureSource.__call__, []

    def spoil_record_seven(self, batch):
        holds.append(int(7 in batch.record_ids))
        found = featured(self, batch)
        return dataclasses.replace(found, states=spoiled(found.states)) if holds[-1] else found

    monkeypatch.setattr(FeatureSource, "__call__", spoil_record_seven)
    assert train.main(recipe.arguments("record", *SHORT)) == 0
    found = lines(recipe.root / "record")
    assert sum(holds[:14]) >= 2
    assert [line["skipped"] for line in found] == holds[:14]
    assert all(7 in line["record_ids"] for line in found if line["skipped"])


def test_a_reader_that_fails_leaves_the_last_step_saved(recipe, whole, monkeypatch):
    read, calls = LoadRows.map, []

    def failing(self, element):
        calls.append(element)
        if len(calls) > 9:
            raise OSError(5, "Input/output error", "records-0001")
        return read(self, element)

    monkeypatch.setattr(LoadRows, "map", failing)
    said = (
        r"data: batch 9 of the plan \(bucket \d, records \d+.*\) could not be read: OSError: .*Input/output error"
    )
    with pytest.raises(UserError, match=said):
        train.main(recipe.arguments("reader", *SHORT))
    run = recipe.root / "reader"
    (*_, last) = checkpoint_files.saved(run / "checkpoints")
    assert [line["step"] for line in lines(run)] == list(range(1, last + 1))
    assert last >= 6
    monkeypatch.undo()
    assert train.main(recipe.arguments("reader", *SHORT)) == 0
    same_end(run, whole)


HANGS = """
import sys, time
from dflash_jax import train
from dflash_jax.arguments import run_entry_point
from dflash_jax.batches.loader import LoadRows

read, calls = LoadRows.map, []

def hanging(self, element):
    calls.append(element)
    if len(calls) > 9:
        time.sleep(10_000)
    return read(self, element)

LoadRows.map = hanging
run_entry_point(train.main, usage="", schema=train.Recipe)
"""


def test_a_reader_that_hangs_is_told_and_the_process_ends(recipe, whole, compiled_once):
    command = [sys.executable, "-c", HANGS, *recipe.arguments("hangs", *SHORT, "pipeline.stuck_s=2")]
    done = subprocess.run(
        command, env={**os.environ, **compiled_once}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert "no batch came for 2 s (pipeline.stuck_s)" in done.stderr.splitlines()[-1]
    assert train.main(recipe.arguments("hangs", *SHORT)) == 0
    same_end(recipe.root / "hangs", whole)
