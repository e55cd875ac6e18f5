"""Qwen3 (dense): norms of q and k, a head width of its own, sliding windows where switched on."""

from dflash_jax.models.decoder import DecoderConfig
from dflash_jax.published.config_json import Fields, read_attention, read_windowed


def read(fields: Fields) -> DecoderConfig:
    """From a config.json. Raises KeyError on a missing key, UserError on what is not supported."""
    bias = fields["attention_bias"]
    return read_windowed(fields, read_attention(fields, input_bias=bias, output_bias=bias, head_norms=True))
