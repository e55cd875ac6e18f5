"""Plain greedy decoding with a key/value cache: one token per target pass, rows of different length."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from dflash_jax.models.cache import KVCache
from dflash_jax.models.target import Target


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
    target: Target, prompts: jax.Array, lengths: jax.Array, *, capacity: int, taps: tuple[int, ...] = ()
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Run the prompts; returns (next token [B], features [B, P, T * E], cache that holds the prompts).

    prompts: [B, P] right-padded, lengths: [B]; capacity: positions of the cache.
    """
    config, dtype = target.config, target.embedding.dtype
    shape = (prompts.shape[0], capacity, config.kv_heads, config.head_width)
    cache = KVCache.empty(config.layers, shape=shape, dtype=dtype)
    features, last, cache = target.step(prompts, cache, taps=taps)
    at_end = jnp.take_along_axis(last, (lengths - 1)[:, None, None], axis=1)
    token = jnp.argmax(target.logits(at_end)[:, 0], axis=-1).astype(jnp.int32)
    return token, features, cache.advance(lengths)


def generate(
    target: Target, prompts: jax.Array, lengths: jax.Array, *, stop: tuple[int, ...], max_new_tokens: int
) -> Sequences:
    """Greedy continuations of prompts [B, P] of `lengths` [B], each ending with a stop token or at the limit."""
    capacity = prompts.shape[1] + max_new_tokens
    stops = jnp.array(stop, jnp.int32)
    token, _, cache = prefill(target, prompts, lengths, capacity=capacity)
    rows = Sequences.start(prompts, lengths, capacity=capacity)
    one = jnp.ones(lengths.shape, jnp.int32)

    def body(carry):
        token, cache, rows = carry
        _, last, cache = target.step(token[:, None], cache)
        token = jnp.argmax(target.logits(last)[:, 0], axis=-1).astype(jnp.int32)
        cache = cache.advance(jnp.where(rows.done, 0, 1))
        return token, cache, rows.append(token[:, None], one, stop=stops, limit=max_new_tokens)

    rows = rows.append(token[:, None], one, stop=stops, limit=max_new_tokens)
    _, _, rows = jax.lax.while_loop(lambda carry: ~carry[2].done.all(), body, (token, cache, rows))
    return rows
