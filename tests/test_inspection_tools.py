"""tools/inspect_checkpoint.py and tools/replay.py on runs to which something has happened."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
import tool_files

from dflash_jax import train
from dflash_jax.errors import UserError
from dflash_jax.training import checkpoint_files
from dflash_jax.training.features import FeatureSource

SHORT = ["train.steps=4", "eval.every=0", "checkpoint.every=2", "data.buckets=[192]", "objective.head_chunk=8"]
pytestmark = pytest.mark.usefixtures("compiled_once")
inspection, replay = tool_files.load("inspect_checkpoint"), tool_files.load("replay")


@pytest.fixture(scope="module")
def run(recipe):
    """A run whose third step met a record that is not finite in the second tap."""
    featured, calls = FeatureSource.__call__, []

    def spoil_the_third(self, batch):
        calls.append(batch)
        found = featured(self, batch)
        if len(calls) != 3:
            return found
        width = found.states.features.shape[-1] // 3
        features = found.states.features.at[1, 5, width].set(jnp.nan)
        return dataclasses.replace(found, states=found.states._replace(features=features))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureSource, "__call__", spoil_the_third)
        assert train.main(recipe.arguments("bad", *SHORT)) == 0
    return recipe.root / "bad"


def test_every_tensor_is_listed_with_its_norm_and_its_change(run, capsys):
    assert inspection.main([str(run), "2", "latest"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("every file is as it was written") == 2
    assert shown.count("not finite: nothing") == 2
    arrays = {step: inspection.read_arrays(run / "checkpoints", step) for step in (2, 4)}
    for name in ("params.fc.weight.value", "opt.1.inner_state.0.mu.fc.weight.value"):
        before, after = (arrays[step][name].astype(np.float64) for step in (2, 4))
        row = re.search(rf"^{re.escape(name)} +36x108 +float32 +(\S+) +(\S+) +0 +0$", shown, re.M)
        assert row is not None
        assert float(row[1]) == pytest.approx(np.sqrt((before**2).sum()), rel=1e-3)
        assert float(row[2]) == pytest.approx(np.abs(before).max(), rel=1e-3)
        change = re.search(rf"^{re.escape(name)} +(\S+) +\S+$", shown, re.M)
        assert change is not None
        assert float(change[1]) == pytest.approx(np.sqrt(((after - before) ** 2).sum()), rel=1e-3)


def test_a_damaged_checkpoint_and_one_with_nan_are_told_by_the_exit_status(run, tmp_path, capsys, monkeypatch):
    largest = max((run / "checkpoints" / "2").rglob("*"), key=lambda file: file.stat().st_size)
    whole = largest.read_bytes()
    largest.write_bytes(whole[:-1])
    assert inspection.main([str(run), "2"]) == 1
    assert "step 2: DAMAGED, state/" in capsys.readouterr().out
    largest.write_bytes(whole)
    arrays = inspection.read_arrays(run / "checkpoints", 4)
    arrays["params.norm.weight.value"] = np.array([1.0, np.nan, np.inf, np.inf], np.float32)
    monkeypatch.setattr(inspection, "read_arrays", lambda *_: arrays)
    assert inspection.main([str(run)]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^params.norm.weight.value +4 +float32 +1 +1 +1 +2$", shown, re.M)
    assert "not finite: params.norm.weight.value\n" in shown


def test_replay_finds_nothing_where_the_fault_has_gone_and_names_it_where_it_has_not(run, capsys, monkeypatch):
    assert replay.main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert "step 3 of" in shown
    assert "with the parameters of step 2" in shown
    assert "everything is finite" in shown
    featured = FeatureSource.__call__

    def spoil(self, batch):
        found = featured(self, batch)
        width = found.states.features.shape[-1] // 3
        features = found.states.features.at[1, 5, width].set(jnp.nan)
        return dataclasses.replace(found, states=found.states._replace(features=features))

    monkeypatch.setattr(FeatureSource, "__call__", spoil)
    assert replay.main([str(run), "3"]) == 1
    (kept,) = replay.read_batches(run / "bad_steps" / "step-3.npz")
    record, shown = int(kept.record_ids[1, 0]), capsys.readouterr().out
    assert f"features of layer 2: not finite in row 1 (records [{record}]), 1 positions from 5 on" in shown
    assert re.search(r"gradient: fc.weight.value has \d+ NaN", shown)
    assert "parameters:" not in shown


def test_what_cannot_be_shown_is_said(run, tmp_path):
    with pytest.raises(UserError, match=r"STEP: found 7, allowed: 3"):
        replay.main([str(run), "7"])
    with pytest.raises(UserError, match=r"holds no batches: no step of this run was skipped as bad"):
        replay.main([str(tmp_path)])
    with pytest.raises(UserError, match=r"STEP: found '9', allowed: .* \(2, 4\)"):
        inspection.main([str(run), "9"])
    assert checkpoint_files.saved(run / "checkpoints") == [2, 4]
