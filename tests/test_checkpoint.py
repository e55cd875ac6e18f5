"""Which checkpoints stay on disk, which of them is the best, and that a broken save takes none away."""

import contextlib
import json
import pathlib
import resource
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.errors import UserError
from dflash_jax.training import checkpoint_files
from dflash_jax.training.checkpoint import Checkpoints
from dflash_jax.training.checkpoint_files import chosen_step
from dflash_jax.training.state import TrainState

# Orbax leaves tasks of a save that was refused to themselves; Python says so when it collects them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

DIES_WHILE_SAVING = """
import os, pathlib, sys
import jax.numpy as jnp
from dflash_jax.training.checkpoint import Checkpoints
from dflash_jax.training.state import TrainState

folder = pathlib.Path(sys.argv[1])
with Checkpoints(folder, keep=1, warn=print) as checkpoints:
    state = TrainState(jnp.int32(1), {"w": jnp.arange(4.0)}, (), jnp.zeros(2))
    checkpoints.save(1, state, cursor=1, fingerprint={}, accept_len=1.5)
checkpoints = Checkpoints(folder, keep=1, warn=print)
checkpoints.save(2, state, cursor=2, fingerprint={}, accept_len=2.5)
os._exit(9)
"""


def state_of(step: int) -> TrainState:
    return TrainState(jnp.int32(step), {"w": jnp.full(4, float(step))}, (), jnp.zeros(2))


def save(folder: pathlib.Path, lengths: dict[int, float | None], *, keep: int) -> None:
    """One save for each step, with its held-out accept length if it was evaluated."""
    with Checkpoints(folder, keep=keep, warn=pytest.fail) as checkpoints:
        for step, length in lengths.items():
            checkpoints.save(step, state_of(step), cursor=step, fingerprint={"seed": 0}, accept_len=length)


@pytest.mark.parametrize(
    ("keep", "lengths", "kept", "best"),
    [
        (2, {1: None, 2: 1.5, 3: None, 4: 2.5, 5: 2.0, 6: None, 7: None}, [4, 6, 7], 4),
        (2, {2: 1.5, 4: 2.5, 6: 3.5, 7: None}, [6, 7], 6),
        (1, {2: 1.5, 4: 1.25, 6: 1.125}, [2, 6], 2),
        (1, {2: 1.5, 4: 1.5, 5: None}, [4, 5], 4),  # of equals the later one
    ],
)
def test_the_best_is_kept_besides_the_latest(tmp_path, keep, lengths, kept, best):
    save(tmp_path / "checkpoints", lengths, keep=keep)
    assert checkpoint_files.saved(tmp_path / "checkpoints") == kept
    evaluated = {step: lengths[step] for step in kept if lengths[step] is not None}
    assert checkpoint_files.accept_lengths(tmp_path / "checkpoints") == evaluated
    assert chosen_step(tmp_path / "checkpoints", "best", key="step") == best
    assert chosen_step(tmp_path / "checkpoints", "latest", key="step") == kept[-1]


def test_a_best_is_longer_than_all_that_are_saved_also_after_a_restart(tmp_path):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, keep=3, warn=pytest.fail) as checkpoints:
        assert checkpoints.is_best(1.0)
    save(folder, {1: 2.0, 2: None, 3: 1.5}, keep=3)
    with Checkpoints(folder, keep=3, warn=pytest.fail) as checkpoints:
        assert not checkpoints.is_best(2.0)
        assert checkpoints.is_best(2.25)
        checkpoints.save(4, state_of(4), cursor=4, fingerprint={}, accept_len=2.25)
        assert not checkpoints.is_best(2.25)
    assert checkpoint_files.saved(folder) == [2, 3, 4]


def test_steps_set_aside_are_not_compared_with(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, {1: 1.5, 2: None, 3: 9.0, 4: None}, keep=4)
    checkpoint_files.set_aside(folder, after=2)
    assert checkpoint_files.accept_lengths(folder) == {1: 1.5}
    with Checkpoints(folder, keep=4, warn=pytest.fail) as checkpoints:
        assert checkpoints.is_best(1.75)
    save(folder, {3: 1.75, 4: None}, keep=1)
    assert checkpoint_files.saved(folder) == [3, 4]
    assert chosen_step(folder, "best", key="step") == 3


