"""Llama 2 and 3, SmolLM2 and whatever else calls itself `llama`: full attention, biases where the file says so."""

from dflash_jax.models.decoder import FULL, DecoderConfig
from dflash_jax.published.config_json import Fields, read_attention, read_decoder
from dflash_jax.published.rope_fields import read_rope


def read(fields: Fields) -> DecoderConfig:
    """From a config.json. Raises KeyError on a missing key, UserError on what is not supported."""
    # Configurations older than these two keys have no biases; loading is strict, so a wrong guess cannot pass.
    bias = fields.get("attention_bias", False)
    attention = read_attention(fields, input_bias=bias, output_bias=bias)
    return read_decoder(
        fields,
        attention=attention,
        rope=read_rope(fields, attention.head_width),
        layer_types=(FULL,) * fields["num_hidden_layers"],
        mlp_bias=fields.get("mlp_bias", False),
    )
