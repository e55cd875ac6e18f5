"""The loop of speculative decoding: draft after the anchor, verify in one target pass, keep what the target wants.

    draft    from the anchor's token and the features of the tokens before it     one drafter pass
    verify   the anchor and the drafts                                            one target pass
    accept   n drafts, as the target decides, and one token of its own;           the next anchor is n + 1 further

How drafts are made and accepted is a Round: a chain (chain.py) or a tree (tree_decoding.py). Everything runs on
the device in one loop with static shapes. Lengths are tracked, nothing is trimmed by the mask id, and what a
rejected token left in a cache is overwritten by the next round. Where drafts come to nothing, few rounds draft.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from dflash_jax.decode.drafting import DraftContext, empty_context, remember
from dflash_jax.decode.generate import Sequences, prefill
from dflash_jax.decode.sampling import Sampling
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.target import Target
from dflash_jax.models.target_cache import TargetCache
from dflash_jax.objective.objective import Frozen

PATIENCE = 3  # drafts in a row that may come to nothing
LONGEST_REST = 7  # plain steps between two drafts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoded:
    """rows: the finished sequences. accepted, emitted: [B, R] int32, a column for each verify round in order.

    emitted: tokens that the round added to the row: accepted drafts and the target's own token, cut behind a stop
    token and at the limit; 0 where there was no such round. accepted: drafts accepted, before that cut.
    """

    rows: Sequences
    accepted: jax.Array
    emitted: jax.Array


class Anchors(NamedTuple):
    """Where a round begins: right after what the cache and the context hold. token: [B]; places: [B], the next
    token's index in its answer, where random numbers are drawn; active: [B] bool, rows that are not done, for the
    others keep their cache; resting: [] bool, whether this round is to be a plain step."""

    token: jax.Array
    cache: TargetCache
    context: DraftContext
    places: jax.Array
    active: jax.Array
    resting: jax.Array


class Outcome(NamedTuple):
    """What a round decided. tokens: [B, W], of which the first accepted + 1 follow the anchor; accepted: [B].

    cache, context: with the anchor and the accepted drafts.
    """

    tokens: jax.Array
    accepted: jax.Array
    cache: TargetCache
    context: DraftContext


class Pace(NamedTuple):
    """How often to draft. vain: [] int32, drafts in a row of which nothing was accepted; rest: [] int32, plain
    steps before the next draft: none up to PATIENCE such drafts, then 1, 3, and LONGEST_REST at most."""

    vain: jax.Array
    rest: jax.Array

    @classmethod
    def start(cls) -> Self:
        """Of the first round."""
        return cls(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def after(self, accepted: jax.Array) -> Self:
        """Of the next round; accepted: [] bool, whether this one accepted a draft."""
        vain = jnp.where(accepted, 0, self.vain + 1)
        rest = jnp.minimum(2 ** jnp.maximum(vain - PATIENCE, 0) - 1, LONGEST_REST)
        resting = self.rest > 0
        return type(self)(jnp.where(resting, self.vain, vain), jnp.where(resting, self.rest - 1, rest))


Round = Callable[[Anchors], Outcome]


def speculate(
    target: Target,
    drafter: Drafter,
    frozen: Frozen,
    prompts: jax.Array,
    lengths: jax.Array,
    *,
    play: Round,
    room: int,
    taps: tuple[int, ...],
    stop: tuple[int, ...],
    max_new_tokens: int,
    sampling: Sampling,
    keys: jax.Array | None,
) -> Decoded:
    """Continuations of prompts [B, P] of `lengths` [B], right-padded; rows of length 0 get nothing.

    room: positions that a round writes to, from the anchor on, whatever is accepted of them.
    """
    rows = prompts.shape[0]
    capacity = prompts.shape[1] + max_new_tokens + room
    stops = jnp.array(stop, jnp.int32)
    token, features, cache = prefill(
        target, prompts, lengths, capacity=capacity, taps=taps, sampling=sampling, keys=keys
    )
    context = empty_context(drafter, rows, capacity=capacity, dtype=frozen.embedding.dtype)
    context = remember(drafter, context, features, jnp.zeros_like(lengths))
    found = Sequences.start(prompts, lengths, capacity=capacity)
    found = dataclasses.replace(found, done=lengths == 0)
    found = found.append(token[:, None], jnp.ones_like(lengths), stop=stops, limit=max_new_tokens)
    nothing = jnp.zeros((rows, max(max_new_tokens - 1, 1)), jnp.int32)

    def body(carry):
        count, token, cache, context, pace, done = carry
        rows = done.rows
        out = play(Anchors(token, cache, context, rows.lengths - rows.prompts, ~rows.done, pace.rest > 0))
        grown = rows.append(out.tokens, out.accepted + 1, stop=stops, limit=max_new_tokens)
        accepted = jnp.where(rows.done, 0, out.accepted)
        done = Decoded(
            grown,
            accepted=done.accepted.at[:, count].set(accepted),
            emitted=done.emitted.at[:, count].set(grown.lengths - rows.lengths),
        )
        token = jnp.take_along_axis(out.tokens, out.accepted[:, None], axis=1)[:, 0]
        return count + 1, token, out.cache, out.context, pace.after((accepted > 0).any()), done

    carry = (jnp.zeros((), jnp.int32), token, cache, context, Pace.start(), Decoded(found, nothing, nothing))
    return jax.lax.while_loop(lambda carry: ~carry[-1].rows.done.all(), body, carry)[-1]
