"""Targets in folders: which are taken, what their configuration means, and strict loading."""

import functools
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny_models import load_target, save_llama

from dflash_jax.errors import UserError
from dflash_jax.published.targets import TargetFiles


@functools.partial(jax.jit, static_argnames="taps")
def hidden(target, tokens, taps=(0, 1)):
    positions = jnp.arange(len(tokens))[None]
    return target.hidden(tokens[None], positions, segment_ids=jnp.ones_like(positions), taps=taps)


def random_tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, 66, 17))


def test_features_keep_the_order_of_the_taps(plain_llama):
    target = load_target(plain_llama.path)
    first, _ = hidden(target, random_tokens(), taps=(0, 1))
    second, _ = hidden(target, random_tokens(), taps=(1, 0))
    np.testing.assert_array_equal(first[..., :36], second[..., 36:])
    np.testing.assert_array_equal(first[..., 36:], second[..., :36])


@pytest.fixture
def folder(plain_llama, tmp_path):
    """A copy of a model folder that a test may spoil."""
    return shutil.copytree(plain_llama.path, tmp_path / "copy")


def change_config(folder, **changes):
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in fields.items() if value != "absent"}))


def test_every_tensor_that_does_not_fit_is_named_at_once(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.3.input_layernorm.weight"] = np.ones(36, np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.ones((36, 20), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError) as error:
        load_target(folder)
    message = str(error.value)
    for part in (
        str(folder),
        "4 tensors",
        "missing model.norm.weight",
        "missing model.layers.2.mlp.up_proj.weight",
        "unexpected model.layers.3.input_layernorm.weight [36]",
        "model.layers.0.self_attn.k_proj.weight has shape [36, 20], expected [20, 36]",
    ):
        assert part in message


def test_a_long_list_of_faults_is_cut_and_counted(folder):
    save_file({"nothing": np.ones(1, np.float32)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"31 tensors do not fit .*and 23 more"):
        load_target(folder)


def test_a_tied_checkpoint_may_repeat_the_head(tied_llama, tmp_path):
    folder = shutil.copytree(tied_llama.path, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    target = load_target(folder)
    assert target.head is target.embedding


def test_an_untied_checkpoint_needs_its_head(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"missing lm_head\.weight"):
        load_target(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba'.*supported: llama"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 731.0, "factor": 4.0}}, "rope_type 'yarn'"),
        (
            {"rope_parameters": "absent", "rope_theta": 731.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type 'linear'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rms_norm_eps": "absent"}, "lacks 'rms_norm_eps'"),
        ({"rope_parameters": "absent"}, "rope_theta missing"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder, changes, named):
    change_config(folder, **changes)
    with pytest.raises(UserError, match=named):
        load_target(folder)


def test_both_spellings_of_the_rope_fields_mean_the_same(folder):
    new = TargetFiles.open(folder).config
    change_config(folder, rope_parameters="absent", rope_theta=731.0, rope_scaling=None)
    assert TargetFiles.open(folder).config == new
    assert new.rope_theta == 731.0


def test_the_head_width_may_be_left_out(tied_llama, tmp_path):
    folder = shutil.copytree(tied_llama.path, tmp_path / "copy")
    change_config(folder, head_dim="absent")
    assert TargetFiles.open(folder).config == TargetFiles.open(tied_llama.path).config


def test_weights_in_several_files_load_as_one(tmp_path):
    whole = save_llama(tmp_path / "whole", seed=4)
    split = save_llama(tmp_path / "split", seed=4, max_shard_size="20KB")
    files = sorted(split.path.glob("*.safetensors"))
    assert len(files) > 2
    tokens = random_tokens()
    for one, other in zip(*(hidden(load_target(hub.path), tokens) for hub in (whole, split)), strict=True):
        np.testing.assert_array_equal(one, other)
    files[1].unlink()
    with pytest.raises(UserError, match=f"weight file {files[1].name} is missing"):
        load_target(split.path)


def test_bfloat16_weights_are_widened_exactly(plain_llama, folder):
    tensors = load_file(folder / "model.safetensors")
    narrow = {name: array.astype(jnp.bfloat16) for name, array in tensors.items()}
    save_file(narrow, folder / "model.safetensors")
    loaded = load_target(folder).model.layers[2].mlp.down_proj.weight[...]
    expected = plain_llama.torch_model.model.layers[2].mlp.down_proj.weight.detach().to(torch.bfloat16).float()
    assert loaded.dtype == jnp.float32
    np.testing.assert_array_equal(loaded, expected.numpy())


def test_a_path_that_holds_no_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"neither a model folder nor a \.gguf file"):
        TargetFiles.open(tmp_path / "nowhere")
    command = "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B, then target.path=models/Qwen3-8B"
    with pytest.raises(UserError, match=command):
        TargetFiles.open(pathlib.Path("Qwen/Qwen3-8B"))
    with pytest.raises(UserError, match=r"no config\.json"):
        TargetFiles.open(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(UserError, match="not valid JSON"):
        TargetFiles.open(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"model_type": "ll\xe4ma"}')
    with pytest.raises(UserError, match=r"not valid JSON \(.*can't decode byte 0xe4"):
        TargetFiles.open(tmp_path)
    for text in ("[]", "null", '"llama"'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(
            UserError, match=rf"config\.json: expected a JSON object, found {re.escape(text)}; fetch"
        ):
            TargetFiles.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"^target\.path: the config\.json of .* lacks model_type; supported: llama, "
    ):
        TargetFiles.open(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ["llama"]}')
    with pytest.raises(UserError, match=r"^target\.path: model_type \['llama'\] in .* is not supported"):
        TargetFiles.open(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="damaged or not a safetensors file"):
        list(TargetFiles.open(tmp_path).tensors())
