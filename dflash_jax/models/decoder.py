"""A decoder-only language model as a frozen target: hidden states for training, cached steps for decoding.

    x_0 = embed(tokens);   x = x_l + mixer(norm x_l);   x_{l+1} = x + mlp(norm x);   last = norm(x_L)

A tap on layer l is x_{l+1}, the residual stream after that layer. Features are the taps side by side.
The mixer is full or sliding attention or a gated delta-net, the MLP dense or of experts; a family (families/) says
which by its configuration, and brings a layer of its own where that is not enough.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.attention import Attention, AttentionConfig
from dflash_jax.models.cache import KVRows
from dflash_jax.models.delta_net import DeltaMemory, DeltaNetConfig, GatedDeltaNet
from dflash_jax.models.experts import ExpertsConfig, SparseMLP
from dflash_jax.models.layers import Embedding, Linear, RMSNorm, SwiGLU, product
from dflash_jax.models.rope import Rope
from dflash_jax.models.sight import Sight
from dflash_jax.models.target_cache import CacheStep, TargetCache

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and kinds of a decoder; every field is read from the checkpoint, none is assumed.

    layer_types: FULL, SLIDING or LINEAR of each layer; window: keys that a sliding query sees, itself included;
    mlp_width: of dense MLPs, None where there are none; experts: of the others, on layers not in dense_layers;
    unit_offset: norms multiply by 1 + w.
    """

    vocab: int
    attention: AttentionConfig
    layer_types: tuple[str, ...]
    rope: Rope
    tied: bool
    mlp_width: int | None
    mlp_bias: bool = False
    window: int | None = None
    delta: DeltaNetConfig | None = None
    experts: ExpertsConfig | None = None
    dense_layers: tuple[int, ...] = ()
    embedding_scale: float | None = None
    logit_softcap: float | None = None

    @property
    def width(self) -> int:
        return self.attention.width

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    @property
    def heads(self) -> int:
        return self.attention.heads

    @property
    def kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head_width(self) -> int:
        return self.attention.head_width

    @property
    def norm_eps(self) -> float:
        return self.attention.norm_eps

    @property
    def rope_theta(self) -> float:
        return self.rope.theta

    def norm(self, rngs: nnx.Rngs) -> RMSNorm:
        """A norm of the residual stream."""
        a = self.attention
        return RMSNorm(rngs, "embed", a.width, eps=a.norm_eps, unit_offset=a.unit_offset)


class DecoderLayer(nnx.Module):
    """One layer; the attribute names follow the checkpoint (``self_attn`` or ``linear_attn``, ``mlp``)."""

    def __init__(self, config: DecoderConfig, index: int, rngs: nnx.Rngs):
        c = config
        self.kind, self.window = c.layer_types[index], c.window if c.layer_types[index] == SLIDING else None
        self.input_layernorm = c.norm(rngs)
        if self.kind == LINEAR:
            assert c.delta is not None
            self.linear_attn = GatedDeltaNet(c.delta, rngs)
        else:
            self.self_attn = Attention(c.attention, rngs)
        self.post_attention_layernorm = c.norm(rngs)
        if c.experts is not None and index not in c.dense_layers:
            self.mlp = SparseMLP(c.experts, rngs)
        else:
            assert c.mlp_width is not None
            self.mlp = SwiGLU(rngs, c.width, c.mlp_width, bias=c.mlp_bias)

    def empty(self, config: DecoderConfig, *, rows: int, capacity: int, dtype: jnp.dtype) -> KVRows | DeltaMemory:
        """What this layer remembers before the first token."""
        if self.kind == LINEAR:
            assert config.delta is not None
            return DeltaMemory.empty(config.delta, rows, dtype)
        return KVRows.empty((rows, capacity, config.kv_heads, config.head_width), dtype)

    def whole(self, x: jax.Array, table, sight: Sight, segment_ids: jax.Array) -> jax.Array:
        """x: [B, S, E] of whole rows -> the same shape."""
        normed = self.input_layernorm(x)
        if self.kind == LINEAR:
            y = self.linear_attn(normed, segment_ids=segment_ids)
        else:
            y, _ = self.self_attn(normed, table, sight.within(self.window), None, None)
        return self._mixed(x, y)

    def step(self, x: jax.Array, table, sight: Sight, remembered, starts: jax.Array, parents: jax.Array | None):
        """x: [B, S, E] of a step -> the same shape, and this layer's part of a CacheStep."""
        normed = self.input_layernorm(x)
        if self.kind == LINEAR:
            y, after = self.linear_attn.step(normed, remembered, parents=parents)
        else:
            y, after = self.self_attn(normed, table, sight.within(self.window), remembered, starts)
        return self._mixed(x, y), after

    def _mixed(self, x: jax.Array, y: jax.Array) -> jax.Array:
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nnx.Module):
    """Everything but the head; the attribute names follow the checkpoint (``model.layers.0...``)."""

    def __init__(self, config: DecoderConfig, layer: type[DecoderLayer], rngs: nnx.Rngs):
        self.embed_tokens = Embedding(rngs, config.vocab, config.width)
        self.layers = nnx.List([layer(config, index, rngs) for index in range(config.layers)])
        self.norm = config.norm(rngs)


