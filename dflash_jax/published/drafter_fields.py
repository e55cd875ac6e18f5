"""What a published drafter's config.json says, whichever format it is in, and the keys that both formats share.

The formats are modules of their own: zlab_format.py and speculators_format.py, each a `read` from the parsed
config.json to `DrafterFields` and a `write` back. Both describe the drafter's layers as transformers' Qwen3Config
does. Reading is strict: a key is understood, or known to change nothing, or refused.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.models.drafter import FULL, SLIDING, DrafterConfig
from dflash_jax.models.rope import Llama3Scaling
from dflash_jax.models.yarn import Yarn
from dflash_jax.published.rope_fields import read_rope

MODEL_TYPE = "qwen3"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
REQUIRED = ("model_type", *SIZES, "hidden_act", "rms_norm_eps")
ROPE_KEYS = ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")
# vocab_size: the target's embedding rows.
UNDERSTOOD = {*REQUIRED, *ROPE_KEYS, "attention_bias", "layer_types", "sliding_window", "use_sliding_window"}
UNDERSTOOD |= {"max_window_layers", "vocab_size"}
# What transformers writes into any config.json, and what only training would read.
WITHOUT_EFFECT = {
    *(
        "_name_or_path",
        "auto_map",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "is_encoder_decoder",
        "label2id",
    ),
    *("output_attentions", "output_hidden_states", "problem_type", "return_dict", "torch_dtype"),
    *("transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("attention_dropout", "initializer_range", "max_position_embeddings", "tie_word_embeddings"),
}

Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TargetFacts:
    """What an export says of the target. place: its folder as the user names it, None where it is no folder;
    max_positions: the longest context, in tokens."""

    place: str | None
    architectures: tuple[str, ...]
    layers: int
    vocab: int
    max_positions: int
    tied: bool


@dataclasses.dataclass(frozen=True)
class DrafterFields:
    """A drafter in a published form.

    taps: target layers that feed it; vocab: rows of the target's embedding, None where it is not said;
    draft_vocab: tokens that the head covers, None for all; embedding_scale: factor of embedded tokens; softcap: c
    where logits are c tanh(l / c).
    """

    config: DrafterConfig
    taps: tuple[int, ...]
    vocab: int | None = None
    draft_vocab: int | None = None
    embedding_scale: float = 1.0
    softcap: float | None = None

    @property
    def tap_width(self) -> int:
        """The target's width, which is that of each tap."""
        return self.config.feature_width // len(self.taps)

    @property
    def has_own_ends(self) -> bool:
        """Whether embedding and head come with the drafter, because its width is not the target's."""
        return self.tap_width != self.config.width


def refuse_unknown(fields: Fields, known: Iterable[str], *, where: str = "") -> None:
    """Raise UserError, naming it, for a key that is not known; where: such as "dflash_config."."""
    if unknown := sorted(fields.keys() - set(known)):
        raise UserError(f"unknown key {where}{unknown[0]} = {fields[unknown[0]]!r}; remove it if it has no effect")


def whole(fields: Fields, key: str, *, low: int = 1) -> int:
    """The value of a key that must be a whole number from `low` on."""
    value = fields.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        kind = "a positive whole number" if low == 1 else f"a whole number from {low} on"
        raise UserError(f"{key}: found {value!r}, expected {kind}")
    return value


def layer_ids(value: Any, key: str) -> tuple[int, ...]:
    """The value of a key that must be a list of layers."""
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or not all(isinstance(layer, int) and layer >= 0 for layer in value):
        raise UserError(f"{key}: found {value!r}, expected a list of layer indices")
    return tuple(value)


def supported(fields: Fields, key: str, *allowed: Any) -> None:
    """Raise UserError unless the key is absent or has one of the values allowed."""
    if key in fields and fields[key] not in allowed:
        raise UserError(f"{key} {fields[key]!r} is not supported; supported: {', '.join(map(repr, allowed))}")


