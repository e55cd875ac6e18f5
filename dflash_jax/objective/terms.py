"""What a slot loses for its drafted distribution q, by name; p is the target's distribution for the same slot.

    ce          -log q[label]
    kl          sum p (log p - log q)
    reverse_kl  sum q (log q - log p)
    tv          1/2 sum |p - q| = 1 - sum min(p, q)       one minus the chance that a sampled draft is accepted
    lk_alpha    -log sum min(p, q)
    lk_hybrid   c kl + (1 - c) tv,  c = exp(-eta sum min(p, q)) as a constant of each slot,  eta = 3

Everything is float32. Names and definitions are those of speculators 0.9 (`nla` there is lk_alpha here).
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

HYBRID_ETA = 3.0
SMALLEST_OVERLAP = 1e-5  # below it -log(overlap) no longer grows


def overlap(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """[...]: sum min(p, q), the chance that a token sampled from q is accepted (speculative sampling)."""
    return jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)).sum(axis=-1)


def _kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)


def _reverse_kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return _kl(log_q, log_p)


def _tv(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return 1.0 - overlap(log_p, log_q)


def _lk_alpha(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return -jnp.log(jnp.maximum(overlap(log_p, log_q), SMALLEST_OVERLAP))


def _lk_hybrid(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    share = jnp.exp(-HYBRID_ETA * jax.lax.stop_gradient(overlap(log_p, log_q)))
    return share * _kl(log_p, log_q) + (1.0 - share) * _tv(log_p, log_q)


# Terms of two distributions [..., V] in float32 logarithms, the target's first.
TEACHER_TERMS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "kl": _kl,
    "reverse_kl": _reverse_kl,
    "tv": _tv,
    "lk_alpha": _lk_alpha,
    "lk_hybrid": _lk_hybrid,
}


def needs_teacher(terms: Iterable[str]) -> bool:
    """Whether any of the terms compares with the target's distribution."""
    return not TEACHER_TERMS.keys().isdisjoint(terms)


def term_loss(name: str, *, ce: jax.Array, log_q: jax.Array, log_p: jax.Array | None) -> jax.Array:
    """The loss [...] of a named term; ce: [...]; log_q: [..., V] of the drafter, log_p: of the target."""
    if name == "ce":
        return ce
    assert log_p is not None, f"{name} needs the target's distribution"
    return TEACHER_TERMS[name](log_p, log_q)
