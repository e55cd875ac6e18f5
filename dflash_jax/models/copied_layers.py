"""A drafter's first weights out of its target's last layers.

layers     the target's last ones; q_norm and k_norm are ones where the target has none
norm       the target's final norm, since the target's head reads what it gives
hidden_norm  the mean of the copied layers' input norms: the context goes straight to their k_proj and v_proj
fc         [0 .. 0 I] + noise: the last tap passes through, and the other taps get a small say in it
"""

import re
from collections.abc import Iterable, Iterator

import numpy as np

from dflash_jax.models.drafter import DrafterConfig

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# Of unit features, the noise of fc makes a tenth of what the identity passes on, whatever the widths.
NOISE = 0.1


def copied_layers(
    tensors: Iterable[tuple[str, np.ndarray]], config: DrafterConfig, *, target_layers: int, seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    """(drafter's name, array) of every weight of a drafter, from the stream of its target's tensors.

    Nothing but norms is kept; a tensor of a copied layer that a drafter lacks comes through under its name.
    """
    layers = len(config.layer_types)
    head_norms = [f"layers.{layer}.self_attn.{x}_norm.weight" for layer in range(layers) for x in "qk"]
    input_norm = np.zeros(config.width, np.float32)
    for name, array in tensors:
        match = LAYER.fullmatch(name)
        layer = int(match[1]) - (target_layers - layers) if match else -1
        if name == "model.norm.weight":
            yield "norm.weight", array
        if match and layer >= 0:
            renamed = f"layers.{layer}.{match[2]}"
            if match[2] == "input_layernorm.weight":
                input_norm += array.astype(np.float32) / layers
            if renamed in head_norms:
                head_norms.remove(renamed)
            yield renamed, array
    yield from ((name, np.ones(config.head_width, np.float32)) for name in head_norms)
    yield "hidden_norm.weight", input_norm
    noise = np.random.default_rng(seed).standard_normal((config.width, config.feature_width), np.float32)
    fc = noise * np.float32(NOISE / config.feature_width**0.5)
    fc[:, -config.width :] += np.eye(config.width, dtype=np.float32)
    yield "fc.weight", fc
