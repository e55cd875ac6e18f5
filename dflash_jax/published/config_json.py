"""What the published configurations of all decoder families have in common, read strictly.

A key that is not there is an error, unless its absence has one meaning in every file of the family; a key whose
value this package would compute differently is refused. `read_decoder` gives what the keys shared by all families
say, and a family (families/) adds its own.
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.models.attention import AttentionConfig
from dflash_jax.models.decoder import FULL, LINEAR, SLIDING, DecoderConfig
from dflash_jax.models.rope import Rope
from dflash_jax.published.rope_fields import read_rope

Fields = Mapping[str, Any]


def text_fields(fields: Fields) -> Fields:
    """The configuration of the text model: the whole, or the part of it in a multimodal wrapper.

    Raises UserError where wrapper and text model differ in what both say of the head.
    """
    if "text_config" not in fields:
        return fields
    text = fields["text_config"]
    tied = [place["tie_word_embeddings"] for place in (text, fields) if "tie_word_embeddings" in place]
    if any(value != tied[0] for value in tied):
        raise UserError(
            f"tie_word_embeddings is {tied[1]} at the top level, but {tied[0]} in text_config; make them the same"
        )
    return {**text, **({"tie_word_embeddings": tied[0]} if tied else {})}


def supported(fields: Fields, key: str, *allowed: Any) -> None:
    """Raise UserError unless the value of a key is one of those allowed; KeyError if it is not there."""
    if fields[key] not in allowed:
        raise UserError(f"{key} {fields[key]!r} is not supported; supported: {', '.join(map(repr, allowed))}")


def read_attention(fields: Fields, **differences: Any) -> AttentionConfig:
    """Sizes of the attention; differences: what the family adds to them. Raises KeyError on a missing key."""
    heads = fields["num_attention_heads"]
    return AttentionConfig(
        width=fields["hidden_size"],
        heads=heads,
        kv_heads=fields["num_key_value_heads"],
        # Older configurations leave the head width to be derived.
        head_width=fields.get("head_dim") or fields["hidden_size"] // heads,
        norm_eps=fields["rms_norm_eps"],
        **differences,
    )


def read_decoder(
    fields: Fields, *, attention: AttentionConfig, rope: Rope, layer_types: tuple[str, ...], **differences: Any
) -> DecoderConfig:
    """A decoder's configuration; differences: what the family says of MLPs, windows and states."""
    supported(fields, "hidden_act", "silu")
    # A family without dense MLPs says so, and its files have no such key.
    mlp = {} if "mlp_width" in differences else {"mlp_width": fields["intermediate_size"]}
    return DecoderConfig(
        vocab=fields["vocab_size"],
        attention=attention,
        layer_types=layer_types,
        rope=rope,
        tied=fields["tie_word_embeddings"],
        **mlp,
        **differences,
    )


def read_layer_types(fields: Fields, *kinds: str) -> tuple[str, ...]:
    """The kinds of all layers, from `layer_types`. Raises UserError for another kind and for a wrong count."""
    given, layers = fields["layer_types"], fields["num_hidden_layers"]
    if unknown := [kind for kind in given if kind not in kinds]:
        raise UserError(
            f"layer_types: {unknown[0]!r} is not supported for {fields['model_type']}; "
            f"supported: {', '.join(map(repr, kinds))}"
        )
    if len(given) != layers:
        raise UserError(f"layer_types names {len(given)} layers, but num_hidden_layers is {layers}")
    return tuple(given)


def read_windowed(fields: Fields, attention: AttentionConfig) -> DecoderConfig:
    """A dense decoder whose layers may have sliding windows, by the rule that qwen2 and qwen3 share.

    With use_sliding_window, layers from max_window_layers on are sliding where layer_types is absent; without it,
    no layer may be.
    """
    layers, window = fields["num_hidden_layers"], None
    if fields["use_sliding_window"]:
        window = fields["sliding_window"]
    if fields.get("layer_types") is not None:
        kinds = read_layer_types(fields, FULL, SLIDING)
    else:
        first = layers if window is None else fields["max_window_layers"]
        kinds = tuple(SLIDING if layer >= first else FULL for layer in range(layers))
    if SLIDING in kinds and not isinstance(window, int):
        raise UserError(
            f"layer_types has sliding layers, which need a window, but use_sliding_window is "
            f"{fields['use_sliding_window']} and sliding_window {fields.get('sliding_window')}"
        )
    return read_decoder(
        fields,
        attention=attention,
        rope=read_rope(fields, attention.head_width),
        layer_types=kinds,
        window=window if SLIDING in kinds else None,
    )


def read_hybrid(fields: Fields) -> tuple[str, ...]:
    """The kinds of all layers of a hybrid: layer_types, or full attention at every full_attention_interval-th."""
    if fields.get("layer_types") is not None:
        return read_layer_types(fields, FULL, LINEAR)
    interval = fields["full_attention_interval"]
    return tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(fields["num_hidden_layers"]))
