"""Exported drafters in the packages that they are written for, and folders that these packages write, here."""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_exports import KINDS, TAPS, exported, finished, speculators_alone
from tiny_models import frozen_of, load_drafter, load_target, quick, random_drafter
from zlab_decoding import accepted_by_zlab

from dflash_jax import export
from dflash_jax.decode.chain import generate_chain
from dflash_jax.models.drafter import Drafter
from dflash_jax.published.drafter_folder import DrafterFolder

CONTEXT, BLOCK, MASK = 19, 5, 6
TOKENS = [11] + [MASK] * (BLOCK - 1)
AT = np.arange(CONTEXT + BLOCK)
ROUNDING = 2.0**-7  # of bfloat16 weights, relative to the largest logit
FEATURES = np.random.default_rng(4).standard_normal((CONTEXT, 72)).astype(np.float32)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """The checks after writing are what these tests stand in for."""
    monkeypatch.setattr(export, "check_folder", lambda *_, **__: None)


def drafted(drafter: Drafter, target: Any) -> np.ndarray:
    """[W, V] logits of ours for one block behind the features."""
    before, slots = jnp.asarray(AT[None, :CONTEXT]), jnp.asarray(AT[None, None, CONTEXT:])
    frozen = frozen_of(target)
    states = quick(
        lambda block, features: drafter(
            block,
            slots,
            drafter.context(features, before),
            visible=jnp.ones((1, 1, CONTEXT), bool),
            context_positions=before,
        )
    )(frozen.embed(jnp.array(TOKENS))[None, None], FEATURES[None])
    return np.asarray(frozen.logits(states))[0, 0]


def same(found: np.ndarray, expected: np.ndarray, *, error: float) -> None:
    """Logits are equal up to an error, of the largest, and so is the best token where it is further ahead."""
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=error * scale)
    second, first = np.sort(expected, axis=-1)[..., -2:].T
    clear = first - second > 2 * error * scale
    assert (found.argmax(-1) == expected.argmax(-1))[clear].all()


# z-lab's code.


def by_dflash(folder: pathlib.Path, target: Any) -> np.ndarray:
    import torch
    from dflash import DFlashDraftModel

    theirs = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        states = theirs(
            position_ids=torch.tensor(AT[None]),
            noise_embedding=target.get_input_embeddings()(torch.tensor([TOKENS])),
            target_hidden=torch.tensor(FEATURES[None]),
        )
        return theirs.compute_logits(states, target.lm_head)[0].numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_gives_the_same_logits_in_dflash(plain_llama, tmp_path, kind):
    drafter, target = random_drafter(3, **KINDS[kind]), load_target(plain_llama.path)
    made = finished(drafter, plain_llama.path)
    whole = exported(made, tmp_path / "whole", dtype="float32")
    same(by_dflash(whole, plain_llama.torch_model), drafted(drafter, target), error=1e-5)
    rounded = exported(made, tmp_path / "rounded")
    found = by_dflash(rounded, plain_llama.torch_model)
    same(found, drafted(load_drafter(rounded), target), error=1e-5)
    same(found, drafted(drafter, target), error=10 * ROUNDING)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_an_export_is_accepted_in_dflash_as_here(few_tokens_llama, tmp_path):
    import torch
    from dflash import DFlashDraftModel

    new, never, prompts = 24, (10**6,), np.random.default_rng(5).integers(0, 7, (4, 6)).astype(np.int32)
    target = load_target(few_tokens_llama.path)
    folder = exported(finished(random_drafter(3, **KINDS["sliding"]), few_tokens_llama.path), tmp_path / "rounded")
    ours = jax.jit(functools.partial(generate_chain, taps=TAPS, stop=never, max_new_tokens=new))(
        target, load_drafter(folder), frozen_of(target), prompts, jnp.full(4, 6)
    )
    theirs = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    rounds = accepted_by_zlab(theirs, few_tokens_llama.torch_model, ours, prompts, new=new)
    assert sum(tokens > 1 for tokens in rounds) > 3, "the drafter was never right, so that nothing was compared"


@pytest.mark.parametrize("kind", ["full", "sliding", "sliding, both ways", "YaRN"])
def test_a_folder_that_dflash_saved_is_read(plain_llama, tmp_path, kind):
    import torch
    from dflash import DFlashDraftModel

    drafter = random_drafter(3, **KINDS[kind])
    first = exported(finished(drafter, plain_llama.path), tmp_path / "first", dtype="float32")
    DFlashDraftModel.from_pretrained(first, dtype=torch.float32).save_pretrained(tmp_path / "theirs")
    again = load_drafter(tmp_path / "theirs")
    assert again.config == drafter.config
    same(drafted(again, load_target(plain_llama.path)), by_dflash(first, plain_llama.torch_model), error=1e-5)


# The speculators package. Its mask is not that of engines where a window ends, so that windows are wide here.

