"""Verifying only what is likely to be accepted: the first slots of a chain, the most probable nodes of a tree.

How many those are is known while decoding only, and shapes are static, so there is one program for each of a few
lengths, of which a round runs the next longer one. A round that rests (speculate.Pace) does not even draft.
"""

import functools
from collections.abc import Callable
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decode.speculate import Anchors, Outcome

Draft = TypeVar("Draft")


class Verify(Protocol):
    """Verifies the anchors and the first length - 1 drafts; all lengths give the same shapes."""

    def __call__(self, at: Anchors, *, length: int) -> Outcome:
        """The verdict, with the cache and the context after it."""
        ...


def draft_unless(resting: jax.Array, draft: Callable[[], Draft], *, confidence: float) -> Draft:
    """What `draft` returns, or zeros in a round without a draft; without a confidence there is no such round."""
    if confidence == 0:
        return draft()
    nothing = jax.eval_shape(draft)
    return jax.lax.cond(
        resting, lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), nothing), draft
    )


def verify_promising(verify: Verify, at: Anchors, probability: jax.Array, *, confidence: float) -> Outcome:
    """The verdict on the drafts that are accepted with at least `confidence`, and on a few more.

    probability: [B, D] of each draft, never rising along D; confidence: of the most confident row that is not
    done; 0 verifies all drafts.
    """
    most = probability.shape[1] + 1
    if confidence == 0:
        return verify(at, length=most)
    lengths = [2**power for power in range((most - 1).bit_length())] + [most]
    worth = 1 + ((probability >= confidence) & at.active[:, None]).sum(axis=1).max()
    which = jnp.searchsorted(np.array(lengths), worth).astype(jnp.int32)
    shapes = jax.eval_shape(functools.partial(verify, length=most), at)
    out = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    out = out._replace(cache=at.cache, context=at.context)
    # Loops of one pass or none, which work on the cache in place; the branches of a switch are given a copy of it
    # and return another.
    for place, length in enumerate(lengths):

        def once(carry: tuple[jax.Array, Outcome], length: int = length):
            before = at._replace(cache=carry[1].cache, context=carry[1].context)
            return jnp.full((), -1, jnp.int32), verify(before, length=length)

        which, out = jax.lax.while_loop(lambda carry, place=place: carry[0] == place, once, (which, out))
    return out
