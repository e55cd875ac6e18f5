"""The RoPE of a published configuration, in the spelling of transformers 4, of transformers 5, or in both.

4: rope_theta, rope_scaling {rope_type | type, factor, ..} or null
5: rope_parameters {rope_theta, rope_type, factor, ..}
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.models.yarn import Yarn, attention_factor

PLAIN_KEYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
YARN_KEYS = {
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


def read_rope(fields: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """(theta, YaRN or None) of a config.json whose heads are rotated in full.

    Raises UserError for a missing theta, a rope type or key that is not supported, and two spellings that
    contradict each other.
    """
    inside = fields.get("rope_parameters") or {}
    theta = fields.get("rope_theta", inside.get("rope_theta"))
    if theta is None:
        raise UserError("rope_theta missing; expected it at the top level or in rope_parameters")
    # A key rope_scaling that is null says that there is none; a key that is absent says nothing.
    scaling = (fields.get("rope_scaling") or {}) if "rope_scaling" in fields or not inside else inside
    found = [_read({**scaling, "rope_theta": theta})]
    if inside:
        found.append(_read({"rope_theta": theta, **inside}))
    if found[0] != found[-1]:
        raise UserError("rope_theta and rope_scaling contradict rope_parameters; make them say the same")
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"partial_rotary_factor {fields['partial_rotary_factor']} is not supported; supported: 1.0"
        )
    return found[0]


def _read(rope: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise UserError(f"rope_type {kind!r} is not supported; supported: 'default', 'yarn'")
    if unknown := sorted(rope.keys() - PLAIN_KEYS - (YARN_KEYS if kind == "yarn" else set())):
        raise UserError(f"RoPE key {unknown[0]!r} is not supported for rope_type {kind!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported; supported: 1.0")
    return float(rope["rope_theta"]), _yarn(rope) if kind == "yarn" else None


def _yarn(rope: Mapping[str, Any]) -> Yarn:
    # transformers would fall back on max_position_embeddings, which in published files is the stretched length.
    for key in ("factor", "original_max_position_embeddings"):
        if not isinstance(rope.get(key), int | float) or rope[key] < 1:
            raise UserError(f"{key}: found {rope.get(key)!r}, expected a number from 1 on (rope_type 'yarn')")
    factor = float(rope["factor"])
    given = rope.get("attention_factor")
    if given is None:
        given = attention_factor(factor, mscale=rope.get("mscale"), mscale_all_dim=rope.get("mscale_all_dim"))
    return Yarn(
        factor=factor,
        original_length=int(rope["original_max_position_embeddings"]),
        attention_factor=float(given),
        # The three defaults below are transformers'.
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=rope.get("truncate", True),
    )
