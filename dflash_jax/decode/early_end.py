"""Verifying only what pays: the first slots of a chain, the most probable nodes of a tree, or nothing at all.

How many those are is known while decoding only, and shapes are static, so there is one program for each of a few
lengths, of which a round runs one. A round that rests (speculate.Pace) does not even draft.
"""

import functools
from collections.abc import Callable
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decode.speculate import Anchors, Outcome

SHORTEST = 8  # tokens verified together: they cost about what two do, which read the weights as well

Draft = TypeVar("Draft")


class Verify(Protocol):
    """Verifies the anchors and the first length - 1 drafts; all lengths give the same shapes."""

    def __call__(self, at: Anchors, *, length: int) -> Outcome:
        """The verdict, with the cache and the context after it."""
        ...


def draft_unless(resting: jax.Array, draft: Callable[[], Draft], *, min_accept: float) -> Draft:
    """What `draft` returns, or zeros in a round without a draft; with min_accept 0 there is no such round."""
    if min_accept == 0:
        return draft()
    nothing = jax.eval_shape(draft)
    return jax.lax.cond(
        resting, lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), nothing), draft
    )


def verify_promising(verify: Verify, at: Anchors, probability: jax.Array, *, min_accept: float) -> Outcome:
    """The verdict on the drafts that are worth a target pass, which may be none.

    probability: [B, D] of each draft to be accepted, never rising along D; its sum is the number to expect.
    min_accept: what must be expected of all drafts up to a length, and of those up to the next longer one, for
    these to be verified, in the most promising row that is not done; 0 verifies all drafts.
    """
    most = probability.shape[1] + 1
    if min_accept == 0:
        return verify(at, length=most)
    doubled = (SHORTEST * 2**power for power in range(most.bit_length()))
    lengths = [1, *(length for length in doubled if length < most), most]
    expected = jnp.where(at.active[:, None], jnp.cumsum(probability, axis=1), 0)
    expected = jnp.pad(expected, ((0, 0), (1, 0)))[:, np.array(lengths) - 1]
    worth = (jnp.diff(expected, axis=1) >= min_accept).any(axis=0)
    which = jnp.cumprod(worth).sum().astype(jnp.int32)
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
