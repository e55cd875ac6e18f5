"""Qwen2 and Qwen2.5: biases of q, k and v, and sliding windows where switched on."""

from dflash_jax.models.decoder import DecoderConfig
from dflash_jax.published.config_json import Fields, read_attention, read_windowed


def read(fields: Fields) -> DecoderConfig:
    """From a config.json. Raises KeyError on a missing key, UserError on what is not supported."""
    return read_windowed(fields, read_attention(fields, input_bias=True))
