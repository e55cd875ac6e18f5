"""Whole trainings on targets other than Llama: their weights split over three mesh axes, then decoded with."""

import json

import pytest
import tiny_runs

from dflash_jax import evaluate, train

pytestmark = pytest.mark.usefixtures("compiled_once")

MESH = {
    "platform": "cpu",
    "device_count": 8,
    "target": {
        "devices": [0, 1, 2, 3],
        "axes": {"data": 1, "fsdp": 2, "model": 2},
        "rules": {
            "embed": "fsdp",
            "heads": "model",
            "kv_heads": "model",
            "mlp": "model",
            "vocab": "model",
            "experts": "model",
            "delta_heads": "model",
            "delta_channels": "model",
            "delta_values": "model",
        },
    },
    "drafter": {"devices": [6, 7], "axes": {"data": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def test_a_drafter_for_the_family_learns_and_decodes_without_changing_a_token(tmp_path, family, capsys):
    sizes = {"num_experts": 4} if family.endswith("moe") else {}
    recipe = tiny_runs.save_recipe(tmp_path, tiny_runs.save_chat_target(tmp_path / "target", family, **sizes))
    (tmp_path / "mesh.yaml").write_text(json.dumps(MESH))
    # A target of experts only has no MLP whose width the drafter could take.
    changes = [
        "drafter.taps=[0,1]",
        "drafter.mlp_width=40",
        "data.buckets=[192]",
        "train.steps=12",
        f"mesh={tmp_path}/mesh.yaml",
    ]
    terms = ["objective.terms.ce=0.5", "objective.terms.tv=0.5"]
    assert train.main(recipe.arguments("run", *changes, *terms)) == 0
    logged = [json.loads(line) for line in (tmp_path / "run" / "train_log.jsonl").read_text().splitlines()]
    assert logged[-1]["loss"] < 0.95 * logged[0]["loss"]
    capsys.readouterr()
    assert evaluate.main([f"run={tmp_path / 'run'}", "max_new_tokens=24", "limit=1"]) == 0
    *_, whole = json.loads((tmp_path / "run" / "report" / "evaluation.json").read_text())["sets"]
    assert whole["ways"][1]["identical"] == whole["prompts"] == 2
