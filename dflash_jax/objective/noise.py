"""Gaussian noise on the target's features, against a drafter that leans on their last digits; off by default."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

NOISE = 1  # folded into a token's key for its noise; anchors use the key itself

NoiseSchedule = Callable[[jax.typing.ArrayLike], jax.Array]  # step -> standard deviation


def noise_schedule(*, peak: float, end: float, warmup: float, shape: str, steps: int) -> NoiseSchedule | None:
    """Standard deviation by step: from 0 to `peak` over the first `warmup` share of `steps`, then to `end` at the
    last step, `linear` or by a half `cosine`. None if there is never any noise."""
    if peak == end == 0.0:
        return None
    rising = round(warmup * steps)
    falling = max(steps - 1 - rising, 1)  # steps count from 0

    def level(step: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(step, jnp.float32)
        done = jnp.clip((count - rising) / falling, 0.0, 1.0)
        done = done if shape == "linear" else 0.5 * (1.0 - jnp.cos(jnp.pi * done))
        return jnp.where(count < rising, peak * count / max(rising, 1), peak + (end - peak) * done)

    return level


def with_noise(keys: jax.Array, features: jax.Array, std: jax.Array) -> jax.Array:
    """features [B, S, T * E] plus noise that only depends on a token's key [B, S]."""

    def one(key: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, NOISE), features.shape[-1:], jnp.float32)

    noise = jax.vmap(jax.vmap(one))(keys)
    return (features + std * noise).astype(features.dtype)
