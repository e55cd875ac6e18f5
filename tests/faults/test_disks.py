"""Whole runs on disks that fill up, lose the run's folder or change what is on them."""

import pathlib
import resource
import shutil
import time

import numpy as np
import pytest
from run_files import lines, repeatable, saved_arrays

from dflash_jax import train
from dflash_jax.errors import UserError
from dflash_jax.training import checkpoint_files
from dflash_jax.training.trace import Trace

SHORT = ["train.steps=16", "eval.every=0", "checkpoint.every=3", "checkpoint.max_failures=4"]
pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    # Orbax leaves tasks of a save that was refused to themselves; Python says so when it collects them.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def whole(recipe) -> pathlib.Path:
    """A run that nothing happens to."""
    assert train.main(recipe.arguments("whole", *SHORT)) == 0
    return recipe.root / "whole"


def wait_for(path: pathlib.Path) -> None:
    while not path.exists():
        time.sleep(0.01)


@pytest.fixture
def before_step(monkeypatch):
    """What is to happen before which step."""
    happens = {}
    monkeypatch.setattr(Trace, "before", lambda self, step: happens.get(step, lambda: None)())
    return happens


@pytest.fixture
def disk():
    """Sets how large a file of this process can become, once `after` is there; a full disk refuses alike."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size, *, after=pathlib.Path("/")):
        wait_for(after)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_for_a_while_costs_nothing_but_its_checkpoints(
    recipe, whole, before_step, disk, capfd
):
    """The log is larger than the disk takes from step 5 to 9 too, and has no gap in the end."""
    run = recipe.root / "full"
    before_step |= {5: lambda: disk(2000, after=run / "checkpoints" / "3"), 10: lambda: disk(None)}
    assert train.main(recipe.arguments("full", *SHORT)) == 0
    said = capfd.readouterr().err
    assert [line["step"] for line in lines(run)] == list(range(1, 17))
    assert repeatable(run) == repeatable(whole)
    assert "warning: checkpoint 6 could not be saved in" in said
    assert "the last whole checkpoint is that of step 3" in said
    assert "train_log.jsonl takes no more lines" in said
    assert "train_log.jsonl takes lines again; none is missing" in said
    assert "Traceback" not in said
    assert checkpoint_files.saved(run / "checkpoints") == [15, 16]
    for found, expected in zip(saved_arrays(run, 16), saved_arrays(whole, 16), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_and_what_was_saved_is_left(recipe, whole, before_step, disk):
    run = recipe.root / "stays-full"
    before_step |= {5: lambda: disk(2000, after=run / "checkpoints" / "3")}
    with pytest.raises(UserError, match=r"checkpoint.max_failures: 4 saves in a row .* that of step 3\. "):
        train.main(recipe.arguments("stays-full", *SHORT))
    disk(None)
    assert checkpoint_files.saved(run / "checkpoints") == [3]
    before_step.clear()
    assert train.main(recipe.arguments("stays-full", *SHORT)) == 0
    assert repeatable(run) == repeatable(whole)


def test_a_folder_that_vanishes_is_made_again(recipe, whole, before_step, capfd):
    run = recipe.root / "vanishes"
    before_step |= {8: lambda: (wait_for(run / "checkpoints" / "6"), shutil.rmtree(run))}
    assert train.main(recipe.arguments("vanishes", *SHORT)) == 0
    assert checkpoint_files.saved(run / "checkpoints") == [15, 16]
    assert checkpoint_files.newest_whole(run / "checkpoints", pytest.fail) == 16
    assert [line["step"] for line in lines(run)] == list(range(7, 17))
    assert list((run / "tensorboard").iterdir())
    assert "Traceback" not in capfd.readouterr().err
    for found, expected in zip(saved_arrays(run, 16), saved_arrays(whole, 16), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_used(recipe, whole, capfd):
    run = recipe.root / "damaged"
    shutil.copytree(whole, run)
    largest = max((run / "checkpoints" / "16").rglob("*"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 3] ^= 4
    largest.write_bytes(content)
    assert train.main(recipe.arguments("damaged", *SHORT)) == 0
    said = capfd.readouterr().err
    assert (
        f"warning: checkpoint 16 is damaged (state/{largest.relative_to(run / 'checkpoints' / '16' / 'state')} has"
        in said
    )
    assert f"continuing {run} from step 15" in said
    assert (run / "checkpoints.damaged" / "16").is_dir()
    assert repeatable(run) == repeatable(whole)
    for found, expected in zip(saved_arrays(run, 16), saved_arrays(whole, 16), strict=True):
        np.testing.assert_array_equal(found, expected)
