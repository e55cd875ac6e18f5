"""Plain decoding with a cache: one token per target pass, rows of different length, greedy or sampled."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from dflash_jax.decode.sampling import GREEDY, Sampling, draw
from dflash_jax.models.target import Target
from dflash_jax.models.target_cache import TargetCache

PREFILL_CHUNK = 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """Rows under construction: tokens [B, T], lengths [B] (tokens known), prompts [B] (tokens given).

    A row is done when it has ended with a stop token or holds `limit` generated tokens.
    """

    tokens: jax.Array
    lengths: jax.Array
    prompts: jax.Array
    done: jax.Array

    @classmethod
    def start(cls, prompts: jax.Array, lengths: jax.Array, *, capacity: int) -> Self:
        """Rows that hold right-padded prompts [B, P] of `lengths` [B], with room for `capacity` tokens."""
        tokens = jnp.pad(prompts, ((0, 0), (0, capacity - prompts.shape[1])))
        return cls(tokens, lengths, lengths, jnp.zeros(lengths.shape, bool))

    def append(self, new: jax.Array, count: jax.Array, *, stop: jax.Array, limit: int) -> Self:
        """Add the first `count` [B] tokens of `new` [B, W], cut behind a stop token and at `limit`.

        Nothing is added to rows that are done.
        """
        width = new.shape[1]
        column = jnp.arange(width)
        offered = column < jnp.minimum(count, limit - (self.lengths - self.prompts))[:, None]
        stops = offered & jnp.isin(new, stop)
        before = jnp.cumsum(stops, axis=1) - stops  # stop tokens strictly before each column
        kept = offered & (before == 0) & ~self.done[:, None]
        index = jnp.where(kept, self.lengths[:, None] + column, self.tokens.shape[1])
        tokens = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(self.tokens, index, new)
        lengths = self.lengths + kept.sum(axis=1)
        done = self.done | (stops & kept).any(axis=1) | (lengths - self.prompts >= limit)
        return dataclasses.replace(self, tokens=tokens, lengths=lengths, done=done)


def prefill(
    target: Target,
    prompts: jax.Array,
    lengths: jax.Array,
    *,
    capacity: int,
    taps: tuple[int, ...] = (),
    chunk: int = PREFILL_CHUNK,
    sampling: Sampling = GREEDY,
    keys: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, TargetCache]:
    """Run the prompts; returns (next token [B], features [B, P, T * E], cache that holds the prompts).

    prompts: [B, P] right-padded, lengths: [B]; capacity: positions of the cache, at least P; chunk: tokens of a
    row that are run at a time, which bounds the memory that long prompts take; sampling, keys: as of `draw`.
    """
    rows, width = prompts.shape
    count = -(-width // chunk)
    size = min(width, chunk)
    pieces = jnp.pad(prompts, ((0, 0), (0, count * size - width))).reshape(rows, count, size).swapaxes(0, 1)

    def one(carry, piece):
        cache, at_end = carry
        features, last, step = target.step(piece, cache, taps=taps)
        left = lengths - cache.lengths
        inside = (left > 0) & (left <= size)
        found = jnp.take_along_axis(last, jnp.clip(left - 1, 0, size - 1)[:, None, None], axis=1)[:, 0]
        return (step.keep(jnp.minimum(left, size)), jnp.where(inside[:, None], found, at_end)), features

    # The last piece may reach past the prompts, so the cache must as well.
    cache = target.empty_cache(rows, capacity=max(capacity, count * size))
    nothing = jnp.zeros((rows, target.config.width), target.embedding.dtype)
    (cache, at_end), features = jax.lax.scan(one, (cache, nothing), pieces)
    features = features.swapaxes(0, 1).reshape(rows, count * size, -1)[:, :width]
    token = draw(target.logits(at_end), sampling, keys=keys, places=jnp.zeros_like(lengths))
    return token, features, cache


def generate(
    target: Target,
    prompts: jax.Array,
    lengths: jax.Array,
    *,
    stop: tuple[int, ...],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    keys: jax.Array | None = None,
) -> Sequences:
    """Continuations of prompts [B, P] of `lengths` [B], each ending with a stop token or at the limit.

    A row of length 0 has no prompt and gets nothing. keys: [B] random keys, needed unless the sampling is greedy.
    """
    capacity = prompts.shape[1] + max_new_tokens
    stops = jnp.array(stop, jnp.int32)
    token, _, cache = prefill(target, prompts, lengths, capacity=capacity, sampling=sampling, keys=keys)
    rows = Sequences.start(prompts, lengths, capacity=capacity)
    rows = dataclasses.replace(rows, done=lengths == 0)
    one = jnp.ones(lengths.shape, jnp.int32)

    def body(carry):
        token, cache, rows = carry
        _, last, step = target.step(token[:, None], cache)
        token = draw(target.logits(last)[:, 0], sampling, keys=keys, places=rows.lengths - rows.prompts)
        cache = step.keep(jnp.where(rows.done, 0, 1))
        return token, cache, rows.append(token[:, None], one, stop=stops, limit=max_new_tokens)

    rows = rows.append(token[:, None], one, stop=stops, limit=max_new_tokens)
    _, _, rows = jax.lax.while_loop(lambda carry: ~carry[2].done.all(), body, (token, cache, rows))
    return rows
