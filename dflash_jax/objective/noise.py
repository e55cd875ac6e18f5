"""Gaussian noise on the target's features, against a drafter that leans on their last digits; off by default."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

NOISE = 1  # folded into a row's key for its noise; anchors use the key itself

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
    """features [B, S, T * E] plus noise that only depends on a row's key [B] and its positions."""
    keys = jax.vmap(lambda key: jax.random.fold_in(key, NOISE))(keys)
    noise = jax.vmap(lambda key, row: jax.random.normal(key, row.shape, jnp.float32))(keys, features)
    return (features + std * noise).astype(features.dtype)
