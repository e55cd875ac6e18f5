"""The chunked head against plain automatic differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.objective.head import Head, head_loss


@pytest.mark.parametrize("chunk", [1, 3, 7, 500])
def test_the_chunked_head_equals_plain_autodiff(chunk):
    random = np.random.default_rng(8)
    hidden, head = random.standard_normal((7, 4, 16)).astype(np.float32), random.standard_normal((29, 16))
    head = jnp.asarray(head, jnp.float32)
    labels, weights = jnp.asarray(random.integers(0, 29, (7, 4))), random.random((7, 4)).astype(np.float32)
    weights[2], weights[5, 1:] = 0, 0

    offsets = jnp.asarray(random.standard_normal(29), jnp.float32)

    def plain(hidden):
        log_shares = jax.nn.log_softmax(hidden @ head.T + offsets)
        losses = -jnp.take_along_axis(log_shares, labels[..., None], axis=-1)[..., 0]
        return 3 * (losses * weights).sum(), losses

    def chunked(hidden):
        found = head_loss(hidden, Head(head, offsets), labels, jnp.asarray(weights), chunk)
        return 3 * found.total, found

    (expected, losses), slope = jax.value_and_grad(plain, has_aux=True)(jnp.asarray(hidden))
    (total, found), gradient = jax.value_and_grad(chunked, has_aux=True)(jnp.asarray(hidden))
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(found.correct, (hidden @ head.T + offsets).argmax(-1) == labels)
    undifferentiated = head_loss(jnp.asarray(hidden), Head(head, offsets), labels, jnp.asarray(weights), chunk)
    jax.tree.map(np.testing.assert_array_equal, undifferentiated, found)


def test_bfloat16_states_have_float32_losses():
    # Logits 100.5 and 100: in bfloat16, whose steps there are 0.5, their difference would survive but the
    # loss, 0.474, would not.
    hidden = jnp.asarray([[[1.0, 0.5]]], jnp.bfloat16)
    head = jnp.asarray([[100.0, 1.0], [100.0, 0.0]], jnp.bfloat16)
    found = head_loss(hidden, Head(head, jnp.zeros(2)), jnp.asarray([[0]]), jnp.ones((1, 1)), 1)
    assert found.losses.dtype == jnp.float32
    assert found.losses[0, 0] == pytest.approx(np.log1p(np.exp(-0.5)), abs=1e-5)
