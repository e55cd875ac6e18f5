"""What a target remembers of the tokens it has seen, and how a step's tokens are kept or forgotten.

features, last, step = target.step(tokens, cache)      the step knows both: before, and its own tokens
cache = step.keep(count)                               the first `count` of them, as if the rest never were
"""

import dataclasses
from typing import Protocol

import jax

from dflash_jax.models.cache import KVRows


class Memory(Protocol):
    """What a layer that is not attention remembers: a state of fixed size per row."""


class Extension(Protocol):
    """A memory and the tokens of one step after it."""

    def keep(self, count: jax.Array, *, path: jax.Array | None = None) -> Memory:
        """The memory after the first `count` [B] tokens, or after as many nodes of `path` [B, D]."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetCache:
    """layers: what each layer remembers; lengths: [B] int32, tokens seen; capacity: T, positions that fit."""

    layers: tuple[KVRows | Memory, ...]
    lengths: jax.Array
    capacity: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheStep:
    """A cache and one step's tokens; layers: keys and values with the step's written in, or extensions."""

    layers: tuple[KVRows | Extension, ...]
    before: TargetCache

    def keep(self, count: jax.Array, *, path: jax.Array | None = None) -> TargetCache:
        """The cache after the first `count` [B] tokens of the step; what does not stay leaves no trace.

        path: for a tree of tokens, [B, D] ascending indices of the nodes of one path, of which `count` stay.
        """

        def kept(layer: KVRows | Extension) -> KVRows | Memory:
            if not isinstance(layer, KVRows):
                return layer.keep(count, path=path)
            return layer if path is None else layer.keep(path, self.before.lengths)

        layers = tuple(kept(layer) for layer in self.layers)
        return dataclasses.replace(self.before, layers=layers, lengths=self.before.lengths + count)
