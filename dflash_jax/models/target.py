"""What every target family offers; the rest of the package knows targets only by this."""

from typing import Protocol

import jax
from flax import nnx

from dflash_jax.models.cache import KVCache


class TargetConfig(Protocol):
    """The sizes that a drafter and a cache are cut to."""

    @property
    def vocab(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def mlp_width(self) -> int: ...
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
    """A frozen language model; Llama is the pattern to follow."""

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

    def step(
        self, tokens: jax.Array, cache: KVCache, *, taps: tuple[int, ...] = ()
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """Extend each row by the tokens [B, S]; (features, last hidden, cache with unchanged lengths)."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., V] float32 from a last hidden state [..., E]."""
        ...
