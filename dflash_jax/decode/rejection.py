"""Speculative sampling: accept drafts so that what is emitted is distributed as the target's own samples.

    accept d_k while u_k q_k(d_k) < p_k(d_k);   at the first rejection draw from max(p_k - q_k, 0), normalised;
    if all are accepted, draw one token more from p

p and q are what temperature, top_p and top_k leave of the two models' distributions (arXiv:2211.17192).
"""

import jax
import jax.numpy as jnp


def accept(drafts: jax.Array, q: jax.Array, p: jax.Array, uniforms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(accepted drafts [B] int32, distribution of the token after them [B, V]).

    drafts, uniforms: [B, K]; q: [B, K, V] distributions that the drafts were drawn from; p: [B, K + 1, V] the
    target's for the same tokens and the one after.
    """

    def of_drafts(distributions: jax.Array) -> jax.Array:
        return jnp.take_along_axis(distributions, drafts[..., None], axis=2)[..., 0]

    passed = uniforms * of_drafts(q) < of_drafts(p[:, :-1])
    accepted = jnp.cumprod(passed, axis=1).sum(axis=1).astype(jnp.int32)

    def at_end(distributions: jax.Array) -> jax.Array:
        return jnp.take_along_axis(distributions, accepted[:, None, None], axis=1)[:, 0]

    # Past the last draft nothing was proposed, so that nothing is taken from p there.
    wanted, proposed = at_end(p), at_end(jnp.pad(q, ((0, 0), (0, 1), (0, 0))))
    rest = jnp.maximum(wanted - proposed, 0)
    total = rest.sum(axis=-1, keepdims=True)
    # Where p and q are equal up to rounding nothing is left, and nothing can have been rejected but by rounding.
    return accepted, jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), wanted)
