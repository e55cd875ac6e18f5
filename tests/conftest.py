"""Every test runs on eight virtual CPU devices, and warnings are errors (pyproject.toml)."""

import jax
import pytest
from absl import flags

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
flags.FLAGS.mark_as_parsed()

import tiny_models  # noqa: E402  (it may touch jax, which must know its devices by then)
import tiny_runs  # noqa: E402


@pytest.fixture(scope="session")
def plain_llama(tmp_path_factory) -> tiny_models.HubLlama:
    """Untied, without biases, heads wider than width / heads."""
    return tiny_models.save_llama(tmp_path_factory.mktemp("plain") / "llama", seed=1)


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory) -> tiny_models.HubLlama:
    """Tied, with every bias, heads as wide as width / heads."""
    return tiny_models.save_llama(
        tmp_path_factory.mktemp("tied") / "llama",
        seed=2,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        head_dim=6,
    )


@pytest.fixture(scope="session")
def few_tokens_llama(tmp_path_factory) -> tiny_models.HubLlama:
    """Only seven tokens, so that even a random drafter is right now and then."""
    return tiny_models.save_llama(tmp_path_factory.mktemp("few") / "llama", seed=3, vocab_size=7)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> tiny_runs.TinyRecipe:
    """A whole training that is small enough for tests, with a target of its own in each module."""
    root = tmp_path_factory.mktemp("runs")
    return tiny_runs.save_recipe(root, tiny_runs.save_chat_llama(root / "llama"))
