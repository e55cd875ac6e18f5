"""Which parameter a published tensor is: wrappers are unwrapped, experts stored one by one are parts of a whole.

model.language_model.X -> model.X           the text model of a multimodal wrapper
model.visual.X, mtp.X -> nothing            a wrapper's other parts, left out by name
lm_head.weight -> nothing                   where the head is tied, a file may repeat the embedding under its name
PREFIX.experts.3.up_proj.weight -> part 3 of PREFIX.experts.gate_up_proj
"""

import re

from dflash_jax.models.decoder import DecoderConfig
from dflash_jax.published.weights import Place

WRAPPED, UNWRAPPED = "model.language_model.", "model."
OTHER_PARTS = ("model.visual.", "mtp.")
EXPERT = re.compile(r"((?:.+\.)?experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def place(name: str, config: DecoderConfig) -> Place | None:
    """The place of a stored tensor among the parameters of a decoder, None where it is left out."""
    if name.startswith(OTHER_PARTS) or (config.tied and name == "lm_head.weight"):
        return None
    name = name.replace(WRAPPED, UNWRAPPED, 1) if name.startswith(WRAPPED) else name
    part = None if config.experts is None else expert_place(name, config.experts.mlp_width)
    return part or Place(name)


def expert_place(name: str, mlp_width: int) -> Place | None:
    """Where a single expert's tensor belongs among the stacked ones of all experts.

    ``PREFIX.experts.3.up_proj.weight`` is part (3, slice(F, 2F)) of ``PREFIX.experts.gate_up_proj``. None for any
    other name; the stacked names that some files use are already the parameters'.
    """
    found = EXPERT.fullmatch(name)
    if found is None:
        return None
    stack, expert, part = found[1], int(found[2]), found[3]
    if part == "down":
        return Place(f"{stack}.down_proj", (expert,))
    start = 0 if part == "gate" else mlp_width
    return Place(f"{stack}.gate_up_proj", (expert, slice(start, start + mlp_width)))
