"""Qwen2 and Qwen2.5: biases of q, k and v, and sliding windows where switched on."""

from dflash_jax.models.decoder import DecoderConfig
from dflash_jax.published.config_json import Fields, read_attention, read_decoder, read_windows
from dflash_jax.published.rope_fields import read_rope


def read(fields: Fields) -> DecoderConfig:
    """From a config.json. Raises KeyError on a missing key, UserError on what is not supported."""
    attention = read_attention(fields, input_bias=True)
    layer_types, window = read_windows(fields)
    return read_decoder(
        fields,
        attention=attention,
        rope=read_rope(fields, attention.head_width),
        layer_types=layer_types,
        window=window,
    )
