"""Qwen3.5, 3.6 and 3.8 (dense): gated delta-nets with gated full attention in between, and norms of 1 + w.

A part of each head is rotated. The text model may stand in a multimodal wrapper, whose other parts are left out.
"""

from typing import Any

from dflash_jax.models.decoder import DecoderConfig
from dflash_jax.models.delta_net import DeltaNetConfig
from dflash_jax.published.config_json import Fields, read_attention, read_decoder, read_hybrid, supported
from dflash_jax.published.rope_fields import read_rope


def read(fields: Fields) -> DecoderConfig:
    """From a config.json. Raises KeyError on a missing key, UserError on what is not supported."""
    return read_hybrid_decoder(fields)


def read_hybrid_decoder(fields: Fields, **differences: Any) -> DecoderConfig:
    """A Qwen3.5 decoder; differences: another MLP."""
    if "attn_output_gate" in fields:
        supported(fields, "attn_output_gate", True)
    bias = fields["attention_bias"]
    attention = read_attention(
        fields, input_bias=bias, output_bias=bias, head_norms=True, unit_offset=True, gated=True
    )
    return read_decoder(
        fields,
        attention=attention,
        rope=read_rope(fields, attention.head_width, partial=True, sections=True),
        layer_types=read_hybrid(fields),
        delta=DeltaNetConfig(
            width=attention.width,
            key_heads=fields["linear_num_key_heads"],
            value_heads=fields["linear_num_value_heads"],
            key_width=fields["linear_key_head_dim"],
            value_width=fields["linear_value_head_dim"],
            kernel=fields["linear_conv_kernel_dim"],
            norm_eps=attention.norm_eps,
        ),
        **differences,
    )
