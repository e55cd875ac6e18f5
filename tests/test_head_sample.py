"""The sampled softmax: what is in it, and that it estimates the whole one without bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.objective.head import Head, Rule, Slots, head_loss
from dflash_jax.objective.head_sample import Draw, HeadSample
from dflash_jax.objective.slot_weights import Decay

COUNTS = np.array([0, 3, 0, 0, 1, 9])  # of a vocabulary of 40: tokens 1, 4 and 5 occur as labels


@pytest.fixture
def sample() -> HeadSample:
    return jax.tree.map(jnp.asarray, HeadSample.split(COUNTS, vocab=40))


def test_labels_are_always_in_it_and_the_others_stand_for_the_rest(sample):
    tokens, offsets = sample.draw(Draw(jax.random.key(0), 10))
    np.testing.assert_array_equal(tokens[:3], [1, 4, 5])
    assert not np.isin(tokens[3:], [1, 4, 5]).any()
    np.testing.assert_array_equal(offsets[:3], 0)
    np.testing.assert_allclose(offsets[3:], np.log(37 / 7), rtol=1e-6)


def test_every_other_token_is_drawn_equally_often(sample):
    keys = jax.random.split(jax.random.key(1), 2000)
    drawn = np.asarray(jax.vmap(lambda key: sample.draw(Draw(key, 10))[0][3:])(keys)).ravel()
    counts = np.bincount(drawn, minlength=40)
    expected = np.where(np.isin(np.arange(40), [1, 4, 5]), 0, drawn.size / 37)
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()


def test_the_normaliser_is_unbiased(sample):
    random = np.random.default_rng(2)
    rows = jnp.asarray(random.standard_normal((40, 8)), jnp.float32)
    hidden = jnp.asarray(random.standard_normal((1, 1, 8)), jnp.float32)
    slots = Slots(hidden, labels=jnp.asarray([[1]]), mask=jnp.ones((1, 1), bool))  # the label is token 4

    def normaliser(key):
        tokens, offsets = sample.draw(Draw(key, 12))
        found = head_loss(slots, Head(rows[tokens], offsets), Rule((("ce", 1.0),), Decay(7.0)), 1)
        return jnp.exp(found.total + hidden[0, 0] @ rows[4])

    estimates = np.asarray(jax.jit(jax.vmap(normaliser))(jax.random.split(jax.random.key(3), 4000)))
    whole = float(np.exp(np.asarray(rows) @ np.asarray(hidden[0, 0])).sum())
    assert estimates.mean() == pytest.approx(whole, abs=4 * estimates.std() / np.sqrt(4000))
    assert estimates.std() > 0
