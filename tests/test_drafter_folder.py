"""Published drafter folders: z-lab's golden outputs through the reader, both spellings, and what is refused."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import (
    GOLDEN,
    load_drafter,
    published_drafter,
    published_folder,
    published_tables,
    random_drafter,
    save_drafter,
)

from dflash_jax.errors import UserError
from dflash_jax.models.drafter import FULL, SLIDING
from dflash_jax.models.rope import Rope
from dflash_jax.models.yarn import Yarn
from dflash_jax.published.drafter_folder import DrafterFolder
from dflash_jax.published.rope_fields import read_rope

YARN = {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 48}
FILES = {"full": "zlab_drafter.npz", "sliding": "zlab_drafter_swa.npz"}


@pytest.mark.parametrize("kind", FILES)
def test_both_spellings_are_the_published_drafter(tmp_path, kind):
    old = DrafterFolder.open(published_folder(tmp_path / "4", kind))
    new = DrafterFolder.open(published_folder(tmp_path / "5", kind, spelling="config.v5.json"))
    assert old.config == new.config == published_drafter(kind).config
    assert old.taps == new.taps == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("kind", FILES)
def test_a_loaded_folder_computes_what_z_lab_computes(tmp_path, kind):
    drafter, golden = load_drafter(published_folder(tmp_path / kind, kind)), np.load(GOLDEN / FILES[kind])
    positions = jnp.asarray(golden["a_position_ids"])
    context_positions = positions[:, :13]
    found = jax.jit(
        lambda block, features: drafter(
            block,
            positions[:, None, 13:],
            drafter.context(features, context_positions),
            visible=jnp.ones((2, 1, 13), bool),
            context_positions=context_positions,
        )
    )(published_tables().embedding[golden["a_noise_ids"]][:, None], jnp.asarray(golden["a_target_hidden"]))
    np.testing.assert_allclose(found[:, 0], golden["a_output"], rtol=0, atol=1e-5)


def edited(tmp_path, changes: dict, *, kind: str = "sliding"):
    """A published folder with top-level keys of its config.json changed; `...` removes one, dicts are merged."""
    path = published_folder(tmp_path / "edited", kind)
    fields = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        if isinstance(value, dict):
            fields[key] = {**(fields.get(key) or {}), **value}
        else:
            fields[key] = value
    (path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
    return path


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, r"architectures \['DFlash2DraftModel'\]"),
        ({"architectures": ["Qwen3DSparkModel"]}, r"architectures .*supported: \['DFlashDraftModel'\]"),
        ({"dflash_config": {"conv_kernel_size": 2}}, "conv_kernel_size 2"),
        ({"conv_group_size": 16}, "conv_group_size 16"),
        ({"dflash_config": {"selector_rank": 256}}, "selector_rank 256"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type 'domino'"),
        ({"dflash_config": {"novelty": 1}}, r"unknown key dflash_config\.novelty"),
        ({"novelty": 1}, r"unknown key novelty = 1; remove it if it has no effect"),
        ({"dflash_config": {"input_embedding_scale": -8.0}}, r"input_embedding_scale: found -8\.0"),
        ({"final_logit_softcapping": "30"}, r"final_logit_softcapping: found '30'"),
        ({"dflash_config": {"output_multiplier": 0.5}}, r"output_multiplier 0\.5 is not supported"),
        ({"dflash_config": {"use_swa": True}}, "use_swa True"),
        ({"dflash_config": {"target_hidden_size": 0}}, "target_hidden_size: found 0"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"head_dim": ..., "rms_norm_eps": ...}, "head_dim, rms_norm_eps missing"),
        ({"head_dim": "16"}, "head_dim: found '16'"),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id: found None"),
        ({"dflash_config": {"target_layer_ids": ["1"]}}, r"target_layer_ids: found \['1'\]"),
        ({"dflash_config": {"block_size": 4}}, "block_size is 4 in dflash_config, but 8 at the top level"),
        ({"dflash_config": {"causal": False}}, r"dflash_config\.causal is False"),
        ({"is_causal": "yes"}, "is_causal: found 'yes'"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "'linear_attention' is not"),
        ({"layer_types": ["full_attention"]}, "names 1 layers, but num_hidden_layers is 3"),
        ({"use_sliding_window": False}, "use_sliding_window is False"),
        ({"sliding_window": None}, "sliding_window: found None"),
        ({"rope_theta": ...}, "rope_theta missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings: found None"),
        ({"rope_scaling": {"mrope_section": [1, 2]}}, "RoPE key 'mrope_section'"),
        ({"partial_rotary_factor": 0.25}, r"partial_rotary_factor 0\.25"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "contradict"),
        ({"rope_parameters": {"rope_type": "yarn", **YARN}}, "contradict"),
    ],
)  # fmt: skip
def test_what_would_be_computed_differently_is_refused_by_name(tmp_path, changes, named):
    with pytest.raises(UserError, match=rf"edited/config\.json: .*({named})"):
        DrafterFolder.open(edited(tmp_path, changes))


def test_a_folder_without_a_configuration_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        DrafterFolder.open(tmp_path)


def test_the_defaults_are_z_labs(tmp_path):
    absent = {"dflash_config": ..., "block_size": ..., "layer_types": ...}
    given = {"mask_token_id": 210, "num_target_layers": 36, "max_window_layers": 1}
    folder = DrafterFolder.open(edited(tmp_path, absent | given))
    assert folder.taps == (1, 17, 33)
    assert folder.config.block_size == 16
    assert folder.config.layer_types == (FULL, SLIDING, SLIDING)


def test_values_may_stand_at_the_top_level_as_well(tmp_path):
    mirrored = {"mask_token_id": 210, "target_layer_ids": [0, 1, 2, 3, 4], "dflash_config": {"block_size": 8}}
    assert DrafterFolder.open(edited(tmp_path, mirrored)).config == published_drafter("sliding").config


def test_a_window_that_no_layer_uses_is_none(tmp_path):
    path = edited(tmp_path, {"sliding_window": 4096, "use_sliding_window": True}, kind="full")
    assert DrafterFolder.open(path).config.window is None


@pytest.mark.parametrize("causal", [True, False])
def test_is_causal_is_read_and_vllms_copy_of_it_may_stand_beside(tmp_path, causal):
    path = edited(tmp_path, {"is_causal": causal, "dflash_config": {"causal": causal}})
    config = DrafterFolder.open(path).config
    assert [config.causal(layer) for layer in range(3)] == [causal] * 3


def test_yarn_is_the_same_in_every_spelling():
    yarn = Yarn(4.0, 4096, Yarn.usual(4.0, 4096).attention_factor, beta_fast=48.0)
    expected = Rope(1e6, 64, yarn)
    yarn = {"rope_type": "yarn", **YARN}
    for fields in (
        {"rope_theta": 1e6, "rope_scaling": yarn},
        {"rope_theta": 1000000, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_parameters": {"rope_theta": 1e6, **yarn}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, **yarn}},
        {"rope_theta": 1e6, "rope_parameters": yarn, "rope_scaling": yarn},
    ):
        assert read_rope(fields, 64) == expected
    with pytest.raises(UserError, match="contradict"):
        read_rope({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, **yarn}, "rope_scaling": None}, 64)


def test_every_wrong_tensor_is_named_at_once(tmp_path):
    path = published_folder(tmp_path / "wrong", "full")
    tensors = load_file(path / "model.safetensors")
    del tensors["layers.1.self_attn.k_norm.weight"]
    tensors["lm_head.weight"] = np.zeros((211, 64), np.float32)
    tensors["fc.weight"] = np.zeros((64, 256), np.float32)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(UserError) as raised:
        load_drafter(path)
    for fault in (
        "missing layers.1.self_attn.k_norm.weight",
        "unexpected lm_head.weight [211, 64]",
        "fc.weight has shape [64, 256], expected [64, 320]",
    ):
        assert fault in str(raised.value)


def test_a_written_drafter_is_read_back(tmp_path):
    yarn = Yarn(8.0, 2048, 1.5, beta_fast=20.0, truncate=False)
    drafter = random_drafter(3, yarn=yarn, is_causal=False)
    folder = DrafterFolder.open(save_drafter(tmp_path / "drafter", drafter, taps=(1, 3)))
    assert folder.config == drafter.config
    assert folder.taps == (1, 3)


# What a folder is for.


def misfits(path, **changes) -> list[str]:
    target = {"width": 64, "layers": 8, "vocab": 211, "embedding_scale": None, "logit_softcap": None} | changes
    return DrafterFolder.open(path).misfits(types.SimpleNamespace(**target))


def test_a_folder_fits_its_target_and_no_other(tmp_path):
    path = published_folder(tmp_path / "folder", "full")
    assert misfits(path) == []
    for changes, named in (
        ({"width": 96}, "for a target of width 64, and the target has width 96"),
        ({"layers": 5}, "taps layer 4, and the last that may be is 3"),
        ({"vocab": 210}, "MASK is token 210, and the last is 209"),
        ({"vocab": 300}, "vocab_size is 211, and the target has 300 embedding rows"),
        ({"embedding_scale": 8.0}, "input_embedding_scale is 1.0, and the target's is 8.0"),
        ({"logit_softcap": 30.0}, "final_logit_softcapping is None, and the target's is 30.0"),
    ):
        assert named in "; ".join(misfits(path, **changes))


def test_scale_and_softcap_are_the_targets(tmp_path):
    given = {"input_embedding_scale": 8.5, "final_logit_softcapping": 30.0}
    path = edited(tmp_path, {"dflash_config": given})
    fields = DrafterFolder.open(path).fields
    assert (fields.embedding_scale, fields.softcap) == (8.5, 30.0)
    assert misfits(path, embedding_scale=8.53, logit_softcap=30.0) == []  # apart by a rounding to bfloat16
    assert len(misfits(path, embedding_scale=8.6, logit_softcap=30.0)) == 1
    assert len(misfits(path)) == 2


def test_a_drafter_of_another_width_must_come_with_its_ends(tmp_path):
    folder = DrafterFolder.open(edited(tmp_path, {"dflash_config": {"target_hidden_size": 96}}))
    assert (folder.config.width, folder.config.target_width, folder.config.feature_width) == (64, 64, 5 * 96)
    with pytest.raises(UserError, match=r"embed_tokens\.weight: found none, expected \[211, 64\]"):
        folder.own_embedding()


# The other format.


def speculators_folder(tmp_path, **changes):
    """A folder in speculators' format with keys of its config.json changed, as in `edited`."""
    layers = {
        **{"model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False},
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 211, "sliding_window": 10},
        **{"layer_types": [SLIDING, FULL], "use_sliding_window": True},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    fields = {
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [2, 5],
        "block_size": 8,
        "draft_vocab_size": 211,
        "mask_token_id": 210,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dflash"},
        "transformer_layer_config": layers,
    }
    for key, value in changes.items():
        fields[key] = {**fields.get(key, {}), **value} if isinstance(value, dict) else value
    path = tmp_path / "folder"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
    return path


def test_layers_are_numbered_from_one_in_speculators_format(tmp_path):
    folder = DrafterFolder.open(speculators_folder(tmp_path))
    assert folder.taps == (1, 4)
    assert folder.draft_tokens() is None
    assert [folder.config.causal(layer) for layer in range(2)] == [True, False]


def test_sliding_layers_may_see_both_ways(tmp_path):
    config = DrafterFolder.open(speculators_folder(tmp_path, sliding_window_non_causal=True)).config
    assert [config.causal(layer) for layer in range(2)] == [False, False]
    assert [config.reach(layer) for layer in range(2)] == [10, None]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type 'eagle3'"),
        ({"sample_from_anchor": True}, "sample_from_anchor True is not supported; supported: False"),
        ({"novelty": 1}, "unknown key novelty"),
        ({"transformer_layer_config": {"is_causal": True}}, r"unknown key transformer_layer_config\.is_causal"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "model_type 'llama'"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids missing"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids: found 0"),
        ({"draft_vocab_size": ...}, "draft_vocab_size missing"),
        ({"draft_vocab_size": 212}, "draft_vocab_size: found 212, expected at most vocab_size 211"),
        ({"speculators_config": {"algorithm": "dspark"}}, r"speculators_config\.algorithm 'dspark'"),
        ({"sliding_window_non_causal": None}, "sliding_window_non_causal: found None"),
        ({"mask_token_id": -1}, "mask_token_id: found -1"),
        ({"block_size": "8"}, "block_size: found '8'"),
    ],
)
def test_what_speculators_format_says_that_is_not_dflash_is_refused(tmp_path, changes, named):
    with pytest.raises(UserError, match=rf"folder/config\.json: .*{named}"):
        DrafterFolder.open(speculators_folder(tmp_path, **changes))


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({}, "d2t missing, but draft_vocab_size is 3 of 211 tokens"),
        ({"d2t": np.array([4, 4, 9]), "t2d": np.arange(211) == 4}, "do not name the same 3 tokens of 211"),
        ({"d2t": np.array([4, 5]), "t2d": np.isin(np.arange(211), [4, 6])}, r"d2t \[2\] and t2d \[211\] do not"),
        ({"d2t": np.array([4, 5, 9]), "t2d": np.isin(np.arange(212), [4, 6, 11])}, r"t2d \[212\] do not name"),
    ],
)
def test_a_draft_vocabulary_must_be_whole(tmp_path, tensors, named):
    path = speculators_folder(tmp_path, draft_vocab_size=3)
    save_file({"norm.weight": np.zeros(1, np.float32), **tensors}, path / "model.safetensors")
    with pytest.raises(UserError, match=named):
        DrafterFolder.open(path).draft_tokens()
    whole = {"d2t": np.array([4, 5, 9]), "t2d": np.isin(np.arange(211), [4, 6, 11])}
    save_file(whole, path / "model.safetensors")
    assert DrafterFolder.open(path).draft_tokens().tolist() == [4, 6, 11]
