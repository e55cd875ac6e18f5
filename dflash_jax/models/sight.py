"""What each token of a call may see, and where it stands: in whole rows, in a chain or a tree behind a cache."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sight:
    """positions: [B, S] int32 for RoPE; visible: [B, S, T] bool, which keys a query may see; distance: [B, S, T]
    int32, tokens between the two (0 for itself)."""

    positions: jax.Array
    visible: jax.Array
    distance: jax.Array

    def within(self, window: int | None) -> jax.Array:
        """[B, S, T] bool: keys that are visible and among the last `window` ones, the query itself included."""
        return self.visible if window is None else self.visible & (self.distance < window)

    @classmethod
    def of_rows(cls, positions: jax.Array, segment_ids: jax.Array) -> Self:
        """Whole rows: a token sees earlier tokens of its own segment. positions, segment_ids: [B, S]."""
        order = jnp.arange(positions.shape[1])
        distance = order[None, :, None] - order[None, None, :]
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        return cls(positions, same & (distance >= 0), distance)

    @classmethod
    def of_chain(cls, lengths: jax.Array, count: int, *, capacity: int) -> Self:
        """`count` tokens after the lengths [B] of a cache for `capacity` positions."""
        positions = lengths[:, None] + jnp.arange(count)
        distance = positions[:, :, None] - jnp.arange(capacity)
        return cls(positions, distance >= 0, distance)

    @classmethod
    def of_tree(cls, lengths: jax.Array, parents: jax.Array, *, capacity: int) -> Self:
        """Nodes of a tree, written to a cache in their order: each sees the cache, its ancestors and itself.

        parents: [B, S] int32, each node's parent in the step, before it, or -1 where it follows the cache.
        """
        among = jax.vmap(ancestors)(parents)
        depth = among.sum(axis=-1) - 1
        positions = lengths[:, None] + depth
        # Positions in the cache that hold this step's nodes, as node numbers; others are before or after them.
        node = jnp.arange(capacity) - lengths[:, None]
        inside = (node >= 0) & (node < parents.shape[1])
        node = jnp.clip(node, 0, parents.shape[1] - 1)
        stands = jnp.where(
            inside, lengths[:, None] + jnp.take_along_axis(depth, node, axis=1), jnp.arange(capacity)
        )
        ours = jnp.take_along_axis(among, node[:, None, :], axis=2) & inside[:, None, :]
        before = (jnp.arange(capacity) < lengths[:, None])[:, None, :]
        return cls(positions, ours | before, positions[:, :, None] - stands[:, None, :])


def ancestors(parents: jax.Array) -> jax.Array:
    """[S, S] bool: whether the second node is an ancestor of the first, or the first itself. parents: [S]."""
    count = parents.shape[0]
    itself = jnp.eye(count, dtype=bool)

    def add(found: jax.Array, node: jax.Array) -> tuple[jax.Array, None]:
        above = jnp.where(parents[node] >= 0, found[parents[node]], False)
        return found.at[node].set(above | itself[node]), None

    return jax.lax.scan(add, jnp.zeros((count, count), bool), jnp.arange(count))[0]
