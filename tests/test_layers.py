"""Products with weights, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models.layers import product

ROWS = [(), (1,), (1, 1), (2,), (2, 3), (1, 7), (33,)]


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [(1,), (2, 3)])
def test_a_product_has_the_gradient_of_a_product(rows, dtype):
    x, weight = operands(rows, dtype)
    cotangent = jnp.asarray(np.random.default_rng(3).standard_normal((*rows, 40)), dtype)
    _, back = jax.vjp(product, x, weight)
    to_x, to_weight = (np.asarray(found, np.float64) for found in back(cotangent))
    flat = np.asarray(cotangent, np.float64).reshape(-1, 40)
    near = {"rtol": 2.0**-7, "atol": 1e-3} if dtype == "bfloat16" else {"rtol": 0, "atol": 2e-5}
    np.testing.assert_allclose(to_x.reshape(-1, 96), flat @ np.asarray(weight, np.float64), **near)
    rows_of_x = np.asarray(x, np.float64).reshape(-1, 96)
    np.testing.assert_allclose(to_weight, flat.T @ rows_of_x, **near)
    assert {found.dtype for found in back(cotangent)} == {jnp.dtype(dtype)}
