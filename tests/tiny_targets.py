"""Random targets of every family, written by transformers: odd sizes, every parameter away from its start."""

import dataclasses
import pathlib
from typing import Any

VOCAB = 66
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-4,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 731.0},
    "tie_word_embeddings": False,
}
NO_ENDS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 731.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 731.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}

# Name -> (transformers' configuration class, its causal language model, sizes).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"head_dim": "absent", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"attention_bias": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", HYBRID),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**HYBRID, **EXPERTS, "intermediate_size": "absent", "shared_expert_intermediate_size": 10},
    ),
}


@dataclasses.dataclass(frozen=True)
class HubTarget:
    """A model folder and the torch model that it was saved from."""

    path: pathlib.Path
    torch_model: Any


def save_target(path: pathlib.Path, family: str, *, seed: int = 5, **changes: Any) -> HubTarget:
    """Save a random float32 model of a family."""
    import torch
    import transformers

    config_class, model_class, sizes = FAMILIES[family]
    fields = SHARED | NO_ENDS | sizes | changes
    config = getattr(transformers, config_class)(
        **{key: value for key, value in fields.items() if value != "absent"}
    )
    model = getattr(transformers, model_class)(config).eval()
    draw = torch.Generator().manual_seed(seed)
    offset = family.startswith("qwen3_5")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if name.endswith("A_log"):
                parameter.copy_(0.5 * noise - 1)
            elif "norm" in name:
                parameter.copy_((0 if offset and "linear_attn" not in name else 1) + 0.3 * noise)
            elif "embed_tokens" in name or parameter.ndim == 1:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.2 * noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return HubTarget(path, model)
