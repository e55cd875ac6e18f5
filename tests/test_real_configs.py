"""Configurations as published models have them are read, and give exactly as many parameters as those have."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.models.decoder import FULL, LINEAR
from dflash_jax.models.rope import Llama3Scaling, Rope
from dflash_jax.published.end_tokens import end_tokens
from dflash_jax.published.targets import TargetFiles

# The keys of their config.json that say something about the computation, spelled as there.
LLAMA_3_1_8B = {
    "model_type": "llama",
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN2_5_7B = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def opened(tmp_path, fields: dict) -> TargetFiles:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return TargetFiles.open(tmp_path)


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        pytest.param(LLAMA_3_1_8B, 8_030_261_248, id="Llama-3.1-8B"),
        pytest.param(QWEN2_5_7B, 7_615_616_512, id="Qwen2.5-7B"),
        pytest.param(QWEN3_30B_A3B, 30_532_122_624, id="Qwen3-30B-A3B"),
    ],
)
def test_parameters_are_as_many_as_published(tmp_path, fields, parameters):
    _, abstract = opened(tmp_path, fields).abstract(jnp.dtype("bfloat16"))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract)) == parameters


def test_llama_3_1(tmp_path):
    files = opened(tmp_path, LLAMA_3_1_8B)
    assert files.config.rope == Rope(500000.0, 128, Llama3Scaling(8.0, 8192, 1.0, 4.0))
    assert end_tokens(files.path) == {128001, 128008, 128009}


def test_generation_config_adds_to_the_ends(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 128009]}))
    assert end_tokens(opened(tmp_path, LLAMA_3_1_8B).path) == {5, 128001, 128008, 128009}


def test_qwen2_5_has_no_window_unless_it_is_switched_on(tmp_path):
    config = opened(tmp_path, QWEN2_5_7B).config
    assert (config.layer_types, config.window) == ((FULL,) * 28, None)
    assert config.attention.input_bias
    assert not config.attention.output_bias


def test_a_hybrid_of_experts_only(tmp_path):
    """The text part of a Qwen3.5-MoE has no key for a dense MLP."""
    text = {
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25},
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    }
    config = opened(tmp_path, {"model_type": "qwen3_5_moe", "text_config": text}).config
    assert config.mlp_width is None
    assert config.layer_types == (LINEAR, LINEAR, LINEAR, FULL) * 10
    assert config.rope == Rope(1e7, 64)
    assert config.experts is not None
    assert (config.experts.experts, config.experts.shared_mlp_width, config.experts.normalised) == (256, 512, True)
