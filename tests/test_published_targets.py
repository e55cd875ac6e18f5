"""Every family against numbers that transformers 5.15 gave, from folders in the layouts of the hub."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from published_targets import NAMES, TARGETS, reference, write_target
from tiny_models import load_target, quick

from dflash_jax.decode.generate import generate
from dflash_jax.published.targets import TargetFiles

LONG = ("llama", "qwen3", "qwen3_5")
GREEDY = (*LONG, "llama3_rope", "qwen3_moe", "qwen3_swa_yarn_bias")
RESPELLED = [name for name in NAMES if (TARGETS / name / "config.hub.json").exists()]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(target, what transformers computed) by name, each loaded once."""

    @functools.cache
    def opened(name):
        return load_target(write_target(tmp_path_factory.mktemp("published") / name, name)), reference(name)

    return opened


@functools.partial(quick, static_argnames="taps")
def run(target, tokens, segments, taps):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    features, last = target.hidden(tokens, positions, segment_ids=segments, taps=taps)
    return features, last, target.logits(last)


def test_there_is_one_of_each_family_and_layout():
    assert (
        *("llama", "llama3_rope", "qwen3", "qwen3_5", "qwen3_5_hub_layout"),
        *("qwen3_bf16_sharded", "qwen3_moe", "qwen3_swa_yarn_bias"),
    ) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_layers_states_and_the_logits_are_transformers(published, name):
    target, expected = published(name)
    tokens = jnp.asarray(expected["input_ids"], jnp.int32)
    mask = expected.get("attention_mask", np.ones(tokens.shape, np.int64))
    layers = target.config.layers
    features, last, logits = run(target, tokens, jnp.asarray(mask, jnp.int32), tuple(range(layers)))
    states = expected["hidden_states"]  # embeddings, then layers, of which the last is after the final norm
    assert states.shape[0] == layers + 1
    real = mask.astype(bool)
    by_layer = np.split(np.asarray(features), layers, axis=-1)
    found = [*by_layer[:-1], np.asarray(last), np.asarray(logits)]
    errors = [
        np.abs(one - by_torch)[real]
        for one, by_torch in zip(found, [*states[1:], expected["logits"]], strict=True)
    ]
    assert max(error.max() for error in errors) < 2e-4
    assert max(np.median(error) for error in errors) < 1e-5


@pytest.mark.parametrize("name", LONG)
def test_a_row_of_150_tokens_ends_with_transformers_logits(published, name):
    target, expected = published(name)
    tokens = jnp.asarray(expected["long_input_ids"], jnp.int32)
    _, _, logits = run(target, tokens, jnp.ones_like(tokens), (0,))
    np.testing.assert_allclose(logits[0, -8:], expected["long_logits_last8"][0], rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_tokens_are_transformers(published, name):
    target, expected = published(name)
    known = int(expected["attention_mask"][1].sum())
    wanted = expected["greedy_ids"][0]
    prompts = jnp.asarray(np.pad(wanted[None, :known], ((0, 0), (0, 4))), jnp.int32)
    decode = quick(functools.partial(generate, stop=(-1,), max_new_tokens=len(wanted) - known))
    rows = decode(target, prompts, jnp.asarray([known]))
    np.testing.assert_array_equal(rows.tokens[0, : len(wanted)], wanted)


@pytest.mark.parametrize("name", RESPELLED)
def test_the_older_spelling_of_a_configuration_means_the_same(tmp_path, name):
    newer = TargetFiles.open(write_target(tmp_path / "newer", name)).config
    assert TargetFiles.open(write_target(tmp_path / "older", name, spelling="config.hub.json")).config == newer
