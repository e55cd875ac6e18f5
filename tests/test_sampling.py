"""Sampling: filters against transformers', frequencies against probabilities, and where the noise comes from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiny_models import load_target, quick

from dflash_jax.decode.generate import generate
from dflash_jax.decode.sampling import GREEDY, Sampling, answer_keys, draw, filtered

SETTINGS = [
    (1.0, 1.0, 0),
    (0.3, 1.0, 0),
    (2.0, 0.9, 0),
    (0.7, 1.0, 5),
    (0.7, 0.6, 5),
    (1.3, 0.95, 30),
    (1.0, 1e-6, 9),
]


def warped(logits, sampling):
    """transformers' temperature, top-k and top-p, in the order in which `generate` applies them."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = torch.tensor(np.array(logits))
    chain = [TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature != 1 else []
    chain += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    chain += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    for step in chain:
        scores = step(torch.zeros(len(scores), 1, dtype=torch.long), scores)
    return scores.numpy()


@pytest.mark.parametrize("setting", SETTINGS)
def test_filters_are_those_of_transformers(setting):
    logits = np.random.default_rng(1).normal(0, 3, (40, 97)).astype(np.float32)
    sampling = Sampling(*setting)
    ours, theirs = np.asarray(filtered(jnp.asarray(logits), sampling)), warped(logits, sampling)
    np.testing.assert_array_equal(np.isinf(ours), np.isinf(theirs))
    kept = ~np.isinf(ours)
    np.testing.assert_allclose(ours[kept], theirs[kept], rtol=1e-6)
    if sampling.top_k or sampling.top_p < 1:
        assert not kept.all()


def test_the_smallest_set_that_reaches_top_p_is_kept():
    probabilities = np.array([[0.5, 0.3, 0.15, 0.05]])
    for top_p, count in ((0.4, 1), (0.6, 2), (0.79, 2), (0.81, 3), (0.96, 4)):
        left = filtered(jnp.log(jnp.asarray(probabilities)), Sampling(1.0, top_p))
        assert int((left > -jnp.inf).sum()) == count
    # Of what top_k leaves, 0.5 of 0.8 is more than 0.6.
    left = filtered(jnp.log(jnp.asarray(probabilities)), Sampling(1.0, 0.6, 2))
    assert int((left > -jnp.inf).sum()) == 1


def test_tokens_come_up_as_often_as_they_are_likely():
    logits = np.array([1.0, 0.2, -0.4, 2.0, -3.0, 0.9], np.float32)
    sampling, count = Sampling(0.8, 0.9, 4), 20_000
    scores = warped(logits[None], sampling)[0].astype(np.float64)
    expected = np.exp(scores - scores.max())
    expected *= count / expected.sum()
    keys = answer_keys(3, jnp.arange(count), jnp.zeros(count, jnp.int32))
    drawn = draw(jnp.tile(logits, (count, 1)), sampling, keys=keys, places=jnp.zeros(count, jnp.int32))
    found = np.bincount(np.asarray(drawn), minlength=len(logits))
    likely = expected > 0
    assert 2 <= likely.sum() < len(logits)
    assert not found[~likely].any()
    statistic = ((found - expected)[likely] ** 2 / expected[likely]).sum()
    assert statistic < 13.8, "beyond the 99.9 % quantile of chi-square with two degrees of freedom"


def test_noise_depends_on_seed_conversation_turn_and_place_alone():
    def one(seed, index, turn, place, *, row=0, rows=1):
        indices, turns = jnp.full(rows, 7), jnp.full(rows, 5)
        keys = answer_keys(seed, indices.at[row].set(index), turns.at[row].set(turn))
        logits = jnp.zeros((rows, 1000))
        return int(draw(logits, Sampling(1.0), keys=keys, places=jnp.full(rows, place))[row])

    alone = one(0, 3, 1, 9)
    assert one(0, 3, 1, 9, row=4, rows=6) == alone
    others = [one(1, 3, 1, 9), one(0, 4, 1, 9), one(0, 3, 2, 9), one(0, 3, 1, 10), one(0, 1, 3, 9)]
    assert len({alone, *others}) == 6


def test_generated_tokens_are_draws_from_the_models_own_logits(plain_llama):
    target, vocab, added = load_target(plain_llama.path), 66, 12
    rng = np.random.default_rng(0)
    lengths = np.array([5, 0, 9, 2], np.int32)
    prompts = rng.integers(0, vocab, (4, 9)).astype(np.int32)
    indices, turns = np.array([11, 0, 4, 2]), np.array([0, 0, 1, 3])
    sampling = Sampling(0.9, 0.8, 20)

    def run(target, prompts, lengths, indices, turns):
        keys = answer_keys(5, indices, turns)
        return generate(
            target, prompts, lengths, stop=(vocab,), max_new_tokens=added, sampling=sampling, keys=keys
        )

    found = quick(run)(target, prompts, lengths, indices, turns)
    assert found.lengths.tolist() == [17, 0, 21, 14]
    for row in (0, 2, 3):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), indices[row]), turns[row])
        text = prompts[row, : lengths[row]].tolist()
        for place in range(added):
            with torch.no_grad():
                logits = plain_llama.torch_model(torch.tensor([text])).logits[:, -1].numpy()
            scores = jnp.asarray(warped(logits, sampling)[0])
            text.append(int(jax.random.categorical(jax.random.fold_in(key, place), scores)))
        assert found.tokens[row, : len(text)].tolist() == text


def test_temperature_zero_is_the_largest_logit():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(5, 30)))
    drawn = draw(logits, GREEDY, keys=None, places=jnp.zeros(5, jnp.int32))
    np.testing.assert_array_equal(drawn, np.asarray(logits).argmax(axis=1))
    assert drawn.dtype == jnp.int32