def read_layers(
    fields: Fields,
    *,
    taps: tuple[int, ...],
    tap_width: int,
    block_size: int,
    mask_token: int,
    is_causal: bool | None,
) -> DrafterConfig:
    """The drafter whose layers are described by Qwen3Config's keys; tap_width: the target's width.

    With a target of another width embedding and head are the drafter's own, so that its blocks have its width.
    """
    if missing := [key for key in REQUIRED if key not in fields]:
        raise UserError(f"{', '.join(missing)} missing; expected the configuration of a DFlash drafter")
    supported(fields, "model_type", MODEL_TYPE)
    supported(fields, "hidden_act", "silu")
    supported(fields, "attention_bias", False)
    sizes = {key: whole(fields, key) for key in SIZES}
    rope = read_rope(fields, sizes["head_dim"], kinds=("default", "yarn"))
    assert not isinstance(rope.scaling, Llama3Scaling)
    layer_types = _layer_types(fields)
    return DrafterConfig(
        width=sizes["hidden_size"],
        target_width=sizes["hidden_size"],
        mlp_width=sizes["intermediate_size"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
        head_width=sizes["head_dim"],
        feature_width=len(taps) * tap_width,
        block_size=block_size,
        mask_token=mask_token,
        rope_theta=rope.theta,
        norm_eps=fields["rms_norm_eps"],
        layer_types=layer_types,
        window=_window(fields) if SLIDING in layer_types else None,
        is_causal=is_causal,
        yarn=rope.scaling,
    )


def _layer_types(fields: Fields) -> tuple[str, ...]:
    layers, given = fields["num_hidden_layers"], fields.get("layer_types")
    if given is None:
        # Qwen3Config's rule for a configuration older than layer_types.
        first = whole(fields, "max_window_layers", low=0) if fields.get("use_sliding_window") else layers
        return tuple(SLIDING if layer >= first else FULL for layer in range(layers))
    if unknown := [kind for kind in given if kind not in (FULL, SLIDING)]:
        raise UserError(f"layer_types: {unknown[0]!r} is not supported; supported: {FULL!r}, {SLIDING!r}")
    if len(given) != layers:
        raise UserError(f"layer_types names {len(given)} layers, but num_hidden_layers is {layers}")
    return tuple(given)


def _window(fields: Fields) -> int:
    # TRAP: without this flag Qwen3Config drops sliding_window, and the layers would be causal but unlimited.
    if fields.get("use_sliding_window") is not True:
        raise UserError(
            f"use_sliding_window is {fields.get('use_sliding_window')}, but layer_types has sliding layers; "
            "it must be true for sliding_window to have an effect"
        )
    return whole(fields, "sliding_window")


def write_layers(fields: DrafterFields, target: TargetFacts, *, dtype: str) -> dict[str, Any]:
    """Qwen3Config's keys for a drafter: every one that some engine reads, RoPE in both spellings."""
    config = fields.config
    windowed = SLIDING in config.layer_types
    rope = {"rope_theta": config.rope_theta, **(_yarn_keys(config.yarn) or {"rope_type": "default"})}
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "initializer_range": 0.02,
        "intermediate_size": config.mlp_width,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": target.max_positions,
        "max_window_layers": len(config.layer_types),
        "model_type": MODEL_TYPE,
        "num_attention_heads": config.heads,
        "num_hidden_layers": len(config.layer_types),
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "rope_scaling": _yarn_keys(config.yarn),
        "rope_theta": config.rope_theta,
        "sliding_window": config.window if windowed else None,
        # A head of the drafter's own is no embedding of the target's.
        "tie_word_embeddings": target.tied and not fields.has_own_ends,
        "torch_dtype": dtype,
        "use_cache": True,
        "use_sliding_window": windowed,
        "vocab_size": target.vocab,
    }


def _yarn_keys(yarn: Yarn | None) -> dict[str, Any] | None:
    return yarn and {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "attention_factor": yarn.attention_factor,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
    }


def causality_differs(config: DrafterConfig) -> bool:
    """Whether is_causal says more than the default, which is causal in sliding layers only."""
    return any(config.causal(layer) != (kind == SLIDING) for layer, kind in enumerate(config.layer_types))
