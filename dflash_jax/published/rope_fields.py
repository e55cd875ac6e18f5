"""The RoPE of a published configuration, in the spelling of transformers 4, of transformers 5, or in both.

4: rope_theta, partial_rotary_factor, rope_scaling {rope_type | type, factor, ..} or null
5: rope_parameters {rope_theta, partial_rotary_factor, rope_type, factor, ..}
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.models.rope import Llama3Scaling, Rope
from dflash_jax.models.yarn import Yarn, attention_factor

PLAIN_KEYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
# Sections of image positions; the three positions of a text token are equal, so that they change nothing.
SECTION_KEYS = {"mrope_section", "mrope_interleaved"}
SCALING_KEYS: dict[str, set[str]] = {
    "default": set(),
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}


def read_rope(
    fields: Mapping[str, Any],
    head_width: int,
    *,
    kinds: tuple[str, ...] = tuple(SCALING_KEYS),
    partial: bool = False,
    sections: bool = False,
) -> Rope:
    """The RoPE of a config.json whose heads have `head_width` channels.

    kinds: supported rope types; partial: whether a part of a head may be rotated, which the configuration must
    then say; sections: whether sections of image positions may be there. Raises UserError for whatever is missing
    or not supported, and for two spellings that contradict each other.
    """
    inside = fields.get("rope_parameters") or {}
    theta = fields.get("rope_theta", inside.get("rope_theta"))
    if theta is None:
        raise UserError("rope_theta missing; expected it at the top level or in rope_parameters")
    # A key rope_scaling that is null says that there is none; a key that is absent says nothing.
    scaling = (fields.get("rope_scaling") or {}) if "rope_scaling" in fields or not inside else inside
    extra = SECTION_KEYS if sections else set()
    found = [_scaling({**scaling, "rope_theta": theta}, kinds, extra)]
    if inside:
        found.append(_scaling({"rope_theta": theta, **inside}, kinds, extra))
    if found[0] != found[-1]:
        raise UserError("rope_theta and rope_scaling contradict rope_parameters; make them say the same")
    share = fields.get("partial_rotary_factor", inside.get("partial_rotary_factor", None if partial else 1.0))
    if share is None:
        raise UserError("partial_rotary_factor missing; expected it at the top level or in rope_parameters")
    if (share != 1.0 and not partial) or inside.get("partial_rotary_factor", share) != share:
        raise UserError(
            f"partial_rotary_factor {inside.get('partial_rotary_factor', share)} is not supported; supported: "
            + (f"{share}, as at the top level" if partial else "1.0")
        )
    width = int(head_width * share)
    if width < 2 or width % 2:
        raise UserError(
            f"partial_rotary_factor {share} of {head_width} channels is not an even number of channels"
        )
    return Rope(found[0][0], width, found[0][1])


def _scaling(
    rope: Mapping[str, Any], kinds: tuple[str, ...], extra: set[str]
) -> tuple[float, Yarn | Llama3Scaling | None]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in kinds:
        raise UserError(f"rope_type {kind!r} is not supported; supported: {', '.join(map(repr, kinds))}")
    if unknown := sorted(rope.keys() - PLAIN_KEYS - SCALING_KEYS[kind] - extra):
        raise UserError(f"RoPE key {unknown[0]!r} is not supported for rope_type {kind!r}")
    readers = {"yarn": _yarn, "llama3": _llama3}
    return float(rope["rope_theta"]), readers[kind](rope) if kind in readers else None


def _number(rope: Mapping[str, Any], key: str, kind: str) -> float:
    if not isinstance(rope.get(key), int | float) or rope[key] < 1:
        raise UserError(f"{key}: found {rope.get(key)!r}, expected a number from 1 on (rope_type {kind!r})")
    return float(rope[key])


def _llama3(rope: Mapping[str, Any]) -> Llama3Scaling:
    keys = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    factor, length, low, high = (_number(rope, key, "llama3") for key in keys)
    if low >= high:
        raise UserError(f"low_freq_factor: found {low}, expected less than high_freq_factor {high}")
    return Llama3Scaling(factor, int(length), low, high)


def _yarn(rope: Mapping[str, Any]) -> Yarn:
    # transformers would fall back on max_position_embeddings, which in published files is the stretched length.
    factor, length = (_number(rope, key, "yarn") for key in ("factor", "original_max_position_embeddings"))
    given = rope.get("attention_factor")
    if given is None:
        given = attention_factor(factor, mscale=rope.get("mscale"), mscale_all_dim=rope.get("mscale_all_dim"))
    return Yarn(
        factor=factor,
        original_length=int(length),
        attention_factor=float(given),
        # The three defaults below are transformers'.
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=rope.get("truncate", True),
    )
