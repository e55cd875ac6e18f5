"""Keys and values of tokens already seen, for rows of different length.

Rejected tokens need no clean-up: a row's entries past its length are masked by position, and the next step
writes over them.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """layers: per layer (keys, values) of [B, T, K, H]; lengths: [B] int32, tokens that count in each row."""

    layers: tuple[tuple[jax.Array, jax.Array], ...]
    lengths: jax.Array

    @property
    def capacity(self) -> int:
        """T, the number of positions that fit."""
        return self.layers[0][0].shape[1]

    @classmethod
    def empty(cls, layers: int, *, shape: tuple[int, int, int, int], dtype: jnp.dtype) -> Self:
        """A cache of zeros with keys and values of `shape` [B, T, K, H] in each layer."""
        rows = tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))
        return cls(rows, jnp.zeros(shape[0], jnp.int32))

    def advance(self, count: jax.Array) -> Self:
        """Let `count` [B] more of the written tokens of each row count."""
        return dataclasses.replace(self, lengths=self.lengths + count)

    def write(self, new: tuple[tuple[jax.Array, jax.Array], ...], starts: jax.Array) -> Self:
        """Write per-layer keys and values [B, S, K, H] from position starts [B] of each row on."""
        rows = tuple(
            (write_rows(keys, k, starts), write_rows(values, v, starts))
            for (keys, values), (k, v) in zip(self.layers, new, strict=True)
        )
        return dataclasses.replace(self, layers=rows)


def write_rows(cached: jax.Array, new: jax.Array, starts: jax.Array) -> jax.Array:
    """Write new [B, S, K, H] into cached [B, T, K, H] from position starts [B] of each row on.

    TRAP: a start past T - S is moved back silently, so a cache needs room for whole steps past its last token.
    """

    def one(row, update, start):
        return jax.lax.dynamic_update_slice(row, update.astype(row.dtype), (start, 0, 0))

    return jax.vmap(one)(cached, new, starts)