def test_a_restored_best_step_is_what_was_saved(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, {1: 2.0, 2: None, 3: 1.0}, keep=1)
    with Checkpoints(folder, keep=1, warn=pytest.fail) as checkpoints:
        state, cursor = checkpoints.restore(1, state_of(0))
    assert (int(state.step), cursor) == (1, 1)
    np.testing.assert_array_equal(state.params["w"], np.ones(4))


def test_a_process_that_dies_while_it_saves_a_better_one_leaves_a_best(tmp_path):
    folder = tmp_path / "checkpoints"
    died = subprocess.run([sys.executable, "-c", DIES_WHILE_SAVING, str(folder)], timeout=120, check=False)
    assert died.returncode == 9
    saved = checkpoint_files.saved(folder)
    assert saved in ([1], [1, 2], [2])
    assert chosen_step(folder, "best", key="step") == saved[-1]
    # Whatever the torn save left does not get in the way of the next.
    save(folder, {3: 2.75}, keep=1)
    assert checkpoint_files.saved(folder) == [3]


def test_what_cannot_be_chosen_is_said_with_what_can(tmp_path):
    folder = tmp_path / "checkpoints"
    with pytest.raises(UserError, match=r"step: found 'best', allowed: .* \(there is none\)"):
        chosen_step(folder, "best", key="step")
    save(folder, {5: None, 10: None}, keep=2)
    with pytest.raises(UserError, match=r"step: found 'best', but no step .* evaluated; .* \(5, 10\)"):
        chosen_step(folder, "best", key="step")
    with pytest.raises(UserError, match=r"resume: found '7', allowed: auto, never, best, or .* \(5, 10\)"):
        chosen_step(folder, "7", key="resume")
    assert chosen_step(folder, "5", key="step") == 5


def test_multiples_of_keep_every_stay(tmp_path):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, keep=1, keep_every=3, warn=pytest.fail) as checkpoints:
        for step in range(1, 9):
            checkpoints.save(step, state_of(step), cursor=step, fingerprint={})
    assert checkpoint_files.saved(folder) == [3, 6, 8]


def test_a_step_has_its_name_only_once_it_is_whole_and_older_ones_go_after_that(tmp_path, monkeypatch):
    folder, seen = tmp_path / "checkpoints", []
    seal = checkpoint_files.seal

    def watched(place, belongs, *, final):
        before = sorted(path.name for path in folder.iterdir())
        seal(place, belongs, final=final)
        seen.append((before, checkpoint_files.saved(folder), checkpoint_files.damage(final)))

    monkeypatch.setattr(checkpoint_files, "seal", watched)
    save(folder, {1: None, 2: None, 3: None}, keep=1)
    assert seen == [(["1.writing"], [1], ""), (["1", "2.writing"], [1, 2], ""), (["2", "3.writing"], [2, 3], "")]


