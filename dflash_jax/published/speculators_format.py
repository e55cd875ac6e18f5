"""The format of the package speculators (PyPI, 0.9.0): what a config.json means, and how one is written.

The layers are described by a nested Qwen3Config. Layers of the target are numbered as inputs, the embedding's
output being 0, so that an id is ours + 1. Sliding layers are causal inside a block or not, all of them alike; full
layers never are. A reduced vocabulary has V' head rows; d2t[i] + i is the token of row i, t2d marks those tokens.
"""

import dataclasses
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.models.drafter import FULL, SLIDING
from dflash_jax.published.drafter_fields import (
    UNDERSTOOD,
    WITHOUT_EFFECT,
    DrafterFields,
    Fields,
    TargetFacts,
    causality_differs,
    layer_ids,
    read_layers,
    refuse_unknown,
    supported,
    whole,
    write_layers,
)

KIND, VERSION = "dflash", "0.9.0"
REQUIRED = (
    "aux_hidden_state_layer_ids",
    "block_size",
    "draft_vocab_size",
    "mask_token_id",
    "transformer_layer_config",
)
KNOWN = (
    *REQUIRED,
    "architectures",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "target_hidden_size",
)
# Tensors that older versions save too: copies of the target's, of which no use is made.
COPIES = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
VOCABULARY = ("d2t", "t2d")


def is_speculators(fields: Fields) -> bool:
    """Whether a config.json is in this format."""
    return "speculators_model_type" in fields


def read(fields: Fields) -> DrafterFields:
    """The drafter that a config.json describes. Raises UserError for a key that is missing or not supported."""
    supported(fields, "speculators_model_type", KIND)
    refuse_unknown(fields, (*KNOWN, *WITHOUT_EFFECT))
    if missing := [key for key in REQUIRED if fields.get(key) is None]:
        raise UserError(f"{', '.join(missing)} missing; expected the configuration of a {KIND} speculator")
    supported(fields, "architectures", ["DFlashDraftModel"], ["DFlashSpeculator"])
    # TRAP: with true, slot k predicts the token after the one at its own position.
    supported(fields, "sample_from_anchor", False)
    layers = fields["transformer_layer_config"]
    refuse_unknown(layers, (*UNDERSTOOD, *WITHOUT_EFFECT), where="transformer_layer_config.")
    algorithm = (fields.get("speculators_config") or {}).get("algorithm", KIND)
    if algorithm != KIND:
        raise UserError(f"speculators_config.algorithm {algorithm!r} is not supported; supported: {KIND!r}")
    inputs = layer_ids(fields["aux_hidden_state_layer_ids"], "aux_hidden_state_layer_ids")
    if 0 in inputs:
        raise UserError("aux_hidden_state_layer_ids: found 0, the embedding's output; supported: layers from 1 on")
    taps = tuple(layer - 1 for layer in inputs)
    width = fields.get("target_hidden_size")
    config = read_layers(
        layers,
        taps=taps,
        tap_width=whole(layers, "hidden_size") if width is None else whole(fields, "target_hidden_size"),
        block_size=whole(fields, "block_size"),
        mask_token=whole(fields, "mask_token_id", low=0),
        is_causal=None,
    )
    both_ways = fields.get("sliding_window_non_causal", False)
    if not isinstance(both_ways, bool):
        raise UserError(f"sliding_window_non_causal: found {both_ways!r}, expected true or false")
    if both_ways and SLIDING in config.layer_types:
        config = dataclasses.replace(config, is_causal=False)
    vocab, draft_vocab = whole(layers, "vocab_size"), whole(fields, "draft_vocab_size")
    if draft_vocab > vocab:
        raise UserError(f"draft_vocab_size: found {draft_vocab}, expected at most vocab_size {vocab}")
    return DrafterFields(config, taps, vocab=vocab, draft_vocab=draft_vocab if draft_vocab < vocab else None)


def write(fields: DrafterFields, target: TargetFacts, *, dtype: str) -> dict[str, Any]:
    """config.json for a drafter; dtype: of the weights. Raises UserError for what this format cannot say."""
    config = fields.config
    full, sliding = FULL in config.layer_types, SLIDING in config.layer_types
    if full and config.is_causal:
        raise UserError("format: full layers that are causal cannot be said in speculators' format; use zlab")
    for key, given in (("embedding_scale", fields.embedding_scale != 1), ("logit_softcap", fields.softcap)):
        if given:
            raise UserError(f"format: the target has an {key}, which speculators' format cannot say; use zlab")
    bidirectional = causality_differs(config) and not config.is_causal
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in fields.taps],
        "block_size": config.block_size,
        "draft_vocab_size": fields.draft_vocab or target.vocab,
        "dtype": dtype,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": False,
        # TRAP: vLLM makes all layers causal unless this is true, full ones included.
        "sliding_window_non_causal": bidirectional or not sliding,
        "speculators_config": {
            "algorithm": KIND,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - 1,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": list(target.architectures), "name_or_path": target.place},
        },
        "speculators_model_type": KIND,
        "speculators_version": VERSION,
        "target_hidden_size": fields.tap_width if fields.has_own_ends else None,
        "tie_word_embeddings": False,
        "transformer_layer_config": write_layers(fields, target, dtype=dtype),
    }
