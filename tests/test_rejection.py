"""Speculative sampling: filters and verdicts against z-lab's code, and the rule by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import GOLDEN

from dflash_jax.decode.rejection import accept
from dflash_jax.decode.sampling import Sampling, filtered


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "zlab_sampling.npz")


def test_filters_equal_zlabs(golden):
    for index, (temperature, top_p, top_k) in enumerate(golden["combos"]):
        left = np.array(filtered(jnp.asarray(golden["logits"]), Sampling(temperature, top_p, int(top_k))), float)
        expected = golden[f"probs_{index}"]
        found = np.exp(left) / np.exp(left).sum(axis=-1, keepdims=True)
        np.testing.assert_array_equal(found > 0, expected > 0)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_verdicts_and_what_is_drawn_after_them_equal_zlabs(golden):
    for case in range(len(golden["rej_accepted"])):
        drafts, q, p, uniforms = (
            jnp.asarray(golden[f"rej_{name}"][case])
            for name in ("draft_tokens", "draft_probs", "target_probs", "uniforms")
        )
        accepted, rest = accept(drafts, q, p, uniforms)
        assert accepted.tolist() == [golden["rej_accepted"][case]]
        np.testing.assert_allclose(rest[0], golden["rej_next_dist"][case], atol=1e-6)


def test_rows_are_decided_each_on_its_own():
    p = jnp.array([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], [[0.0, 0.9, 0.1], [1.0, 0.0, 0.0]]])
    q = jnp.array([[[0.8, 0.2, 0.0]], [[0.5, 0.5, 0.0]]])
    # Row 0: 0.6 * 0.8 < 0.5, so the draft stays and the next token comes from p; row 1: p says never.
    accepted, rest = accept(jnp.array([[0], [0]]), q, p, jnp.array([[0.6], [0.0]]))
    assert accepted.tolist() == [1, 0]
    np.testing.assert_allclose(rest, [[0.2, 0.3, 0.5], [0.0, 0.8, 0.2]], atol=1e-6)


def test_nothing_left_falls_back_on_the_target():
    p = jnp.array([[[0.25, 0.75], [0.5, 0.5]]])
    accepted, rest = accept(jnp.array([[1]]), p[:, :1], p, jnp.array([[1.0]]))
    assert accepted.tolist() == [0]  # by a uniform number that is never drawn
    np.testing.assert_allclose(rest, [[0.25, 0.75]])
