"""No fault of a file system stops or holds up a training: TensorBoard's record waits, and goes on where it can."""

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys

import pytest
from event_files import add_steps, layouts_of, purges_of, steps_in

from dflash_jax.errors import UserError
from dflash_jax.monitor import board
from dflash_jax.monitor.board import Board, record


@contextlib.contextmanager
def files_end_at(size):
    """No file of this process may grow beyond so many bytes, which fails as a full disk does: in mid-entry."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def block(folder):
    """Nothing can be written into the folder, not even by root."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("not a folder")


def test_a_folder_removed_in_the_middle_is_begun_again(folder, opened, said):
    add_steps(opened, [1, 2])
    shutil.rmtree(folder.parent)
    add_steps(opened, [3, 4])
    assert steps_in(folder) == [3, 4]
    (file,) = folder.iterdir()
    assert purges_of(file) == []
    assert len(layouts_of(folder)) == 1
    assert said == [f"TensorBoard's record in {folder} was removed; a fresh file has what follows"]


def test_a_folder_that_is_moved_away_is_written_on(folder, opened, said):
    add_steps(opened, [1])
    moved = folder.parent.rename(folder.parent.with_name("moved"))
    add_steps(opened, [2])
    assert steps_in(moved / "tensorboard") == [1, 2]
    assert not folder.exists()
    assert not said


def test_a_file_system_that_counts_no_links_has_lost_nothing(folder, opened, said, monkeypatch):
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda file: os.stat_result((*real(file)[:3], 0, *real(file)[4:])))
    add_steps(opened, [1, 2])
    assert steps_in(folder) == [1, 2]
    assert len([*folder.iterdir()]) == 1
    assert not said


def test_nothing_is_lost_or_torn_where_a_disk_is_full_for_a_while(folder, opened, said):
    (file,) = folder.iterdir()
    with files_end_at(file.stat().st_size + 150):
        add_steps(opened, range(1, 41))
        (full,) = folder.iterdir()
        written = steps_in(folder)
        assert 0 < len(written) < 40  # and no entry is torn
        opened.flush()
        assert said[1:] == []
        assert "cannot be written (File too large); training goes on" in said[0]
        assert "\n" not in said[0]
    opened.flush()
    assert steps_in(folder) == [*range(1, 41)]
    assert full in folder.iterdir()
    assert said[1:] == [f"TensorBoard's record in {folder} is written again"]
    add_steps(opened, [41])
    assert steps_in(folder) == [*range(1, 42)]


def test_a_disk_that_is_full_from_the_start_leaves_no_empty_files(folder, said):
    with files_end_at(0):
        opened = Board(folder, resumed_at=4, warn=said.append)
        add_steps(opened, [5])
        opened.flush()
        assert list(folder.iterdir()) == []
    add_steps(opened, [6])
    opened.close()
    (file,) = folder.iterdir()
    assert purges_of(file) == [5]
    assert steps_in(folder) == [5, 6]
    assert len(said) == 2


def test_it_is_tried_again_after_a_while(folder, said, monkeypatch):
    block(folder)
    opened = Board(folder, resumed_at=0, warn=said.append)
    folder.unlink()
    add_steps(opened, [1])
    assert not folder.exists()  # too early
    monkeypatch.setattr(board, "RETRY_S", 0.0)
    opened.flush()
    assert steps_in(folder) == [1]
    block(folder)
    add_steps(opened, [2])
    folder.unlink()
    add_steps(opened, [3])
    opened.close()
    assert steps_in(folder) == [2, 3]
    assert [re.sub(r"^TensorBoard's record in \S+ | \(.*", "", line) for line in said] == [
        "cannot be written",
        "is written again",
    ] * 2


def test_memory_is_bounded_and_what_it_lost_is_told(folder, said, monkeypatch):
    monkeypatch.setattr(board, "KEPT", 3)
    block(folder)
    opened = Board(folder, resumed_at=0, warn=said.append)
    add_steps(opened, range(1, 6))
    folder.unlink()
    opened.close()
    assert steps_in(folder) == [3, 4, 5]
    assert said[1].endswith(
        "is written again; it lacks 2 entries (a step or an evaluation each) that could not be written"
    )


def test_a_run_that_ends_without_its_record_says_so(folder, said):
    block(folder)
    opened = Board(folder, resumed_at=0, warn=said.append)
    add_steps(opened, [1])
    opened.add_evaluation({"step": 1, "loss": 2.0})
    opened.close()
    assert len(said) == 2
    assert said[1].endswith("lacks 2 entries (a step or an evaluation each) that could not be written")


def test_a_process_ends_at_once_with_a_record_it_cannot_write(folder):
    program = """
import pathlib, shutil, sys
from dflash_jax.monitor.board import Board
folder = pathlib.Path(sys.argv[1])
board = Board(folder, resumed_at=0, warn=print)
shutil.rmtree(folder)
folder.write_text("not a folder")
for step in range(1, 5001):
    board.add_step({"step": step, "loss": 1.0})
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_what_cannot_be_recorded_later_is_an_error_that_names_the_folder(folder):
    block(folder)
    with pytest.raises(UserError, match=f"{folder}: what evaluate measured cannot be added"):
        record(folder.parent, 1, {"decode/all/chain/tokens_s": 2.0}, name="evaluate")
