"""Qwen3.5- and 3.6-MoE: the hybrid of qwen3_5 with routed experts and a gated shared one on every layer."""

from dflash_jax.models.decoder import DecoderConfig
from dflash_jax.models.experts import ExpertsConfig
from dflash_jax.published.config_json import Fields
from dflash_jax.published.families.qwen3_5 import read_hybrid_decoder


def read(fields: Fields) -> DecoderConfig:
    """From a config.json. Raises KeyError on a missing key, UserError on what is not supported."""
    experts = ExpertsConfig(
        width=fields["hidden_size"],
        experts=fields["num_experts"],
        chosen=fields["num_experts_per_tok"],
        mlp_width=fields["moe_intermediate_size"],
        # The family always divides the chosen weights by their sum.
        normalised=True,
        shared_mlp_width=fields["shared_expert_intermediate_size"],
    )
    return read_hybrid_decoder(fields, mlp_width=None, experts=experts)
