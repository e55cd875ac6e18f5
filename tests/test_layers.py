"""Products with weights, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models.layers import product

ROWS = [(), (1,), (1, 1), (2,), (2, 3), (1, 7)]


def operands(rows, dtype):
    random = np.random.default_rng(2)
    return (jnp.asarray(random.standard_normal(shape), dtype) for shape in ((*rows, 96), (40, 96)))


def exact(x, weight):
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_float32_product_is_summed_in_float32(rows, dtype):
    x, weight = operands(rows, dtype)
    y = jax.jit(lambda x, weight: product(x, weight, dtype=jnp.float32))(x, weight)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact(x, weight), rtol=0, atol=2e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_a_bfloat16_product_is_rounded_once(rows):
    x, weight = operands(rows, "bfloat16")
    y = jax.jit(product)(x, weight)
    assert y.dtype == jnp.bfloat16
    # Half a step of bfloat16, whose steps are 2^-7 of a power of two, and what the float32 sum may be off.
    np.testing.assert_allclose(np.asarray(y, np.float64), exact(x, weight), rtol=2.0**-8, atol=2e-5)


@pytest.mark.parametrize("rows", [(1,), (2, 3)])
def test_a_bfloat16_product_has_the_gradient_of_a_product(rows):
    x, weight = operands(rows, "bfloat16")
    cotangent = jnp.asarray(np.random.default_rng(3).standard_normal((*rows, 40)), jnp.bfloat16)
    _, back = jax.vjp(product, x, weight)
    to_x, to_weight = back(cotangent)
    flat = np.asarray(cotangent, np.float64).reshape(-1, 40)
    assert (to_x.dtype, to_weight.dtype) == (jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_allclose(
        np.asarray(to_x, np.float64).reshape(-1, 96),
        flat @ np.asarray(weight, np.float64),
        rtol=2.0**-7,
        atol=1e-3,
    )
    np.testing.assert_allclose(
        np.asarray(to_weight, np.float64),
        flat.T @ np.asarray(x, np.float64).reshape(-1, 96),
        rtol=2.0**-7,
        atol=1e-3,
    )
