"""What every target family offers; the rest of the package knows targets only by this."""

from typing import Protocol

import jax
from flax import nnx

from dflash_jax.models.target_cache import CacheStep, TargetCache


class TargetConfig(Protocol):
    """The sizes that a drafter is cut to; mlp_width is None where no layer has a dense MLP."""

    @property
    def vocab(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def mlp_width(self) -> int | None: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_width(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def tied(self) -> bool: ...

    @property
    def embedding_scale(self) -> float | None:
        """What the family multiplies embedded tokens by, outside its embedding rows; None: nothing."""
        ...

    @property
    def logit_softcap(self) -> float | None:
        """c where the family's logits are c tanh(l / c); None: they are not bounded."""
        ...


class Target(Protocol):
    """A frozen language model."""

    @property
    def config(self) -> TargetConfig: ...

    @property
    def embedding(self) -> nnx.Param:
        """[V, E] rows of the input tokens."""
        ...

    @property
    def head(self) -> nnx.Param:
        """[V, E] rows of the output logits; the embedding itself where they are tied."""
        ...

    def hidden(
        self, tokens: jax.Array, positions: jax.Array, *, segment_ids: jax.Array, taps: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """Features [B, S, T * E] and the last hidden state after the final norm [B, S, E]."""
        ...

    def empty_cache(self, rows: int, *, capacity: int) -> TargetCache:
        """What is remembered of rows before their first token, with room for `capacity` positions."""
        ...

    def step(
        self,
        tokens: jax.Array,
        cache: TargetCache,
        *,
        taps: tuple[int, ...] = (),
        parents: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, CacheStep]:
        """Run the tokens [B, S] after a cache; (features, last hidden, the step to keep tokens of).

        parents: [B, S] parent of each token in a tree of them, -1 for the cache; None: a chain.
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., V] float32 from a last hidden state [..., E]."""
        ...
