"""Sampled speculative decoding: the distribution of what is emitted is the target's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import frozen_of, load_target, random_drafter, save_llama

from dflash_jax.decode.chain import generate_chain
from dflash_jax.decode.generate import generate
from dflash_jax.decode.sampling import Sampling, answer_keys
from dflash_jax.decode.speculate import Decoded
from dflash_jax.decode.tree_decoding import generate_tree

VOCAB, NEW, ROWS = 7, 3, 20_000
PROMPT = (2, 5, 1, 4)
CRITICAL = 4.0  # standard deviations of the chi-square statistic; the seed is fixed


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(save_llama(tmp_path_factory.mktemp("tiny") / "llama", seed=3, vocab_size=VOCAB).path)


@pytest.fixture(scope="module")
def probabilities(target):
    """[temperature] -> P of every continuation of NEW tokens, [V ** NEW], from whole rows alone."""
    texts = np.stack(np.meshgrid(*[np.arange(VOCAB)] * NEW, indexing="ij"), axis=-1).reshape(-1, NEW)
    rows = np.concatenate([np.tile(PROMPT, (len(texts), 1)), texts], axis=1).astype(np.int32)
    positions = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    _, last = jax.jit(functools.partial(target.hidden, taps=()))(rows, positions, segment_ids=np.ones_like(rows))
    logits = np.asarray(target.logits(last))[:, len(PROMPT) - 1 : -1].astype(np.float64)

    def at(temperature):
        scaled = logits / temperature
        logs = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
        return np.exp(np.take_along_axis(logs, texts[..., None], axis=-1)[..., 0].sum(axis=1))

    return at


def chi_square(texts, expected) -> float:
    """How far the counts of texts [n, NEW] are from n * expected, in standard deviations of a fair draw."""
    codes = np.zeros(len(texts), int)
    for column in texts.T:
        codes = codes * VOCAB + column
    counts, means = np.bincount(codes, minlength=VOCAB**NEW), expected * len(texts)
    # Rare texts are counted together.
    order = np.argsort(means)
    rare = order[: np.searchsorted(np.cumsum(means[order]), 20) + 1]
    common = np.setdiff1d(order, rare)
    common = common[means[common] >= 5]
    rest = np.setdiff1d(np.arange(len(means)), common)
    counts = np.append(counts[common], counts[rest].sum())
    means = np.append(means[common], means[rest].sum())
    degrees = len(means) - 1
    return float((((counts - means) ** 2 / means).sum() - degrees) / np.sqrt(2 * degrees))


def sampled(way, target, sampling, seed, **options):
    """[ROWS, NEW] tokens of as many answers to one prompt, in one batch."""
    prompts = jnp.tile(jnp.array([PROMPT], jnp.int32), (ROWS, 1))
    keys = answer_keys(seed, jnp.arange(ROWS), jnp.zeros(ROWS, jnp.int32))
    lengths = jnp.full(ROWS, len(PROMPT))
    program = jax.jit(functools.partial(way, stop=(10**6,), max_new_tokens=NEW, sampling=sampling, **options))
    models = (target,)
    if "taps" in options:
        models = (target, random_drafter(4, block_size=4), frozen_of(target))
    found = program(*models, prompts, lengths, keys=keys)
    rows = found.rows if isinstance(found, Decoded) else found
    accepted = int(found.accepted.sum()) if isinstance(found, Decoded) else 0
    return np.asarray(rows.tokens[:, len(PROMPT) : len(PROMPT) + NEW]), accepted


WAYS = {
    "plain": (generate, {}),
    "chain": (generate_chain, {"taps": (0, 1)}),
    "chain that ends early": (generate_chain, {"taps": (0, 1), "min_accept": 1.2}),
    "tree": (generate_tree, {"taps": (0, 1), "budget": 5}),
    "tree without unlikely nodes": (generate_tree, {"taps": (0, 1), "budget": 5, "min_accept": 1.0}),
}


@pytest.mark.parametrize("temperature", [1.0, pytest.param(0.7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow if " " in way else ()) for way in WAYS])
def test_texts_come_up_as_often_as_the_target_would_write_them(target, probabilities, way, temperature):
    program, options = WAYS[way]
    texts, accepted = sampled(program, target, Sampling(temperature), 1, **options)
    expected = probabilities(temperature)
    assert expected.sum() == pytest.approx(1.0)
    assert abs(chi_square(texts, expected)) < CRITICAL
    # The same texts are far from what another temperature would give.
    assert chi_square(texts, probabilities(1.7 - temperature)) > 5 * CRITICAL
    assert way == "plain" or accepted > ROWS / 10


def test_filters_apply_to_both_models(target):
    texts, accepted = sampled(generate_chain, target, Sampling(1.0, 1.0, 3), 2, taps=(0, 1))
    plain, _ = sampled(generate, target, Sampling(1.0, 1.0, 3), 3)
    assert accepted > ROWS / 10
    for place in range(NEW):
        found, wanted = (np.bincount(x[:, place], minlength=VOCAB) / ROWS for x in (texts, plain))
        np.testing.assert_allclose(found, wanted, atol=0.015)
    # Three tokens are left after the prompt, and no other comes up.
    assert len(np.unique(texts[:, 0])) == 3


def test_always_taking_the_drafts_would_show(target, probabilities, monkeypatch):
    from dflash_jax.decode import chain

    def everything(drafts, q, p, uniforms):
        return jnp.full(len(drafts), drafts.shape[1], jnp.int32), p[:, -1]

    monkeypatch.setattr(chain, "accept", everything)
    texts, _ = sampled(generate_chain, target, Sampling(1.0), 1, taps=(0, 1))
    assert chi_square(texts, probabilities(1.0)) > 5 * CRITICAL
