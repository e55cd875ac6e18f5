"""Keys and values of tokens already seen, for rows of different length.

Rejected tokens need no clean-up: a row's entries past its length are masked by position, and the next step
writes over them.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp


class KVRows(NamedTuple):
    """One layer's keys and values, [B, T, K, H] each."""

    keys: jax.Array
    values: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: jnp.dtype) -> Self:
        """Zeros of `shape` [B, T, K, H]."""
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def write(self, keys: jax.Array, values: jax.Array, starts: jax.Array) -> Self:
        """With keys and values [B, S, K, H] from position starts [B] of each row on."""
        return type(self)(_write(self.keys, keys, starts), _write(self.values, values, starts))

    def keep(self, path: jax.Array, starts: jax.Array) -> Self:
        """With the entries at starts [B] + path [B, D] moved to starts, starts + 1, ..; path is ascending."""
        index = (starts[:, None] + path)[:, :, None, None]
        keys, values = (jnp.take_along_axis(rows, index, axis=1) for rows in self)
        return self.write(keys, values, starts)


def _write(cached: jax.Array, added: jax.Array, starts: jax.Array) -> jax.Array:
    # TRAP: a start past T - S is moved back silently, so a cache needs room for whole steps past its last token.
    def one(row, update, start):
        return jax.lax.dynamic_update_slice(row, update.astype(row.dtype), (start, 0, 0))

    return jax.vmap(one)(cached, added, starts)
