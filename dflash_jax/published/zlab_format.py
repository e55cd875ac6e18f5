"""z-lab's format: what config.json of a `DFlashDraftModel` means, and how one is written.

What a key means, and what its absence means, is as in z-lab's own loader (PyPI ``dflash`` 0.1.0, whose
configuration class is transformers' Qwen3Config). vLLM, SGLang and tpu-inference read the same file, each looking
for some keys in a place of its own, so that a written one says them in all places.
"""

from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.models.taps import published_taps
from dflash_jax.published.drafter_fields import (
    UNDERSTOOD,
    WITHOUT_EFFECT,
    DrafterFields,
    Fields,
    TargetFacts,
    causality_differs,
    layer_ids,
    read_layers,
    refuse_unknown,
    supported,
    whole,
    write_layers,
)

ARCHITECTURE = "DFlashDraftModel"
# Keys that may stand in dflash_config, at the top level, or in both.
EITHER = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "target_hidden_size",
    "input_embedding_scale",
    "final_logit_softcapping",
)
# Those for which only the values that change nothing are supported, and these values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "conv_kernel_size": (None,),
    "conv_group_size": (None,),
    "selector_rank": (None,),
    "selector_top_k": (None,),
    "projector_type": (None,),
    "output_multiplier": (1, None),
    "use_swa": (False, None),
    "swa_window_size": (None,),
    "attention_sink_bias": (False, None),
    "attention_value_scale": (1, None),
    "sample_from_anchor": (False, None),
}


def read(fields: Fields) -> DrafterFields:
    """The drafter that a config.json describes. Raises UserError for a key that is missing or not supported."""
    if "architectures" not in fields:
        raise UserError(f"architectures missing; expected the configuration of a {ARCHITECTURE}")
    supported(fields, "architectures", [ARCHITECTURE])
    inside = fields.get("dflash_config") or {}
    refuse_unknown(inside, ("causal", *EITHER, *NEUTRAL), where="dflash_config.")
    known = ("architectures", "dflash_config", "is_causal", "num_target_layers")
    refuse_unknown(fields, (*known, *UNDERSTOOD, *WITHOUT_EFFECT, *EITHER, *NEUTRAL))
    for key, neutral in NEUTRAL.items():
        for place in (fields, inside):
            supported(place, key, *neutral)
    found = {key: _value(fields, key) for key in EITHER}
    # TRAP: the two defaults of z-lab's loader, taps by the published rule and blocks of 16; MASK has none.
    if found["target_layer_ids"] is None:
        layers = whole(fields, "num_hidden_layers")
        found["target_layer_ids"] = published_taps(whole(fields, "num_target_layers"), layers)
    if found["block_size"] is None:
        found["block_size"] = 16
    if found["target_hidden_size"] is None:
        found["target_hidden_size"] = whole(fields, "hidden_size")
    taps = layer_ids(found["target_layer_ids"], "target_layer_ids")
    config = read_layers(
        fields,
        taps=taps,
        tap_width=whole(found, "target_hidden_size"),
        block_size=whole(found, "block_size"),
        mask_token=whole(found, "mask_token_id", low=0),
        is_causal=_truth(fields, "is_causal"),
    )
    # Only vLLM reads it, for all layers at once; the folder must mean the same to every engine.
    everywhere = inside.get("causal")
    if everywhere is not None and any(
        config.causal(layer) != everywhere for layer in range(len(config.layer_types))
    ):
        raise UserError(f"dflash_config.causal is {everywhere}, but is_causal and layer_types say otherwise")
    return DrafterFields(
        config,
        taps,
        vocab=fields.get("vocab_size"),
        embedding_scale=_factor(found, "input_embedding_scale") or 1.0,
        softcap=_factor(found, "final_logit_softcapping"),
    )


def _value(fields: Fields, key: str) -> Any:
    """The value in dflash_config or at the top level, None if in neither; both may be there if they agree."""
    found = [place[key] for place in (fields.get("dflash_config") or {}, fields) if key in place]
    if any(value != found[0] for value in found):
        raise UserError(f"{key} is {found[0]!r} in dflash_config, but {found[1]!r} at the top level")
    return found[0] if found else None


def _truth(fields: Fields, key: str) -> bool | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{key}: found {value!r}, expected true, false or null (sliding layers only)")
    return value


def _factor(fields: Fields, key: str) -> float | None:
    """A positive number, or None where there is none; 0 counts as none, as in z-lab's loader."""
    value = fields[key]
    if value is not None and (not isinstance(value, int | float) or value < 0):
        raise UserError(f"{key}: found {value!r}, expected a positive number")
    return float(value) if value else None


def write(fields: DrafterFields, target: TargetFacts, *, dtype: str) -> dict[str, Any]:
    """config.json for a drafter that drafts over the target's whole vocabulary; dtype: of the weights."""
    config, taps = fields.config, list(fields.taps)
    inside: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "target_layer_ids": taps,
    }
    top = {
        "architectures": [ARCHITECTURE],
        "num_target_layers": target.layers,
        **inside,
        **write_layers(fields, target, dtype=dtype),
    }
    # TRAP: causal holds for all layers, so that it may never stand beside the default, which differs by layer.
    if causality_differs(config):
        top["is_causal"] = inside["causal"] = config.is_causal
    if fields.has_own_ends:
        top["target_hidden_size"] = inside["target_hidden_size"] = fields.tap_width
    if fields.embedding_scale != 1:
        inside["input_embedding_scale"] = fields.embedding_scale
    if fields.softcap is not None:
        inside["final_logit_softcapping"] = fields.softcap
    return {**top, "dflash_config": inside}
