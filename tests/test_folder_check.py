"""A written folder that is not the drafter is caught before it appears, whatever is wrong with it."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_exports import KINDS, exported, finished
from tiny_models import random_drafter

from dflash_jax import export
from dflash_jax.errors import UserError
from dflash_jax.published.folder_check import check_folder


def swapped(tensors):
    first, second = (f"layers.1.self_attn.{x}_norm.weight" for x in "qk")
    tensors[first], tensors[second] = tensors[second], tensors[first]


def transposed(tensors):
    name = "layers.0.mlp.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)


def without_norm(tensors):
    del tensors["hidden_norm.weight"]


def with_more(tensors):
    tensors["lm_head.weight"] = np.zeros((66, 36), np.float32)


def taps_in_another_order(tensors):
    first, second = np.split(tensors["fc.weight"], 2, axis=1)
    tensors["fc.weight"] = np.concatenate([second, first], axis=1)


def not_a_number(tensors):
    tensors["norm.weight"] = np.full(36, np.nan, np.float32)


def other_tokens(tensors):
    tensors["d2t"] = tensors["d2t"] + 1


def of(change):
    """A change of the tensors in a folder."""

    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def saying(**changes):
    """A change of keys in config.json; `...` removes one, dicts are merged."""

    def damage(folder):
        fields = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            fields[key] = {**fields[key], **value} if isinstance(value, dict) else value
        (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))

    return damage


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES = {
    "head norms swapped": (of(swapped), "logits of a block differ by"),
    "taps in another order": (of(taps_in_another_order), "logits of a block differ by"),
    "a norm of NaN": (of(not_a_number), "logits of a block differ by nan"),
    "a matrix transposed": (of(transposed), r"mlp\.down_proj\.weight has shape \[40, 36\], expected \[36, 40\]"),
    "a tensor missing": (of(without_norm), r"hidden_norm\.weight has shape None, expected \[36\]"),
    "a tensor too many": (of(with_more), r"lm_head\.weight has shape \[66, 36\], expected None"),
    "the file cut": (cut, "damaged or not a safetensors file"),
    "other taps": (
        saying(dflash_config={"target_layer_ids": [1, 0]}, target_layer_ids=[1, 0]),
        r"taps is \(1, 0\)",
    ),
    "another block": (saying(dflash_config={"block_size": 6}, block_size=6), "block_size is 6, not 5"),
    "another window": (saying(sliding_window=8), r"window is \[8, None\], not \[9, None\]"),
    "another causality": (saying(is_causal=False), r"is_causal is \[False, False\], not \[True, False\]"),
    "RoPE in one spelling only": (saying(rope_theta=1e6), "contradict"),
    "no older spelling": (saying(rope_scaling=...), "config.json lacks 'rope_scaling'"),
    "a tap that is no layer": (
        saying(dflash_config={"target_layer_ids": [0, 2]}, target_layer_ids=[0, 2]),
        "it taps layer 2, and the last that may be is 1",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_not_kept(plain_llama, tmp_path, monkeypatch, name):
    damage, named = DAMAGES[name]
    refused(
        finished(random_drafter(3, **KINDS["sliding"]), plain_llama.path), tmp_path, monkeypatch, damage, named
    )


def test_a_draft_vocabulary_of_other_tokens_is_not_kept(plain_llama, tmp_path, monkeypatch):
    made = finished(random_drafter(3, **KINDS["full"]), plain_llama.path, draft_tokens=range(3, 60, 4))
    named = "d2t .* and t2d .* do not name the same 15 tokens"
    refused(made, tmp_path, monkeypatch, of(other_tokens), named, format="speculators")


def test_a_head_of_its_own_with_a_wrong_row_is_not_kept(plain_llama, tmp_path, monkeypatch):
    def one_row(tensors):
        tensors["lm_head.weight"][13] *= -1

    made = finished(random_drafter(3, **KINDS["full"], width=24), plain_llama.path)
    refused(made, tmp_path, monkeypatch, of(one_row), "logits of a block differ by")


def refused(made, tmp_path, monkeypatch, damage, named, *, format="zlab"):
    def damaged(folder, *rest, **more):
        damage(folder)
        check_folder(folder, *rest, **more)

    monkeypatch.setattr(export, "check_folder", damaged)
    with pytest.raises(UserError, match=named):
        exported(made, tmp_path / "to", format=format, dtype="float32")
    assert list(tmp_path.iterdir()) == []
