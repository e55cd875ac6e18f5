"""What configurations mean, and that nothing foreign passes: every refusal names its key and its value."""

import dataclasses
import json
import shutil

import pytest
from published_targets import TARGETS

from dflash_jax.errors import UserError
from dflash_jax.models.attention import AttentionConfig
from dflash_jax.models.decoder import FULL, LINEAR, SLIDING
from dflash_jax.models.rope import Llama3Scaling, Rope
from dflash_jax.published.targets import TargetFiles

ABSENT = object()


def config(tmp_path, name, *, inside=None, **changes):
    """The configuration of a published target, some keys changed; inside: changes of its text_config."""
    fields = json.loads((TARGETS / name / "config.json").read_text())
    for place, changed in ((fields, changes), (fields.get("text_config"), inside or {})):
        for key, value in changed.items():
            if value is ABSENT:
                del place[key]
            else:
                place[key] = value
    shutil.rmtree(tmp_path / "folder", ignore_errors=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(json.dumps(fields))
    return TargetFiles.open(tmp_path / "folder").config


def test_a_hybrid_in_its_wrapper(tmp_path):
    found = config(tmp_path, "qwen3_5_hub_layout")
    assert found.layer_types == (LINEAR, LINEAR, FULL)
    assert found.rope == Rope(1e7, 8)
    assert found.tied
    assert found.attention == AttentionConfig(
        64, 4, 2, 16, 1e-6, input_bias=False, output_bias=False, head_norms=True, unit_offset=True, gated=True
    )
    assert dataclasses.astuple(found.delta) == (64, 2, 4, 16, 12, 4, 1e-6)


def test_the_interval_says_what_the_layer_types_say(tmp_path):
    three = {"layer_types": ABSENT, "num_hidden_layers": 4, "full_attention_interval": 2}
    assert config(tmp_path, "qwen3_5", **three).layer_types == (LINEAR, FULL, LINEAR, FULL)


def test_windows_from_max_window_layers_on(tmp_path):
    older = {"layer_types": ABSENT, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3}
    found = config(tmp_path, "qwen3_swa_yarn_bias", **older)
    assert (found.layer_types, found.window) == ((FULL, FULL, FULL, SLIDING), 6)
    off = config(tmp_path, "qwen3_swa_yarn_bias", **(older | {"use_sliding_window": False}))
    assert (off.layer_types, off.window) == ((FULL,) * 4, None)


def test_llama3s_scaling(tmp_path):
    scaling = config(tmp_path, "llama3_rope").rope.scaling
    assert isinstance(scaling, Llama3Scaling)
    assert scaling.original_length == 32


def test_experts_on_all_layers_but_those_left_out(tmp_path):
    found = config(tmp_path, "qwen3_moe")
    assert found.experts is not None
    assert (found.experts.experts, found.experts.chosen, found.dense_layers) == (8, 3, (1,))
    assert config(tmp_path, "qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[]).dense_layers == (0, 2)
    assert config(tmp_path, "qwen3_moe", use_sliding_window=True, sliding_window=5).layer_types == (SLIDING,) * 3


PLAIN = {"rope_theta": 1e4, "rope_type": "default"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 4.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu'"),
        (
            "llama",
            {"rope_parameters": {**PLAIN, "rope_type": "su"}},
            "rope_type 'su' .* 'default', 'yarn', 'llama3'",
        ),
        ("llama", {"rope_parameters": {**PLAIN, "mrope_section": [4, 2, 2]}}, "RoPE key 'mrope_section'"),
        (
            "llama",
            {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5 is not",
        ),
        (
            "llama",
            {"rope_parameters": LLAMA3},
            "low_freq_factor: found 4.0, expected less than high_freq_factor 4.0",
        ),
        ("llama", {"vocab_size": ABSENT}, "lacks 'vocab_size'"),
        ("qwen3", {"attention_bias": ABSENT}, "lacks 'attention_bias'"),
        (
            "qwen3",
            {"layer_types": ["chunked_attention"] * 4},
            "layer_types: 'chunked_attention' is not supported for",
        ),
        ("qwen3", {"layer_types": [FULL] * 3}, "layer_types names 3 layers, but num_hidden_layers is 4"),
        ("qwen3", {"layer_types": [SLIDING] * 4}, "need a window, but use_sliding_window is False"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate False is not supported; supported: True"),
        (
            "qwen3_5",
            {"layer_types": [SLIDING] * 5},
            "layer_types: 'sliding_attention' is not supported for qwen3_5",
        ),
        ("qwen3_5", {"rope_parameters": PLAIN}, "partial_rotary_factor missing"),
        (
            "qwen3_5",
            {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.2}},
            "0.2 of 16 channels is not an even number",
        ),
        (
            "qwen3_5_hub_layout",
            {"tie_word_embeddings": False},
            "is False at the top level, but True in text_config",
        ),
        ("qwen3_moe", {"num_experts": 9}, r"num_experts, num_local_experts: found \[9, 8\]"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 experts per token, but there are 8"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, name, changes, named):
    with pytest.raises(UserError, match=named) as raised:
        config(tmp_path, name, **changes)
    assert str(tmp_path / "folder") in str(raised.value)


def test_an_unknown_family_is_refused_with_the_list_of_known_ones(tmp_path):
    known = "llama, qwen2, qwen3, qwen3_5, qwen3_5_moe, qwen3_5_moe_text, qwen3_5_text, qwen3_moe"
    with pytest.raises(UserError, match=f"model_type 'gpt_oss' in .* is not supported; supported: {known}"):
        config(tmp_path, "llama", model_type="gpt_oss")