WIDE = {"window": 64}
SPOKEN = {kind: KINDS[kind] | (WIDE if KINDS[kind]["window"] else {}) for kind in KINDS if kind != "full, causal"}


def load_speculator(folder: pathlib.Path) -> Any:
    import torch

    with speculators_alone():
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

        config = DFlashSpeculatorConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "eager"
        return DFlashDraftModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def by_speculators(theirs: Any) -> np.ndarray:
    """[W, V'] logits of the block; all behind its anchor is noise that it must not see."""
    import torch

    length = CONTEXT + BLOCK + 2
    tokens, loss_mask = torch.full((1, length), 3), torch.zeros(1, length)
    tokens[0, CONTEXT], loss_mask[0, CONTEXT] = TOKENS[0], 1
    features = torch.cat([torch.tensor(FEATURES), torch.randn(length - CONTEXT, 72)])[None]
    with torch.no_grad(), speculators_alone():
        _, logits, *_ = theirs._backbone_forward(
            features,
            tokens,
            loss_mask,
            torch.randn(1, length, 36),
            torch.zeros(1, length, dtype=int),
            max_anchors=1,
        )
    return logits[0].numpy()


@pytest.mark.parametrize("kind", SPOKEN)
def test_an_export_gives_the_same_logits_in_speculators(plain_llama, tmp_path, kind):
    drafter, target = random_drafter(3, **SPOKEN[kind]), load_target(plain_llama.path)
    made = finished(drafter, plain_llama.path)
    whole = exported(made, tmp_path / "whole", format="speculators", dtype="float32")
    same(by_speculators(load_speculator(whole)), drafted(drafter, target), error=1e-5)
    rounded = exported(made, tmp_path / "rounded", format="speculators")
    same(by_speculators(load_speculator(rounded)), drafted(load_drafter(rounded), target), error=1e-5)


def test_a_draft_vocabulary_is_read_by_speculators_and_from_its_folders(plain_llama, tmp_path):
    tokens = np.arange(3, 60, 4)
    drafter, target = random_drafter(3, **KINDS["full"]), load_target(plain_llama.path)
    made = finished(drafter, plain_llama.path, draft_tokens=tokens)
    folder = exported(made, tmp_path / "ours", format="speculators", dtype="float32")
    theirs = load_speculator(folder)
    same(by_speculators(theirs), drafted(drafter, target)[:, tokens], error=1e-5)

    with speculators_alone():
        theirs.save_pretrained(tmp_path / "theirs")
    ours, saved = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "theirs"))
    assert saved.keys() == ours.keys()
    assert all(
        np.array_equal(saved[name], array) and saved[name].dtype == array.dtype for name, array in ours.items()
    )
    opened = DrafterFolder.open(tmp_path / "theirs")
    assert opened.draft_tokens().tolist() == tokens.tolist()
    assert (opened.config, opened.taps) == (drafter.config, TAPS)
    same(drafted(load_drafter(tmp_path / "theirs"), target)[:, tokens], by_speculators(theirs), error=1e-5)


@pytest.mark.parametrize("kind", ["full", "sliding", "sliding, both ways"])
def test_a_folder_that_speculators_made_itself_is_read(plain_llama, tmp_path, kind):
    """Configuration, names and numbering are all theirs; nothing of ours was ever in it."""
    import torch
    from transformers import Qwen3Config

    config = random_drafter(3, **SPOKEN[kind]).config
    layers = Qwen3Config(
        vocab_size=66,
        hidden_size=36,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        layer_types=list(config.layer_types),
        sliding_window=64,
        use_sliding_window=config.window is not None,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    layers._attn_implementation = "eager"
    with speculators_alone():
        from speculators import SpeculatorsConfig, VerifierConfig
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        theirs = DFlashDraftModel(
            DFlashSpeculatorConfig(
                transformer_layer_config=layers,
                draft_vocab_size=66,
                block_size=BLOCK,
                mask_token_id=MASK,
                aux_hidden_state_layer_ids=[1, 2],  # layers 0 and 1 as z-lab counts
                sliding_window_non_causal=kind == "sliding, both ways",
                speculators_config=SpeculatorsConfig(
                    algorithm="dflash",
                    proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
                    default_proposal_method="greedy",
                    verifier=VerifierConfig.from_pretrained(str(plain_llama.path)),
                ),
            )
        ).eval()
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in theirs.parameters():
                noise = torch.randn(parameter.shape, generator=draw)
                parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5)
        theirs.load_verifier_weights()
        theirs.save_pretrained(tmp_path / "theirs")
    ours = load_drafter(tmp_path / "theirs")
    assert (ours.config, DrafterFolder.open(tmp_path / "theirs").taps) == (config, TAPS)
    same(drafted(ours, load_target(plain_llama.path)), by_speculators(theirs), error=1e-5)