class Decoder(nnx.Module):
    """A target: `hidden` for whole rows, `step` for cached decoding, `logits` for the head."""

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.model = Stack(config, self.layer_class, rngs)
        if not config.tied:
            self.lm_head = Linear(rngs, "vocab embed", config.vocab, config.width)

    @property
    def embedding(self) -> nnx.Param:
        """[V, E] rows of the input tokens."""
        return self.model.embed_tokens.weight

    @property
    def head(self) -> nnx.Param:
        """[V, E] rows of the output logits; the embedding itself where they are tied."""
        return self.embedding if self.config.tied else self.lm_head.weight

    def empty_cache(self, rows: int, *, capacity: int) -> TargetCache:
        """What is remembered of `rows` rows before their first token, with room for `capacity` positions."""
        dtype = self.embedding.dtype
        layers = (
            layer.empty(self.config, rows=rows, capacity=capacity, dtype=dtype) for layer in self.model.layers
        )
        return TargetCache(tuple(layers), jnp.zeros(rows, jnp.int32), capacity)

    def hidden(
        self, tokens: jax.Array, positions: jax.Array, *, segment_ids: jax.Array, taps: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """Features [B, S, T * E] and the last hidden state after the final norm [B, S, E].

        tokens, positions, segment_ids: [B, S] int32; a token sees earlier tokens of its own segment.
        Layers past the last tap cost nothing where the caller drops the second result.
        """
        sight = Sight.of_rows(positions, segment_ids)
        table = self.config.rope.table(positions)
        x, tapped = self._embed(tokens), {}
        for index, layer in enumerate(self.model.layers):
            with jax.named_scope(f"target_layer_{index}"):
                x = layer.whole(x, table, sight, segment_ids)
            if index in taps:
                tapped[index] = x
        return _features(x, tapped, taps), self.model.norm(x)

    def step(
        self,
        tokens: jax.Array,
        cache: TargetCache,
        *,
        taps: tuple[int, ...] = (),
        parents: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, CacheStep]:
        """Run S more tokens of each row after a cache; returns (features, last hidden, the step to keep from).

        tokens: [B, S], a chain, or the nodes of a tree if parents [B, S] gives the parent of each (-1: the cache).
        """
        if parents is None:
            sight = Sight.of_chain(cache.lengths, tokens.shape[1], capacity=cache.capacity)
        else:
            sight = Sight.of_tree(cache.lengths, parents, capacity=cache.capacity)
        table = self.config.rope.table(sight.positions)
        x, tapped, after = self._embed(tokens), {}, []
        for index, (layer, remembered) in enumerate(zip(self.model.layers, cache.layers, strict=True)):
            with jax.named_scope(f"target_layer_{index}"):
                x, kept = layer.step(x, table, sight, remembered, cache.lengths, parents)
            after.append(kept)
            if index in taps:
                tapped[index] = x
        return _features(x, tapped, taps), self.model.norm(x), CacheStep(tuple(after), cache)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., V] float32 from a last hidden state [..., E]."""
        found = product(hidden, self.head[...], dtype=jnp.float32)
        cap = self.config.logit_softcap
        return found if cap is None else cap * jnp.tanh(found / cap)

    def _embed(self, tokens: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            x, scale = self.model.embed_tokens(tokens), self.config.embedding_scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)


def _features(x: jax.Array, tapped: dict[int, jax.Array], taps: tuple[int, ...]) -> jax.Array:
    return jnp.concatenate([tapped[index] for index in taps], axis=-1) if taps else x[..., :0]
