"""Chain speculative decoding with a DFlash drafter, greedy: the tokens of plain decoding in fewer target passes.

    draft   [x_a, MASK ..] -> proposals d_1 .. d_{W-1}        one drafter pass over context t < a
    verify  [x_a, d_1 .. d_{W-1}] at a .. a+W-1 -> p_0 .. p_{W-1}   one target pass; p_k is its next token
    accept  n = length of the run d_k == p_{k-1};  emit d_1 .. d_n, p_n;  the next anchor is a + n + 1

Everything runs on the device in one loop with static shapes. Lengths are tracked, nothing is trimmed by the
mask id, and what a rejected token left in a cache is overwritten by the next round.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dflash_jax.decode.generate import Sequences, prefill
from dflash_jax.models.cache import KVRows
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.target import Target
from dflash_jax.objective.objective import Frozen, embed_blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChainResult:
    """rows: the finished sequences; rounds: [B, W], rounds of each row by number of tokens emitted, minus one.

    A round counts what it emitted: accepted drafts and the bonus token, cut at a stop token or the limit.
    """

    rows: Sequences
    rounds: jax.Array


def generate_chain(
    target: Target,
    drafter: Drafter,
    frozen: Frozen,
    prompts: jax.Array,
    lengths: jax.Array,
    *,
    taps: tuple[int, ...],
    stop: tuple[int, ...],
    max_new_tokens: int,
) -> ChainResult:
    """Greedy continuations as of `generate`, drafted by `drafter`. prompts: [B, P] right-padded, lengths: [B]."""
    width = drafter.config.block_size
    # A round writes W positions from the anchor on, whatever is accepted of them.
    capacity = prompts.shape[1] + max_new_tokens + width
    stops = jnp.array(stop, jnp.int32)
    token, features, cache = prefill(target, prompts, lengths, capacity=capacity, taps=taps)
    context = _empty_context(drafter, prompts.shape[0], capacity, frozen.embedding.dtype)
    context = _remember(drafter, context, features, jnp.zeros_like(lengths))
    one = jnp.ones(lengths.shape, jnp.int32)
    rows = Sequences.start(prompts, lengths, capacity=capacity)
    rows = rows.append(token[:, None], one, stop=stops, limit=max_new_tokens)
    rounds = jnp.zeros((prompts.shape[0], width), jnp.int32)

    def body(carry):
        token, cache, context, rows, rounds = carry
        drafts = draft_block(drafter, frozen, token, cache.lengths, context)
        block = jnp.concatenate([token[:, None], drafts], axis=1)
        features, last, step = target.step(block, cache, taps=taps)
        chosen = jnp.argmax(target.logits(last), axis=-1).astype(jnp.int32)
        accepted = jnp.cumprod(drafts == chosen[:, :-1], axis=1).sum(axis=1)
        # chosen[k] equals drafts[k] wherever that was accepted, so chosen[: n + 1] is what the round emits.
        grown = rows.append(chosen, accepted + 1, stop=stops, limit=max_new_tokens)
        emitted = grown.lengths - rows.lengths
        rounds = rounds + (jnp.arange(width) == emitted[:, None] - 1)
        context = _remember(drafter, context, features, cache.lengths)
        token = jnp.take_along_axis(chosen, accepted[:, None], axis=1)[:, 0]
        cache = step.keep(jnp.where(rows.done, 0, accepted + 1))
        return token, cache, context, grown, rounds

    carry = (token, cache, context, rows, rounds)
    *_, rows, rounds = jax.lax.while_loop(lambda carry: ~carry[3].done.all(), body, carry)
    return ChainResult(rows, rounds)


def draft_block(
    drafter: Drafter, frozen: Frozen, token: jax.Array, anchors: jax.Array, context: tuple[KVRows, ...]
) -> jax.Array:
    """Proposals [B, W - 1] for the positions after the anchors.

    token: [B] anchor tokens at positions `anchors` [B]; context: keys and values of features before them.
    """
    config = drafter.config
    block = embed_blocks(token[:, None], frozen, block_size=config.block_size, mask_token=config.mask_token)
    positions = anchors[:, None, None] + jnp.arange(config.block_size)
    capacity = context[0].keys.shape[1]
    at = jnp.broadcast_to(jnp.arange(capacity), (token.shape[0], capacity))
    hidden = drafter(
        block,
        positions,
        context,
        visible=(at < anchors[:, None])[:, None],
        context_positions=at,
    )
    return frozen.tokens_of(jnp.argmax(frozen.logits(hidden[:, 0, 1:]), axis=-1)).astype(jnp.int32)


def _empty_context(drafter: Drafter, rows: int, capacity: int, dtype: jnp.dtype) -> tuple[KVRows, ...]:
    config = drafter.config
    shape = (rows, capacity, config.kv_heads, config.head_width)
    return tuple(KVRows.empty(shape, dtype) for _ in config.layer_types)


def _remember(
    drafter: Drafter, context: tuple[KVRows, ...], features: jax.Array, starts: jax.Array
) -> tuple[KVRows, ...]:
    """Write the context of features [B, S, T * E] from position starts [B] of each row on."""
    positions = starts[:, None] + jnp.arange(features.shape[1])
    added = drafter.context(features.astype(context[0].keys.dtype), positions)
    return tuple(rows.write(*new, starts) for rows, new in zip(context, added, strict=True))
