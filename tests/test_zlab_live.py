"""The drafter against z-lab's published package itself, on the same folder: float32, every kind of layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import load_drafter, random_drafter, save_drafter

from dflash_jax.models.drafter import FULL, SLIDING, Drafter
from dflash_jax.models.yarn import Yarn

KINDS = {
    "full": {"layer_types": (FULL, FULL), "window": None},
    "full, causal": {"layer_types": (FULL, FULL), "window": None, "is_causal": True},
    "sliding": {"layer_types": (SLIDING, FULL), "window": 7},
    "sliding, both ways": {"layer_types": (SLIDING, SLIDING), "window": 7, "is_causal": False},
    "sliding, all causal": {"layer_types": (SLIDING, FULL), "window": 7, "is_causal": True},
    "YaRN": {"layer_types": (FULL, FULL), "window": None, "yarn": Yarn(4.0, 16, 1.3, beta_fast=4.0)},
}
CONTEXT, BLOCK = 19, 5
AT = np.broadcast_to(np.arange(CONTEXT + BLOCK), (2, CONTEXT + BLOCK))  # positions of context and block


@pytest.mark.parametrize("name", KINDS)
def test_forward_equals_the_published_package(tmp_path, name):
    import torch
    from dflash import DFlashDraftModel

    path = save_drafter(tmp_path / "drafter", random_drafter(17, **KINDS[name]), taps=(1, 3))
    theirs = DFlashDraftModel.from_pretrained(path, dtype=torch.float32).eval()
    assert (theirs.block_size, theirs.mask_token_id, theirs.target_layer_ids) == (BLOCK, 6, [1, 3])
    ours = load_drafter(path)

    block, features = random_block(np.random.default_rng(4))
    np.testing.assert_allclose(
        drafted(ours, block, features), by_torch(theirs, block, features), rtol=0, atol=1e-5
    )


def test_a_drafter_of_another_width_is_the_published_one_between_two_projections(tmp_path):
    import torch
    from dflash import DFlashDraftModel

    random = np.random.default_rng(8)
    inner = random_drafter(17, width=24, target_width=24, feature_width=48)
    theirs = DFlashDraftModel.from_pretrained(
        save_drafter(tmp_path / "drafter", inner, taps=(1, 3)), dtype=torch.float32
    ).eval()
    # z-lab's class cannot say that features, embedding and head are wider than the drafter, so torch is told here.
    fc, down, up = (
        random.standard_normal(shape).astype(np.float32) / 6 for shape in ((24, 72), (24, 36), (36, 24))
    )
    theirs.fc.weight = torch.nn.Parameter(torch.tensor(fc))
    ours = random_drafter(17, width=24)
    nnx.update(ours, nnx.filter_state(nnx.state(inner), lambda path, leaf: path[0] != "fc"))
    for layer, matrix in ((ours.fc, fc), (ours.embed_proj, down), (ours.head_proj, up)):
        layer.weight[...] = jnp.asarray(matrix)

    block, features = random_block(random)
    expected = by_torch(theirs, block @ down.T, features) @ up.T
    np.testing.assert_allclose(drafted(ours, block, features), expected, rtol=0, atol=1e-5)


def random_block(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two rows of an embedded block [B, W, E] and of the features before it [B, S, T * E]."""
    shapes = ((2, BLOCK, 36), (2, CONTEXT, 72))
    block, features = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    return block, features


def by_torch(theirs: Any, block: np.ndarray, features: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return theirs(
            position_ids=torch.tensor(AT),
            noise_embedding=torch.tensor(block),
            target_hidden=torch.tensor(features),
        ).numpy()


def drafted(drafter: Drafter, block: np.ndarray, features: np.ndarray) -> jax.Array:
    """[B, W, E] of one block a row behind its whole context."""
    before, slots = jnp.asarray(AT[:, :CONTEXT]), jnp.asarray(AT[:, None, CONTEXT:])
    return jax.jit(
        lambda block, features: drafter(
            block,
            slots,
            drafter.context(features, before),
            visible=jnp.ones((2, 1, CONTEXT), bool),
            context_positions=before,
        )
    )(jnp.asarray(block[:, None]), jnp.asarray(features))[:, 0]
