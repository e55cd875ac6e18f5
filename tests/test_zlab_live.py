"""The drafter against z-lab's published package itself, on the same folder: float32, every kind of layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import load_drafter, random_drafter, save_drafter

from dflash_jax.models.drafter import FULL, SLIDING
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


@pytest.mark.parametrize("name", KINDS)
def test_forward_equals_the_published_package(tmp_path, name):
    import torch
    from dflash import DFlashDraftModel

    path = save_drafter(tmp_path / "drafter", random_drafter(17, **KINDS[name]), taps=(1, 3))
    theirs = DFlashDraftModel.from_pretrained(path, dtype=torch.float32).eval()
    assert (theirs.block_size, theirs.mask_token_id, theirs.target_layer_ids) == (BLOCK, 6, [1, 3])
    ours = load_drafter(path)

    random = np.random.default_rng(4)
    features = random.standard_normal((2, CONTEXT, 72)).astype(np.float32)
    block = random.standard_normal((2, BLOCK, 36)).astype(np.float32)
    at = np.broadcast_to(np.arange(CONTEXT + BLOCK), (2, CONTEXT + BLOCK))
    with torch.no_grad():
        expected = theirs(
            position_ids=torch.tensor(at),
            noise_embedding=torch.tensor(block),
            target_hidden=torch.tensor(features),
        )
    before, slots = jnp.asarray(at[:, :CONTEXT]), jnp.asarray(at[:, None, CONTEXT:])
    found = jax.jit(
        lambda block, features: ours(
            block,
            slots,
            ours.context(features, before),
            visible=jnp.ones((2, 1, CONTEXT), bool),
            context_positions=before,
        )
    )(jnp.asarray(block[:, None]), jnp.asarray(features))
    np.testing.assert_allclose(found[:, 0], expected.numpy(), rtol=0, atol=1e-5)
