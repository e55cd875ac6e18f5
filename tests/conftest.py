"""Every test runs on eight virtual CPU devices, and warnings are errors (pyproject.toml)."""

import pathlib
from collections.abc import Iterator

import jax
import pytest
from absl import flags
from jax.experimental.compilation_cache import compilation_cache

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


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory) -> pathlib.Path:
    """Where the programs are that a test process has compiled."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compiled_once(compiled_programs) -> Iterator[dict[str, str]]:
    """For trainings with the same programs, which the first one that needs them compiles.

    The result is the environment for a process that is to use them too.
    """
    changes = {
        "jax_compilation_cache_dir": str(compiled_programs),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in changes}
    for name, value in changes.items():
        jax.config.update(name, value)
    yield {name.upper(): str(value) for name, value in changes.items()}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
