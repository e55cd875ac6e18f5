"""The DFlash drafter: a few transformer layers that fill a masked block from target features.

    c_t   = hidden_norm(W_fc [h_1 .. h_T]_t)              context: one vector per token, no queries, no MLP
    y     = layers(embed [x_a, MASK .. MASK], context)    slots see c_t for t < a, and each other
    slot k of norm(y) predicts the token at position a + k; slot 0 is the anchor itself

Semantics are those of z-lab's inference code (PyPI ``dflash`` 0.1.0, model.py), which is what serves the result.
The target's embedding and head are used frozen and belong to the caller, so blocks come in and hidden states go
out in its width E. A drafter of another width D has two matrices more, embed_proj [D, E] and head_proj [E, D].
"""

import dataclasses

import jax
from flax import nnx

from dflash_jax.models.block_attention import Context, attend_block
from dflash_jax.models.layers import Linear, RMSNorm, SwiGLU
from dflash_jax.models.rope import Rope, rotate
from dflash_jax.models.yarn import Yarn

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Sizes and semantics of a drafter.

    layer_types: one of FULL and SLIDING per layer; window: keys a sliding query sees, itself included.
    is_causal: None makes sliding layers causal inside the block and full layers bidirectional.
    target_width: of the embedded block and of the states for the head; feature_width: of the concatenated taps.
    yarn: the drafter's own; nothing of the target's RoPE applies.
    """

    width: int
    target_width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_width: int
    feature_width: int
    block_size: int
    mask_token: int
    rope_theta: float
    norm_eps: float
    layer_types: tuple[str, ...]
    window: int | None = None
    is_causal: bool | None = None
    yarn: Yarn | None = None

    def causal(self, layer: int) -> bool:
        """Whether slots of this layer see only earlier slots of their block."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def reach(self, layer: int) -> int | None:
        """The window of this layer in positions, or None for unlimited."""
        return self.window if self.layer_types[layer] == SLIDING else None


class BlockAttention(nnx.Module):
    """Queries from the block; keys and values from the context and the block through the same weights."""

    def __init__(self, config: DrafterConfig, rngs: nnx.Rngs):
        c = config
        self.heads, self.kv_heads, self.head_width = c.heads, c.kv_heads, c.head_width
        self.q_proj = Linear(rngs, "heads embed", c.heads * c.head_width, c.width)
        self.k_proj = Linear(rngs, "kv_heads embed", c.kv_heads * c.head_width, c.width)
        self.v_proj = Linear(rngs, "kv_heads embed", c.kv_heads * c.head_width, c.width)
        self.o_proj = Linear(rngs, "embed heads", c.width, c.heads * c.head_width)
        self.q_norm = RMSNorm(rngs, "head", c.head_width, eps=c.norm_eps)
        self.k_norm = RMSNorm(rngs, "head", c.head_width, eps=c.norm_eps)

    def keys_values(self, x: jax.Array, table) -> tuple[jax.Array, jax.Array]:
        """x: [..., D] -> keys (normed, rotated) and values, both [..., K, H]."""
        shape = (*x.shape[:-1], self.kv_heads, self.head_width)
        return rotate(self.k_norm(self.k_proj(x).reshape(shape)), table), self.v_proj(x).reshape(shape)

    @jax.named_scope("attention")
    def __call__(self, x: jax.Array, table, context: Context, **visibility) -> jax.Array:
        """x: [B, A, W, D] block states -> [B, A, W, D]."""
        queries = self.q_proj(x).reshape(*x.shape[:-1], self.heads, self.head_width)
        queries = rotate(self.q_norm(queries), table)
        y = attend_block(queries, context, self.keys_values(x, table), **visibility)
        return self.o_proj(y.reshape(*x.shape[:-1], -1))


class DrafterLayer(nnx.Module):
    def __init__(self, config: DrafterConfig, index: int, rngs: nnx.Rngs):
        c = config
        self.causal, self.window = c.causal(index), c.reach(index)
        self.input_layernorm = RMSNorm(rngs, "embed", c.width, eps=c.norm_eps)
        self.self_attn = BlockAttention(c, rngs)
        self.post_attention_layernorm = RMSNorm(rngs, "embed", c.width, eps=c.norm_eps)
        self.mlp = SwiGLU(rngs, c.width, c.mlp_width)

    def __call__(self, x: jax.Array, table, context: Context) -> jax.Array:
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, table, context, causal=self.causal, window=self.window)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nnx.Module):
    def __init__(self, config: DrafterConfig, rngs: nnx.Rngs):
        self.config = config
        self.fc = Linear(rngs, "embed features", config.width, config.feature_width)
        self.hidden_norm = RMSNorm(rngs, "embed", config.width, eps=config.norm_eps)
        self.layers = nnx.List([DrafterLayer(config, i, rngs) for i in range(len(config.layer_types))])
        self.norm = RMSNorm(rngs, "embed", config.width, eps=config.norm_eps)
        if config.width != config.target_width:
            self.embed_proj = Linear(rngs, "embed features", config.width, config.target_width)
            self.head_proj = Linear(rngs, "features embed", config.target_width, config.width)

    def context(self, features: jax.Array, positions: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """Keys and values of every layer, [B, S, K, H] each, from features [B, S, T * E].

        They do not depend on any block, so they are computed once for all anchors of a row, and kept in a
        cache while decoding. The context is not passed through input_layernorm.
        """
        with jax.named_scope("context"):
            states = self.hidden_norm(self.fc(features))
            table = self._table(positions)
            return tuple(layer.self_attn.keys_values(states, table) for layer in self.layers)

    def __call__(
        self,
        block: jax.Array,
        positions: jax.Array,
        context: tuple[tuple[jax.Array, jax.Array], ...],
        *,
        visible: jax.Array,
        context_positions: jax.Array,
    ) -> jax.Array:
        """Hidden states [B, A, W, E] for the target's head, of embedded blocks [B, A, W, E], after the final norm.

        positions: [B, A, W] of the slots; context: from `context`; visible: [B, A, S] bool, which context
        tokens a block may see (those before its anchor in its document); context_positions: [B, S].
        """
        table = self._table(positions)
        distance = positions[..., None] - context_positions[:, None, None, :]
        projected = self.config.width != self.config.target_width
        x = self.embed_proj(block) if projected else block
        for index, (layer, keys_values) in enumerate(zip(self.layers, context, strict=True)):
            with jax.named_scope(f"drafter_layer_{index}"):
                x = layer(x, table, Context(*keys_values, visible, distance))
        x = self.norm(x)
        return self.head_proj(x) if projected else x

    def _table(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = self.config
        return Rope(c.rope_theta, c.head_width, c.yarn).table(positions)
