"""What of a target goes to the drafter with its embedding and head."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from flax import nnx
from tiny_models import one_device

from dflash_jax.arguments import build, read_yaml
from dflash_jax.config import Recipe
from dflash_jax.experiment import Experiment


@pytest.mark.parametrize(
    "draft_tokens", [None, np.array([2, 5, 9], np.int32)], ids=["whole head", "draft vocabulary"]
)
def test_embedding_scale_and_softcap_of_the_target_are_carried(tmp_path, draft_tokens):
    recipe = tiny_runs.save_recipe(tmp_path, tiny_runs.save_chat_llama(tmp_path / "llama"))
    experiment = Experiment.open(build(Recipe, [("recipe", read_yaml(recipe.file) | {"out": "unused"})]))
    rows = jax.random.normal(jax.random.key(0), (264, experiment.drafter.width))
    table = nnx.Param(rows)
    gemma = types.SimpleNamespace(embedding_scale=6.0, logit_softcap=30.0)
    target = types.SimpleNamespace(embedding=table, head=table, config=gemma)
    frozen = experiment.frozen(target, one_device(), draft_tokens)
    dtype = frozen.embedding.dtype
    np.testing.assert_allclose(frozen.embed(jnp.asarray([3])), 6.0 * rows[3:4].astype(dtype), rtol=1e-2)
    hidden = 10.0 * rows[7:8].astype(dtype)
    plain = np.asarray(hidden.astype(jnp.float32) @ rows.astype(dtype).astype(jnp.float32).T)
    plain = plain if draft_tokens is None else plain[:, draft_tokens]
    assert np.abs(plain).max() > 40.0, "nothing would be bounded"
    np.testing.assert_allclose(frozen.logits(hidden), 30.0 * np.tanh(plain / 30.0), rtol=1e-2, atol=0.3)
