"""A drafter's first weights out of its target's last layers.

layers     the target's last ones; q_norm and k_norm are ones where the target has none
norm       the target's final norm, since the target's head reads what it gives
hidden_norm  the mean of the copied layers' input norms: the context goes straight to their k_proj and v_proj
fc         [0 .. 0 I] + noise: the last tap passes through, and the other taps get a small say in it
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from dflash_jax.models.drafter import DrafterConfig
from dflash_jax.published.stored import Stored

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# Of unit features, the noise of fc makes a tenth of what the identity passes on, whatever the widths.
NOISE = 0.1


def copied_layers(
    tensors: Iterable[tuple[str, Stored]], config: DrafterConfig, *, target_layers: int, seed: int
) -> Iterator[tuple[str, Stored]]:
    """(drafter's name, tensor) of every weight of a drafter, from the stream of its target's tensors.

    A tensor of a copied layer that a drafter lacks comes through under its name.
    """
    layers = len(config.layer_types)
    head_norms = [f"layers.{layer}.self_attn.{x}_norm.weight" for layer in range(layers) for x in "qk"]
    input_norms: list[Stored] = []
    for name, stored in tensors:
        match = LAYER.fullmatch(name)
        layer = int(match[1]) - (target_layers - layers) if match else -1
        if name == "model.norm.weight":
            yield "norm.weight", stored
        if match and layer >= 0:
            renamed = f"layers.{layer}.{match[2]}"
            if match[2] == "input_layernorm.weight":
                input_norms.append(stored)
            if renamed in head_norms:
                head_norms.remove(renamed)
            yield renamed, stored
    yield from ((name, Stored.of(np.ones(config.head_width, np.float32))) for name in head_norms)
    yield "hidden_norm.weight", _made((config.width,), lambda: _mean(input_norms))
    shape = (config.width, config.feature_width)
    yield "fc.weight", _made(shape, lambda: _last_tap_and_noise(shape, seed=seed))


def _made(shape: tuple[int, ...], make: Callable[[], np.ndarray]) -> Stored:
    """A float32 array that is made when it is first read."""
    made = functools.cache(make)
    return Stored(shape, "F32", lambda index: made()[index])


def _mean(norms: list[Stored]) -> np.ndarray:
    return np.sum([norm.read(()).astype(np.float32) / len(norms) for norm in norms], axis=0)


def _last_tap_and_noise(shape: tuple[int, int], *, seed: int) -> np.ndarray:
    width, feature_width = shape
    noise = np.random.default_rng(seed).standard_normal(shape, np.float32)
    fc = noise * np.float32(NOISE / feature_width**0.5)
    fc[:, -width:] += np.eye(width, dtype=np.float32)
    return fc
