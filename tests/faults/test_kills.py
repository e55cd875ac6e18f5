"""SIGKILL at many random moments of one run: it ends in the state that it would have reached without any."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from run_files import lines, repeatable, saved_arrays

from dflash_jax import train
from dflash_jax.training import checkpoint_files

KILLS, STEPS = 30, 90
# A checkpoint at every other step: most kills come while one is being written.
FREQUENT = [f"train.steps={STEPS}", "eval.every=0", "checkpoint.every=2", "checkpoint.keep=2"]


def steps_logged(run: pathlib.Path) -> int:
    file = run / "train_log.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_thirty_kills_at_random_moments_change_nothing(recipe, compiled_once):
    assert train.main(recipe.arguments("whole", *FREQUENT)) == 0
    run, whole = recipe.root / "killed", recipe.root / "whole"
    command = [sys.executable, "-m", "dflash_jax.train", *recipe.arguments("killed", *FREQUENT)]
    environment, draw = {**os.environ, **compiled_once}, random.Random(0)
    started_from, while_saving = [], 0
    for kill in range(KILLS):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        began, before = time.monotonic(), steps_logged(run)
        # Some before the first step, most after a few more steps, at any moment of one.
        if kill % 6:
            wanted = min(before + 1 + draw.randrange(3), STEPS)
            while process.poll() is None and steps_logged(run) < wanted and time.monotonic() - began < 120:
                time.sleep(0.001)
            time.sleep(draw.random() * 0.1)
        else:
            time.sleep(draw.uniform(2.0, 6.0))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        while_saving += any(folder.suffix for folder in (run / "checkpoints").glob("*"))
        saved = checkpoint_files.saved(run / "checkpoints")
        assert all(not checkpoint_files.damage(run / "checkpoints" / str(step)) for step in saved)
        started_from.append(saved[-1] if saved else 0)
    assert started_from == sorted(started_from)
    assert while_saving >= 3, "no kill came inside a save; this test shows nothing"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert repeatable(run) == repeatable(whole)
    assert [line["step"] for line in lines(run)] == list(range(1, STEPS + 1))
    for found, expected in zip(saved_arrays(run, STEPS), saved_arrays(whole, STEPS), strict=True):
        np.testing.assert_array_equal(found, expected)
