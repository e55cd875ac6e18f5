"""Which checkpoints stay on disk, which of them is the best, and that a broken save takes none away."""

import pathlib
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.errors import UserError
from dflash_jax.training.checkpoint import Checkpoints, chosen_step
from dflash_jax.training.state import TrainState

DIES_WHILE_SAVING = """
import os, pathlib, sys
import jax.numpy as jnp
from dflash_jax.training.checkpoint import Checkpoints
from dflash_jax.training.state import TrainState

folder = pathlib.Path(sys.argv[1])
with Checkpoints(folder, keep=1) as checkpoints:
    state = TrainState(jnp.int32(1), {"w": jnp.arange(4.0)}, ())
    checkpoints.save(1, state, cursor=1, fingerprint={}, accept_len=1.5)
checkpoints = Checkpoints(folder, keep=1)
checkpoints.save(2, state, cursor=2, fingerprint={}, accept_len=2.5)
os._exit(9)
"""


def save(folder: pathlib.Path, lengths: dict[int, float | None], *, keep: int) -> None:
    """One save for each step, with its held-out accept length if it was evaluated."""
    with Checkpoints(folder, keep=keep) as checkpoints:
        for step, length in lengths.items():
            state = TrainState(jnp.int32(step), {"w": jnp.full(4, float(step))}, ())  # pyright: ignore[reportArgumentType]
            checkpoints.save(step, state, cursor=step, fingerprint={"seed": 0}, accept_len=length)


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
    assert Checkpoints.saved(tmp_path / "checkpoints") == kept
    evaluated = {step: lengths[step] for step in kept if lengths[step] is not None}
    assert Checkpoints.accept_lengths(tmp_path / "checkpoints") == evaluated
    assert chosen_step(tmp_path / "checkpoints", "best", key="step") == best
    assert chosen_step(tmp_path / "checkpoints", "latest", key="step") == kept[-1]


def test_a_best_is_longer_than_all_that_are_saved_also_after_a_restart(tmp_path):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, keep=3) as checkpoints:
        assert checkpoints.is_best(1.0)
    save(folder, {1: 2.0, 2: None, 3: 1.5}, keep=3)
    with Checkpoints(folder, keep=3) as checkpoints:
        assert not checkpoints.is_best(2.0)
        assert checkpoints.is_best(2.25)
        checkpoints.save(4, TrainState(jnp.int32(4), {}, ()), cursor=4, fingerprint={}, accept_len=2.25)  # pyright: ignore[reportArgumentType]
        assert not checkpoints.is_best(2.25)
    assert Checkpoints.saved(folder) == [2, 3, 4]


def test_steps_set_aside_are_not_compared_with(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, {1: 1.5, 2: None, 3: 9.0, 4: None}, keep=4)
    Checkpoints.set_aside(folder, after=2)
    assert Checkpoints.accept_lengths(folder) == {1: 1.5}
    with Checkpoints(folder, keep=4) as checkpoints:
        assert checkpoints.is_best(1.75)
    save(folder, {3: 1.75, 4: None}, keep=1)
    assert Checkpoints.saved(folder) == [3, 4]
    assert chosen_step(folder, "best", key="step") == 3


def test_a_restored_best_step_is_what_was_saved(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, {1: 2.0, 2: None, 3: 1.0}, keep=1)
    abstract = TrainState(jnp.int32(0), {"w": jnp.zeros(4)}, ())  # pyright: ignore[reportArgumentType]
    with Checkpoints(folder, keep=1) as checkpoints:
        found = checkpoints.restore(1, abstract, fingerprint={"seed": 0})
    assert (int(found.state.step), found.cursor) == (1, 1)
    np.testing.assert_array_equal(found.state.params["w"], np.ones(4))


def test_a_process_that_dies_while_it_saves_a_better_one_leaves_a_best(tmp_path):
    folder = tmp_path / "checkpoints"
    died = subprocess.run([sys.executable, "-c", DIES_WHILE_SAVING, str(folder)], timeout=120, check=False)
    assert died.returncode == 9
    saved = Checkpoints.saved(folder)
    assert saved in ([1], [1, 2], [2])
    assert chosen_step(folder, "best", key="step") == saved[-1]
    # Whatever the torn save left does not get in the way of the next.
    save(folder, {3: 2.75}, keep=1)
    assert Checkpoints.saved(folder) == [3]


def test_what_cannot_be_chosen_is_said_with_what_can(tmp_path):
    folder = tmp_path / "checkpoints"
    with pytest.raises(UserError, match=r"step: found 'best', allowed: .* \(there is none\)"):
        chosen_step(folder, "best", key="step")
    save(folder, {5: None, 10: None}, keep=2)
    with pytest.raises(UserError, match=r"step: found 'best', but no step .* evaluated; .* \(5, 10\)"):
        chosen_step(folder, "best", key="step")
    with pytest.raises(UserError, match=r"resume: found '7', allowed: latest, best, or a saved step \(5, 10\)"):
        chosen_step(folder, "7", key="resume")
    assert chosen_step(folder, "5", key="step") == 5


def test_steps_saved_without_any_metrics_count_as_not_evaluated(tmp_path):
    folder = tmp_path / "checkpoints"
    save(folder, {1: 1.5, 2: 1.25}, keep=2)
    shutil.rmtree(folder / "1" / "metrics")
    assert Checkpoints.accept_lengths(folder) == {2: 1.25}
    save(folder, {3: 1.0, 4: None}, keep=1)
    assert Checkpoints.saved(folder) == [2, 4]
