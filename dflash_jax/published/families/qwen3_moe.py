"""Qwen3-MoE: Qwen3 with experts, but on the layers that `mlp_only_layers` and `decoder_sparse_step` leave out."""

from dflash_jax.errors import UserError
from dflash_jax.models.decoder import FULL, SLIDING, DecoderConfig
from dflash_jax.models.experts import ExpertsConfig
from dflash_jax.published.config_json import Fields, read_attention, read_decoder
from dflash_jax.published.rope_fields import read_rope


def read(fields: Fields) -> DecoderConfig:
    """From a config.json. Raises KeyError on a missing key, UserError on what is not supported."""
    bias, layers = fields["attention_bias"], fields["num_hidden_layers"]
    attention = read_attention(fields, input_bias=bias, output_bias=bias, head_norms=True)
    # Without layer_types the window, if switched on, is that of every layer.
    window = fields["sliding_window"] if fields["use_sliding_window"] else None
    sparse = set(range(fields["decoder_sparse_step"] - 1, layers, fields["decoder_sparse_step"]))
    sparse -= set(fields["mlp_only_layers"])
    return read_decoder(
        fields,
        attention=attention,
        rope=read_rope(fields, attention.head_width),
        layer_types=(FULL if window is None else SLIDING,) * layers,
        window=window,
        experts=ExpertsConfig(
            width=attention.width,
            experts=_count(fields),
            chosen=fields["num_experts_per_tok"],
            mlp_width=fields["moe_intermediate_size"],
            normalised=fields["norm_topk_prob"],
            shared_mlp_width=None,
        ),
        dense_layers=tuple(layer for layer in range(layers) if layer not in sparse),
    )


def _count(fields: Fields) -> int:
    # transformers 5 writes the second name.
    found = [fields[key] for key in ("num_experts", "num_local_experts") if key in fields]
    if len(set(found)) != 1:
        raise UserError(f"num_experts, num_local_experts: found {found or 'neither'}, expected one number")
    return found[0]
