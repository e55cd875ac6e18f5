"""What drafter.init means, and whether it fits the recipe: random, the target's last layers, or a folder."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from dflash_jax.config import DrafterSection
from dflash_jax.errors import UserError, named
from dflash_jax.models.drafter import DrafterConfig
from dflash_jax.models.target import TargetConfig
from dflash_jax.published.drafter_folder import DrafterFolder

RANDOM, TARGET = "random", "target"
# Families whose layers are built as a drafter's: plain norm weights, SwiGLU, nothing else.
COPIED_FAMILIES = ("llama", "qwen3")


def open_folder(section: DrafterSection, target: TargetConfig) -> DrafterFolder | None:
    """The folder that drafter.init names, or None where it is `random` or `target`.

    Raises UserError unless it fits the target and borrows the target's embedding and head, as training does. A run
    needs the folder's config.json whenever it is opened, for what its recipe leaves null.
    """
    if section.init in (RANDOM, TARGET):
        return None
    path = pathlib.Path(section.init)
    if not path.is_dir():
        raise UserError(
            f"drafter.init: found {section.init!r}, allowed: {RANDOM}, {TARGET}, or a folder with config.json and "
            "model.safetensors (to go on with a run whose folder is gone: random, and by name every key of "
            "drafter that the folder filled)"
        )
    with named("drafter.init"):
        folder = DrafterFolder.open(path)
    if misfits := folder.misfits(target):
        raise UserError(
            f"drafter.init: {path} is not for target.path: {'; '.join(misfits)}; start from another folder, or "
            f"from drafter.init={RANDOM}"
        )
    if folder.fields.has_own_ends:
        raise UserError(
            f"drafter.init: {path} has an embedding and a head of its own, made from a drafter of width "
            f"{folder.config.width} and its projections, which training needs; go on with the run itself"
        )
    return folder


def check_weights(folder: DrafterFolder | None) -> None:
    """Raise UserError where the files of the weights that a fresh run starts from are missing or damaged.

    Only their headers are read.
    """
    if folder is not None:
        with named("drafter.init"):
            folder.tensors()


def filled(section: DrafterSection, folder: DrafterFolder) -> DrafterSection:
    """The section with the folder's values where it says null."""
    theirs = _by_key(folder.config, folder.taps)
    if len(theirs["layer_types"]) != section.layers:
        del theirs["layer_types"]  # they have no meaning for another number of layers, which `agreed` will name
    return dataclasses.replace(
        section, **{key: value for key, value in theirs.items() if getattr(section, key, value) is None}
    )


def agreed(
    config: DrafterConfig, folder: DrafterFolder, *, taps: tuple[int, ...], section: DrafterSection
) -> DrafterConfig:
    """The drafter of both recipe and folder; what no key of a recipe says is the folder's.

    config, taps: as resolved from the filled section; section: the recipe's own. Raises UserError that lists
    every difference except in block_size, which any drafter may be trained for.
    """
    theirs = folder.config
    config = dataclasses.replace(config, norm_eps=theirs.norm_eps)
    if config.yarn and theirs.yarn:
        named = {"factor": config.yarn.factor, "original_length": config.yarn.original_length}
        config = dataclasses.replace(config, yarn=dataclasses.replace(theirs.yarn, **named))
    ours, found = _by_key(config, taps), _by_key(theirs, folder.taps)
    if section.taps is None:
        ours["tap_count"], found["tap_count"] = section.tap_count, len(folder.taps)
    if section.layer_types is None:
        del ours["layer_types"]
    differences = [
        f"drafter.{key}: the recipe says {json.dumps(value)}, {folder.path} has {json.dumps(found[key])}"
        for key, value in ours.items()
        if value != found[key]
    ]
    if differences:
        raise UserError("; ".join(differences))
    return config


def _by_key(config: DrafterConfig, taps: tuple[int, ...]) -> dict[str, Any]:
    """What shapes or gives meaning to the weights, by the recipe's keys where they exist."""
    yarn = config.yarn
    return {
        "width": config.width,
        "layers": len(config.layer_types),
        "taps": list(taps),
        "mask_token": config.mask_token,
        "mlp_width": config.mlp_width,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_width": config.head_width,
        "rope_theta": config.rope_theta,
        "rope_factor": yarn and yarn.factor,
        "rope_original_length": yarn and yarn.original_length,
        "layer_types": list(config.layer_types),
        "sliding_window": config.window,
        "is_causal": config.is_causal,
    }


def check_copies(config: DrafterConfig, target: TargetConfig, fields: Mapping[str, Any]) -> None:
    """Raise UserError unless the target's last layers fit the drafter. fields: the target's configuration."""
    if fields["model_type"] not in COPIED_FAMILIES:
        raise UserError(
            f"drafter.init: {TARGET} is not supported for targets of model_type {fields['model_type']!r}; "
            f"supported: {', '.join(COPIED_FAMILIES)}; use {RANDOM}"
        )
    if biased := [key for key in ("attention_bias", "mlp_bias") if fields.get(key)]:
        raise UserError(f"drafter.init: {TARGET} copies no biases, and the target has {biased[0]}; use {RANDOM}")
    if len(config.layer_types) > target.layers:
        raise UserError(
            f"drafter.layers: found {len(config.layer_types)}, but drafter.init={TARGET} copies layers and "
            f"the target has {target.layers}"
        )
    for key in ("width", "mlp_width", "heads", "kv_heads", "head_width"):
        if getattr(config, key) != getattr(target, key):
            raise UserError(
                f"drafter.{key}: found {getattr(config, key)}, but drafter.init={TARGET} copies layers with "
                f"{getattr(target, key)}; set it to null, or use drafter.init={RANDOM}"
            )
