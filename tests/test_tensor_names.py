"""Which parameter a published tensor is: names in wrappers, names left out, and experts stored one by one."""

import numpy as np
import pytest
from published_targets import write_target
from safetensors.numpy import load_file

from dflash_jax.published.targets import TargetFiles
from dflash_jax.published.tensor_names import expert_place
from dflash_jax.published.weights import Place

WIDTH, MLP_WIDTH = 20, 6


def test_wrappers_are_unwrapped_and_their_other_parts_left_out(tmp_path):
    place = TargetFiles.open(write_target(tmp_path / "tied", "qwen3_5_hub_layout")).place
    found = place("model.language_model.layers.0.mlp.up_proj.weight")
    assert found == Place("model.layers.0.mlp.up_proj.weight")
    assert place("model.visual.merger.norm.weight") is None
    assert place("mtp.layers.0.mlp.up_proj.weight") is None
    assert place("lm_head.weight") is None


def test_an_untied_head_has_a_place(tmp_path):
    place = TargetFiles.open(write_target(tmp_path / "untied", "qwen3_moe")).place
    assert place("lm_head.weight") == Place("lm_head.weight")
    experts = "model.layers.0.mlp.experts"
    assert place(f"{experts}.2.up_proj.weight") == Place(f"{experts}.gate_up_proj", (2, slice(32, 64)))


def test_places_of_the_hubs_names(tmp_path):
    """A model saved by transformers in the hub's layout holds one tensor per expert and projection."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=11,
            hidden_size=WIDTH,
            intermediate_size=9,
            moe_intermediate_size=MLP_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            num_experts=3,
            num_experts_per_tok=2,
            mlp_only_layers=[1],
        )
    )
    model.save_pretrained(tmp_path)
    expected = {name: value.detach().numpy() for name, value in model.named_parameters()}
    stacks = {name: np.full(value.shape, np.nan) for name, value in expected.items() if ".experts." in name}
    others = set()
    for name, array in load_file(tmp_path / "model.safetensors").items():
        if (place := expert_place(name, MLP_WIDTH)) is None:
            others.add(name)
        else:
            stacks[place.name][place.index] = array
    assert others == expected.keys() - stacks.keys()
    assert sorted(stacks) == [f"model.layers.0.mlp.experts.{part}" for part in ("down_proj", "gate_up_proj")]
    for name, stack in stacks.items():
        np.testing.assert_array_equal(stack, expected[name])


def test_a_place_by_hand():
    start = "model.language_model.layers.12.mlp.experts"
    assert expert_place(f"{start}.103.up_proj.weight", 7) == Place(f"{start}.gate_up_proj", (103, slice(7, 14)))
    assert expert_place("experts.0.gate_proj.weight", 7) == Place("experts.gate_up_proj", (0, slice(0, 7)))
    assert expert_place(f"{start}.3.down_proj.weight", 7) == Place(f"{start}.down_proj", (3,))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.shared_expert.gate_proj.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.0.mlp.experts.3.gate_proj.weight_scale",
        "model.layers.0.mlp.experts.3.gate_proj.bias",
    ],
)
def test_other_names_have_no_place(name):
    assert expert_place(name, 7) is None
