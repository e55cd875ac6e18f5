"""Llama as a frozen target: hidden states for training, cached steps for decoding.

    x_0 = embed(tokens);   x_{l+1} = x_l + attention(norm x_l) + mlp(norm ...);   last = norm(x_L)

A tap on layer l is x_{l+1}, the residual stream after that layer. Features are the taps side by side.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.errors import UserError
from dflash_jax.models.cache import KVCache, write_rows
from dflash_jax.models.layers import Embedding, Linear, RMSNorm, SwiGLU, rope_table, rotate


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama; every field is read from the checkpoint, none is assumed."""

    vocab: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    rope_theta: float
    norm_eps: float
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    # A Llama does neither.
    embedding_scale: None = None
    logit_softcap: None = None

    @classmethod
    def from_checkpoint(cls, fields: Mapping[str, Any]) -> Self:
        """Read a config.json, either spelling of the RoPE fields. Raises KeyError on a missing field."""
        rope = fields.get("rope_parameters") or {
            "rope_theta": fields["rope_theta"],
            **(fields.get("rope_scaling") or {}),
        }
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UserError(f"target: rope_type {kind!r} is not supported for llama; supported: 'default'")
        if fields["hidden_act"] != "silu":
            raise UserError(f"target: hidden_act {fields['hidden_act']!r} is not supported; supported: 'silu'")
        heads = fields["num_attention_heads"]
        return cls(
            vocab=fields["vocab_size"],
            width=fields["hidden_size"],
            mlp_width=fields["intermediate_size"],
            layers=fields["num_hidden_layers"],
            heads=heads,
            kv_heads=fields["num_key_value_heads"],
            # Older configurations leave the head width to be derived.
            head_width=fields.get("head_dim") or fields["hidden_size"] // heads,
            rope_theta=float(rope["rope_theta"]),
            norm_eps=fields["rms_norm_eps"],
            tied=fields["tie_word_embeddings"],
            attention_bias=fields["attention_bias"],
            mlp_bias=fields["mlp_bias"],
        )


class Attention(nnx.Module):
    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        c, bias = config, config.attention_bias
        self.heads, self.kv_heads, self.head_width = c.heads, c.kv_heads, c.head_width
        self.q_proj = Linear(rngs, "heads embed", c.heads * c.head_width, c.width, bias=bias)
        self.k_proj = Linear(rngs, "kv_heads embed", c.kv_heads * c.head_width, c.width, bias=bias)
        self.v_proj = Linear(rngs, "kv_heads embed", c.kv_heads * c.head_width, c.width, bias=bias)
        self.o_proj = Linear(rngs, "embed heads", c.width, c.heads * c.head_width, bias=bias)

    def __call__(self, x, table, mask, cached, starts):
        """x: [B, S, E]; mask: [B, S, T]; cached: keys and values [B, T, K, H] to write from `starts` [B] on."""
        batch, length, _ = x.shape
        q = rotate(self.q_proj(x).reshape(batch, length, self.heads, self.head_width), table)
        k = rotate(self.k_proj(x).reshape(batch, length, self.kv_heads, self.head_width), table)
        v = self.v_proj(x).reshape(batch, length, self.kv_heads, self.head_width)
        if cached is not None:
            k, v = cached = write_rows(cached[0], k, starts), write_rows(cached[1], v, starts)
        y = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
        return self.o_proj(y.reshape(batch, length, -1)), cached


class Layer(nnx.Module):
    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        c = config
        self.input_layernorm = RMSNorm(rngs, "embed", c.width, eps=c.norm_eps)
        self.self_attn = Attention(c, rngs)
        self.post_attention_layernorm = RMSNorm(rngs, "embed", c.width, eps=c.norm_eps)
        self.mlp = SwiGLU(rngs, c.width, c.mlp_width, bias=c.mlp_bias)

    def __call__(self, x, table, mask, cached, starts):
        y, cached = self.self_attn(self.input_layernorm(x), table, mask, cached, starts)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cached


class Decoder(nnx.Module):
    """Everything but the head; the attribute names follow the checkpoint (``model.layers.0...``)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.embed_tokens = Embedding(rngs, config.vocab, config.width)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(rngs, "embed", config.width, eps=config.norm_eps)


class Llama(nnx.Module):
    """A target: `hidden` for whole rows, `step` for cached decoding, `logits` for the head."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        self.model = Decoder(config, rngs)
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

    def hidden(
        self, tokens: jax.Array, positions: jax.Array, *, segment_ids: jax.Array, taps: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """Features [B, S, T * E] and the last hidden state after the final norm [B, S, E].

        tokens, positions, segment_ids: [B, S] int32; a token sees earlier tokens of its own segment.
        Layers past the last tap cost nothing where the caller drops the second result.
        """
        order = jnp.arange(tokens.shape[1])
        mask = (order[None, :, None] >= order[None, None, :]) & (
            segment_ids[:, :, None] == segment_ids[:, None, :]
        )
        features, last, _ = self._run(tokens, positions, mask, None, taps)
        return features, last

    def step(
        self, tokens: jax.Array, cache: KVCache, *, taps: tuple[int, ...] = ()
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """Extend each row by S tokens from position cache.lengths on; returns (features, last hidden, cache).

        The returned cache holds the new keys but its lengths are unchanged: the caller says how many of
        the tokens stay (`KVCache.advance`), and what does not stay is overwritten by the next step.
        """
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        mask = jnp.arange(cache.capacity)[None, None, :] <= positions[:, :, None]
        return self._run(tokens, positions, mask, cache, taps)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., V] float32 from a last hidden state [..., E]."""
        return jnp.einsum(
            "...e,ve->...v", hidden, self.head.astype(hidden.dtype), preferred_element_type=jnp.float32
        )

    def _run(self, tokens, positions, mask, cache, taps):
        x = self.model.embed_tokens(tokens)
        table = rope_table(positions, self.config.head_width, theta=self.config.rope_theta)
        tapped, rows = {}, []
        for index, layer in enumerate(self.model.layers):
            with jax.named_scope(f"target_layer_{index}"):
                cached = None if cache is None else cache.layers[index]
                x, cached = layer(x, table, mask, cached, None if cache is None else cache.lengths)
                rows.append(cached)
            if index in taps:
                tapped[index] = x
        features = jnp.concatenate([tapped[index] for index in taps], axis=-1) if taps else x[..., :0]
        if cache is not None:
            cache = dataclasses.replace(cache, layers=tuple(rows))
        return features, self.model.norm(x), cache
