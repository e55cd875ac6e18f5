"""From a recipe and the target it names to concrete choices: taps, MASK token, sizes, draft vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DrafterSection, ObjectiveSection
from dflash_jax.errors import UserError
from dflash_jax.models.drafter import FULL, SLIDING, DrafterConfig
from dflash_jax.models.taps import checked_taps, most_taps, published_taps
from dflash_jax.models.target import TargetConfig
from dflash_jax.models.yarn import Yarn
from dflash_jax.objective.head import Rule
from dflash_jax.objective.noise import NoiseSchedule, noise_schedule
from dflash_jax.objective.slot_weights import default_gamma, slot_weights
from dflash_jax.objective.terms import needs_teacher


def tap_layers(section: DrafterSection, target: TargetConfig) -> tuple[int, ...]:
    """The tapped layers: the given ones, or drafter.tap_count of them by the published rule."""
    if section.taps is not None:
        return checked_taps(section.taps, target.layers)
    if section.tap_count > (most := most_taps(target.layers)):
        raise UserError(
            f"drafter.tap_count: found {section.tap_count}, allowed: 1 to {most} in a target of {target.layers} "
            "layers, or name the layers in drafter.taps"
        )
    return checked_taps(published_taps(target.layers, section.tap_count), target.layers)


def mask_token(section: DrafterSection, tokenizer: Any, target: TargetConfig) -> int:
    """The token id of MASK. Raises UserError if it has no embedding row or is a token of the text's end."""
    token = section.mask_token
    if token is None:
        token = len(tokenizer)
        if token >= target.vocab:
            raise UserError(
                f"drafter.mask_token: null needs an embedding row past the tokenizer, but both have "
                f"{target.vocab}; name a token that never occurs in the data"
            )
    if token >= target.vocab:
        raise UserError(f"drafter.mask_token: found {token}, allowed: 0 to {target.vocab - 1}")
    for name in ("eos_token_id", "pad_token_id"):
        if token == getattr(tokenizer, name):
            raise UserError(f"drafter.mask_token: {token} is the tokenizer's {name}; name an unused token")
    return token


def refuse_zero_row(embedding: jax.Array, token: int) -> None:
    """Raise UserError if MASK's row of the embedding [V, D] is zero: the first layer could not use its slots."""
    if not jnp.any(embedding[token] != 0):
        raise UserError(
            f"drafter.mask_token: the target's embedding row of token {token} is all zeros, so that MASK slots "
            "would be alike after the first layer; set drafter.mask_token to an unused token with a row of its own"
        )


def drafter_config(
    section: DrafterSection, target: TargetConfig, *, taps: tuple[int, ...], mask_token: int
) -> DrafterConfig:
    """The drafter's sizes: the section's, or the target's own where it leaves them null.

    Of the target's RoPE only the base is taken: YaRN, partial or sectioned rotation of a target are its own.
    """
    layer_types = (FULL,) * section.layers if section.layer_types is None else tuple(section.layer_types)
    if len(layer_types) != section.layers:
        raise UserError(
            f"drafter.layer_types: found {len(layer_types)} layers, but drafter.layers is {section.layers}"
        )
    if SLIDING in layer_types and section.sliding_window is None:
        raise UserError(f"drafter.sliding_window: a window is required where drafter.layer_types has {SLIDING}")
    heads, kv_heads = section.heads or target.heads, section.kv_heads or target.kv_heads
    if heads % kv_heads:
        whose = "" if section.kv_heads else " (the target's)"
        raise UserError(f"drafter.kv_heads: found {kv_heads}{whose}, allowed: divisors of drafter.heads={heads}")
    head_width = section.head_width or target.head_width
    if head_width % 2:
        raise UserError(f"drafter.head_width: found {head_width}, allowed: even numbers (RoPE turns pairs)")
    mlp_width = section.mlp_width or target.mlp_width
    if mlp_width is None:
        raise UserError(
            "drafter.mlp_width: a number is required, for this target has no dense MLP to take it from"
        )
    return DrafterConfig(
        width=section.width or target.width,
        target_width=target.width,
        mlp_width=mlp_width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        feature_width=len(taps) * target.width,
        block_size=section.block_size,
        mask_token=mask_token,
        rope_theta=section.rope_theta or target.rope_theta,
        norm_eps=target.norm_eps,
        layer_types=layer_types,
        window=section.sliding_window,
        is_causal=section.is_causal,
        yarn=_yarn(section),
    )


def _yarn(section: DrafterSection) -> Yarn | None:
    factor, length = section.rope_factor, section.rope_original_length
    if factor is None and length is None:
        return None
    if factor is None or length is None:
        missing = "rope_factor" if factor is None else "rope_original_length"
        raise UserError(f"drafter.{missing}: YaRN needs drafter.rope_factor and drafter.rope_original_length")
    return Yarn.usual(factor, length)


def decay(section: ObjectiveSection, block_size: int) -> float:
    """The decay constant of the slot weights: the given one, or the one that goes with the block size."""
    return default_gamma(block_size) if section.gamma is None else section.gamma


def rule(section: ObjectiveSection, block_size: int) -> Rule:
    """The terms of the objective with their factors, and the weights of its slots."""
    terms = {"ce": 1.0} if section.terms is None else section.terms
    if section.head_sample is not None and needs_teacher(terms):
        raise UserError(
            f"objective.head_sample: found {section.head_sample}, but the terms {', '.join(terms)} compare whole "
            "distributions; set head_sample to null, or use the term ce alone"
        )
    gamma, alpha = decay(section, block_size), section.dpace_alpha
    return Rule(tuple(terms.items()), slot_weights(section.slot_weights, gamma=gamma, alpha=alpha))


def noise(section: ObjectiveSection, steps: int) -> NoiseSchedule | None:
    """The standard deviation of the features' noise by step, or None without noise."""
    return noise_schedule(
        peak=section.noise_peak,
        end=section.noise_end,
        warmup=section.noise_warmup,
        shape=section.noise_schedule,
        steps=steps,
    )


def draft_vocabulary(size: int | None, counts: np.ndarray, *, vocab: int) -> np.ndarray | None:
    """[V'] int32, ascending: the `size` tokens that are supervised most often, or None for all tokens.

    counts: [<= V] occurrences under the loss mask. Where fewer tokens occur than `size`, the lowest other ids
    fill up: in a byte-pair vocabulary they are the earliest merges, hence the most frequent tokens.
    """
    if size is None or size >= vocab:
        return None
    padded = np.pad(counts, (0, vocab - len(counts)))
    order = np.lexsort((np.arange(vocab), -padded))
    return np.sort(order[:size]).astype(np.int32)
