"""YaRN frequencies and tables against transformers'."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models.yarn import Yarn
from dflash_jax.published.rope_fields import read_rope

PLAIN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
CASES = {
    "published": PLAIN,
    "betas": PLAIN | {"beta_fast": 48, "beta_slow": 2.5},
    "borders within pairs": PLAIN | {"factor": 32.0, "truncate": False},
    "its own attention factor": PLAIN | {"attention_factor": 1.25},
    "mscale": PLAIN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7},
    "one pair is both borders": PLAIN
    | {"original_max_position_embeddings": 3, "beta_fast": 1.0, "truncate": True},
    "not stretched": PLAIN | {"factor": 1.0},
}
POSITIONS = np.array([0, 1, 2, 5, 17, 100])


def published(rope: dict, *, head_width: int, theta: float):
    """(cos, sin) of POSITIONS, frequencies and attention factor as transformers computes them."""
    import torch
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=head_width,
        max_position_embeddings=int(rope["original_max_position_embeddings"] * rope["factor"]),
        rope_parameters={**rope, "rope_theta": theta},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    tables = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.tensor(POSITIONS[None]))
    return tuple(table[0].numpy() for table in tables), frequencies.numpy(), factor


@pytest.mark.parametrize("theta", [1e4, 1e7])
@pytest.mark.parametrize("head_width", [16, 128])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_tables_are_transformers(name, head_width, theta):
    rope = CASES[name]
    (cos, sin), frequencies, factor = published(rope, head_width=head_width, theta=theta)
    found = read_rope({"rope_theta": theta, "rope_scaling": rope}, head_width)
    assert (found.theta, found.width) == (theta, head_width)
    assert found.scaling.attention_factor == pytest.approx(factor, abs=1e-12)

    # The angle of position 1 is the frequency itself.
    our_sin, our_cos = found.table(jnp.asarray(POSITIONS))
    assert our_sin.dtype == our_cos.dtype == jnp.float32
    np.testing.assert_allclose(np.arctan2(our_sin[1], our_cos[1]), frequencies, rtol=0, atol=1e-6)
    half = head_width // 2
    np.testing.assert_allclose(our_cos, cos[:, :half], rtol=0, atol=2e-5)
    np.testing.assert_allclose(our_sin, sin[:, :half], rtol=0, atol=2e-5)


def test_usual_is_what_transformers_makes_of_a_factor_and_a_length():
    yarn = read_rope({"rope_theta": 1e6, "rope_scaling": PLAIN}, 128).scaling
    assert Yarn.usual(4.0, 4096) == yarn
    assert yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_fast_pairs_keep_their_frequency_and_slow_ones_are_divided():
    ramp = Yarn.usual(4.0, 4096).ramp(128, theta=1e6)
    assert ramp.dtype == np.float32
    assert ramp[0] == 0
    assert ramp[-1] == 1
    assert (np.diff(ramp) >= 0).all()