@contextlib.contextmanager
def full_disk(largest_file: int):
    """No file of this process can grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_well(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, state_of(step), cursor=step, fingerprint={})
    checkpoints.settle(wait=True)


def save_refused(checkpoints: Checkpoints, step: int, *, largest_file: int = 40) -> None:
    with full_disk(largest_file):
        save_well(checkpoints, step)


@pytest.mark.parametrize("largest_file", [0, 40, 200, 1000])
def test_a_full_disk_is_a_warning_and_the_next_save_is_tried(tmp_path, largest_file):
    folder, warnings = tmp_path / "checkpoints", []
    with Checkpoints(folder, keep=2, max_failures=2, warn=warnings.append) as checkpoints:
        save_well(checkpoints, 1)
        save_refused(checkpoints, 2, largest_file=largest_file)
        (warning,) = warnings
        assert warning.startswith("checkpoint 2 could not be saved in ")
        assert "File too large" in warning
        assert warning.endswith("the last whole checkpoint is that of step 1")
        assert checkpoint_files.saved(folder) == [checkpoints.last_step] == [1]
        save_well(checkpoints, 3)
        save_refused(checkpoints, 4, largest_file=largest_file)  # the second failure, but not in a row
        save_well(checkpoints, 5)
    assert sorted(path.name for path in folder.iterdir()) == ["3", "5"]
    assert checkpoint_files.newest_whole(folder, pytest.fail) == 5


def test_too_many_failures_in_a_row_end_the_run(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2, max_failures=3, warn=lambda _: None)
    with checkpoints:
        save_well(checkpoints, 1)
        save_refused(checkpoints, 2)
        save_refused(checkpoints, 3)
        with pytest.raises(
            UserError, match=r"checkpoint.max_failures: 3 saves in a row .* step 4; .* of step 1\. "
        ):
            save_refused(checkpoints, 4)
        save_well(checkpoints, 5)
    assert checkpoint_files.saved(tmp_path / "checkpoints") == [1, 5]


def test_a_last_save_that_fails_is_an_error(tmp_path):
    def ends_with_a_full_disk():
        with Checkpoints(tmp_path / "checkpoints", keep=2, max_failures=9, warn=lambda _: None) as checkpoints:
            save_refused(checkpoints, 1)

    with pytest.raises(UserError, match=r"the last state could not be saved in .*; nothing is saved yet"):
        ends_with_a_full_disk()


def test_a_vanished_directory_comes_back_with_the_next_save(tmp_path):
    folder, warnings = tmp_path / "run" / "checkpoints", []
    with Checkpoints(folder, keep=2, max_failures=9, warn=warnings.append) as checkpoints:
        save_well(checkpoints, 1)
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("in the way")
        save_well(checkpoints, 2)
        assert "checkpoint 2 could not be saved" in warnings[-1]
        (tmp_path / "run").unlink()
        save_well(checkpoints, 3)
    assert checkpoint_files.saved(folder) == [3]


def files_of(folder: pathlib.Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def flip(file: pathlib.Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "one bit": flip,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "emptied": lambda file: file.write_bytes(b""),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_to_any_file_is_found_and_the_step_before_is_used(tmp_path, damage):
    save(tmp_path / "whole", {1: None, 2: None}, keep=2)
    names = [
        name for name in files_of(tmp_path / "whole" / "2") if (tmp_path / "whole" / "2" / name).stat().st_size
    ]
    assert len(names) > 8
    for name in names:
        folder, warnings = tmp_path / "checkpoints", []
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / "2" / name)
        with pytest.raises(
            UserError, match=r"step: checkpoint 2 is damaged \(.*\); name another saved step \(1\)"
        ):
            chosen_step(folder, "latest", key="step")
        assert checkpoint_files.newest_whole(folder, warnings.append) == 1
        (warning,) = warnings
        assert warning.startswith("checkpoint 2 is damaged (")
        assert name in warning or name == "checksums.json"
        assert checkpoint_files.saved(folder) == [1]
        assert (tmp_path / "checkpoints.damaged" / "2").is_dir()
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / "checkpoints.damaged")


def test_where_all_are_damaged_nothing_starts_over_by_itself(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, {1: None, 2: None}, keep=2)
    for step in (1, 2):
        flip(folder / str(step) / "run.json")
    with pytest.raises(UserError, match=r"resume: every checkpoint in .* is damaged \(step 2: .*; step 1: "):
        checkpoint_files.newest_whole(folder, pytest.fail)
    assert checkpoint_files.saved(folder) == [1, 2]
    assert checkpoint_files.newest_whole(tmp_path / "nothing", pytest.fail) == 0


def test_another_meaning_of_the_weights_is_refused_unless_it_is_allowed(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, {1: None}, keep=1)
    assert json.loads((folder / "1" / "run.json").read_text())["fingerprint"] == {"seed": 0}
    with pytest.raises(UserError, match=r"resume: seed is 1 now, but .* with 0; .* resume_allow=\[seed\]"):
        checkpoint_files.check_fingerprint(folder, 1, {"seed": 1}, allowed=())
    checkpoint_files.check_fingerprint(folder, 1, {"seed": 1}, allowed=("seed",))
    checkpoint_files.check_fingerprint(folder, 1, {"seed": 0}, allowed=())
