"""The recipes for published models say what their drafters have (figures from those drafters' config.json)."""

import json
import pathlib

import pytest
from published_targets import TARGETS

from dflash_jax import resolve
from dflash_jax.arguments import build, read_yaml
from dflash_jax.config import Recipe
from dflash_jax.models.drafter import FULL, SLIDING, DrafterConfig
from dflash_jax.published.targets import TargetFiles

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = TARGETS.parent
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 36,
    "tie_word_embeddings": False,
}


# What both published drafters have.
SHARED = {"heads": 32, "kv_heads": 8, "head_width": 128, "block_size": 16, "norm_eps": 1e-6}


class Words:
    """A tokenizer with so many tokens, none of which ends a text."""

    eos_token_id = pad_token_id = None

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count


def opened(tmp_path, recipe: str, fields: dict, *, words: int) -> tuple[Recipe, tuple[int, ...], DrafterConfig]:
    """A recipe, and the taps and the drafter that it makes for a target of this configuration."""
    (tmp_path / "config.json").write_text(json.dumps(fields))
    target = TargetFiles.open(tmp_path).config
    file = ROOT / "recipes" / f"{recipe}.yaml"
    found = build(Recipe, [("a user", {"data": {"train": "x"}}), (str(file), read_yaml(file))])
    taps = resolve.tap_layers(found.drafter, target)
    mask = resolve.mask_token(found.drafter, Words(words), target)
    return found, taps, resolve.drafter_config(found.drafter, target, taps=taps, mask_token=mask)


def test_qwen3_8b(tmp_path):
    recipe, taps, drafter = opened(tmp_path, "qwen3-8b", QWEN3_8B, words=151669)
    assert taps == (1, 9, 17, 25, 33)
    assert drafter == DrafterConfig(
        **SHARED,
        width=4096,
        target_width=4096,
        mlp_width=12288,
        feature_width=5 * 4096,
        mask_token=151669,
        rope_theta=1e6,
        layer_types=(FULL,) * 5,
    )
    assert resolve.decay(recipe.objective, 16) == 7


@pytest.mark.parametrize(("name", "gamma"), [("qwen3.6-27b", 7), ("qwen3.6-27b-tree", 10)])
def test_qwen36_27b(tmp_path, name, gamma):
    fields = json.loads((GOLDEN / "qwen3.6-27b.config.json").read_text())
    recipe, taps, drafter = opened(tmp_path, name, fields, words=248070)
    assert taps == (1, 16, 31, 46, 61)
    assert drafter == DrafterConfig(
        **SHARED,
        width=5120,
        target_width=5120,
        mlp_width=17408,
        feature_width=5 * 5120,
        mask_token=248070,
        rope_theta=1e7,
        layer_types=(SLIDING,) * 4 + (FULL,),
        window=2048,
    )
    assert resolve.decay(recipe.objective, 16) == gamma


@pytest.mark.parametrize(
    ("name", "fields", "words"), [("qwen3-8b", QWEN3_8B, 151669), ("qwen3.6-27b", None, 248070)]
)
def test_taps_and_mask_are_what_the_published_rules_give(tmp_path, name, fields, words):
    fields = fields or json.loads((GOLDEN / "qwen3.6-27b.config.json").read_text())
    recipe, taps, drafter = opened(tmp_path, name, fields, words=words)
    open_keys = build(
        Recipe, [("rules", {"mesh": "one", "out": "x", "target": {"path": "x"}, "data": {"train": "x"}})]
    )
    target = TargetFiles.open(tmp_path).config
    assert resolve.tap_layers(open_keys.drafter, target) == taps
    assert resolve.mask_token(open_keys.drafter, Words(words), target) == drafter.mask_token
    assert recipe.objective.anchors == 512
    assert (recipe.optim.lr, recipe.optim.warmup, recipe.optim.schedule) == (6e-4, 0.04, "cosine")
