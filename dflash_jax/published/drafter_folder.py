"""A published DFlash drafter on disk: config.json read strictly, and a stream of its tensors.

What a key means, and what its absence means, is as in z-lab's own loader (PyPI ``dflash`` 0.1.0, whose
configuration class is transformers' Qwen3Config). Whatever this package would compute differently is refused.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Self

from dflash_jax.errors import UserError
from dflash_jax.models.drafter import FULL, SLIDING, DrafterConfig
from dflash_jax.models.rope import Llama3Scaling
from dflash_jax.models.taps import published_taps
from dflash_jax.published import hub_folder
from dflash_jax.published.rope_fields import read_rope
from dflash_jax.published.stored import Stored

ARCHITECTURE = "DFlashDraftModel"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
REQUIRED = ("architectures", "model_type", *SIZES, "hidden_act", "rms_norm_eps")
# Keys for which only the values that change nothing are supported, and those values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "conv_kernel_size": (None,),
    "conv_group_size": (None,),
    "selector_rank": (None,),
    "selector_top_k": (None,),
    "projector_type": (None,),
    "input_embedding_scale": (1,),
    "output_multiplier": (1,),
    "final_logit_softcapping": (None, 0),
    "use_swa": (None, False),
    "swa_window_size": (None,),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1),
}
DFLASH_KEYS = {"block_size", "mask_token_id", "target_layer_ids", "target_hidden_size", "causal", *NEUTRAL}


@dataclasses.dataclass(frozen=True)
class DrafterFolder:
    """A drafter's folder; taps: the target layers that feed it."""

    path: pathlib.Path
    config: DrafterConfig
    taps: tuple[int, ...]

    @classmethod
    def open(cls, path: pathlib.Path) -> Self:
        """Read config.json, no weights. Raises UserError naming a key that is missing or not supported."""
        fields = hub_folder.read_config(path)
        try:
            config, taps = _read(fields)
        except UserError as error:
            raise UserError(f"{path}/config.json: {error}") from None
        return cls(path, config, taps)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """(name, tensor) of every tensor; the names are those of `Drafter`'s parameters."""
        return hub_folder.tensors(self.path)


def _read(fields: Mapping[str, Any]) -> tuple[DrafterConfig, tuple[int, ...]]:
    if missing := [key for key in REQUIRED if key not in fields]:
        raise UserError(f"{', '.join(missing)} missing; expected the configuration of a {ARCHITECTURE}")
    _check_kind(fields)
    width, layers, heads = (fields[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    # TRAP: the two defaults of z-lab's loader, taps by the published rule and blocks of 16; MASK has none.
    taps = _value(fields, "target_layer_ids")
    if taps is None:
        taps = published_taps(_whole(fields, "num_target_layers"), layers)
    if not isinstance(taps, list | tuple) or not all(isinstance(tap, int) for tap in taps):
        raise UserError(f"target_layer_ids: found {taps!r}, expected a list of layer indices")
    block_size = _value(fields, "block_size")
    if block_size is None:
        block_size = 16
    mask_token = _value(fields, "mask_token_id")
    for key, value in (("block_size", block_size), ("mask_token_id", mask_token)):
        if not isinstance(value, int) or value < 0:
            raise UserError(f"dflash_config.{key}: found {value!r}, expected a whole number")
    rope = read_rope(fields, fields["head_dim"], kinds=("default", "yarn"))
    assert not isinstance(rope.scaling, Llama3Scaling)
    layer_types = _layer_types(fields)
    config = DrafterConfig(
        width=width,
        target_width=width,
        mlp_width=fields["intermediate_size"],
        heads=heads,
        kv_heads=fields["num_key_value_heads"],
        head_width=fields["head_dim"],
        feature_width=len(taps) * width,
        block_size=block_size,
        mask_token=mask_token,
        rope_theta=rope.theta,
        norm_eps=fields["rms_norm_eps"],
        layer_types=layer_types,
        window=_window(fields) if SLIDING in layer_types else None,
        is_causal=_is_causal(fields),
        yarn=rope.scaling,
    )
    # Only vLLM reads it, for all layers at once; the folder must mean the same to every engine.
    everywhere = _dflash(fields).get("causal")
    if everywhere is not None and any(config.causal(layer) != everywhere for layer in range(layers)):
        raise UserError(f"dflash_config.causal is {everywhere}, but is_causal and layer_types say otherwise")
    return config, tuple(taps)


def _check_kind(fields: Mapping[str, Any]) -> None:
    if fields["architectures"] != [ARCHITECTURE]:
        raise UserError(f"architectures {fields['architectures']} is not supported; supported: {[ARCHITECTURE]}")
    for key, supported in (("model_type", "qwen3"), ("hidden_act", "silu")):
        if fields[key] != supported:
            raise UserError(f"{key} {fields[key]!r} is not supported; supported: {supported!r}")
    if unknown := sorted(_dflash(fields).keys() - DFLASH_KEYS):
        raise UserError(f"unknown key dflash_config.{unknown[0]}")
    for key, neutral in NEUTRAL.items():
        for place in (fields, _dflash(fields)):
            if key in place and place[key] not in neutral:
                raise UserError(f"{key} {place[key]!r} is not supported; supported: absent or {neutral[0]!r}")
    for key in SIZES:
        _whole(fields, key)
    if (_value(fields, "target_hidden_size") or fields["hidden_size"]) != fields["hidden_size"]:
        raise UserError(
            f"target_hidden_size {_value(fields, 'target_hidden_size')} is not supported; "
            f"supported: the drafter's own width {fields['hidden_size']}"
        )


def _dflash(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return fields.get("dflash_config") or {}


def _value(fields: Mapping[str, Any], key: str) -> Any:
    """The value in dflash_config or at the top level, None if in neither; both may be there if they agree."""
    found = [place[key] for place in (_dflash(fields), fields) if key in place]
    if any(value != found[0] for value in found):
        raise UserError(f"{key} is {found[0]!r} in dflash_config, but {found[1]!r} at the top level")
    return found[0] if found else None


def _whole(fields: Mapping[str, Any], key: str) -> int:
    value = fields.get(key)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{key}: found {value!r}, expected a positive whole number")
    return value


def _layer_types(fields: Mapping[str, Any]) -> tuple[str, ...]:
    layers, given = fields["num_hidden_layers"], fields.get("layer_types")
    if given is None:
        # Qwen3Config's rule for a configuration older than layer_types.
        first = _whole(fields, "max_window_layers") if fields.get("use_sliding_window") else layers
        return tuple(SLIDING if layer >= first else FULL for layer in range(layers))
    if unknown := [kind for kind in given if kind not in (FULL, SLIDING)]:
        raise UserError(f"layer_types: {unknown[0]!r} is not supported; supported: {FULL!r}, {SLIDING!r}")
    if len(given) != layers:
        raise UserError(f"layer_types names {len(given)} layers, but num_hidden_layers is {layers}")
    return tuple(given)


def _window(fields: Mapping[str, Any]) -> int:
    # TRAP: without this flag Qwen3Config drops sliding_window, and the layers would be causal but unlimited.
    if fields.get("use_sliding_window") is not True:
        raise UserError(
            f"use_sliding_window is {fields.get('use_sliding_window')}, but layer_types has sliding layers; "
            "it must be true for sliding_window to have an effect"
        )
    return _whole(fields, "sliding_window")


def _is_causal(fields: Mapping[str, Any]) -> bool | None:
    value = fields.get("is_causal")
    if value is not None and not isinstance(value, bool):
        raise UserError(f"is_causal: found {value!r}, expected true, false or null (sliding layers only)")
    return value
