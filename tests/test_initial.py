"""drafter.init: which weights a fresh run starts from, what must agree for that, and the drafter's own RoPE."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import tiny_runs
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from dflash_jax import initial, resolve, train
from dflash_jax.arguments import build
from dflash_jax.config import DrafterSection, MeshLayout
from dflash_jax.errors import UserError
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import make_meshes
from dflash_jax.models.drafter import FULL, SLIDING, DrafterConfig
from dflash_jax.models.yarn import Yarn
from dflash_jax.published.copied_layers import copied_layers
from dflash_jax.published.drafter_fields import DrafterFields
from dflash_jax.published.drafter_folder import DrafterFolder
from dflash_jax.published.weights import names
from dflash_jax.training.optim import learning_rate, make_optimizer
from dflash_jax.training.programs import make_programs

SIZES = {"mask_token": 260, "layer_types": (FULL, FULL), "window": None, "block_size": 4}
TAPS = (1, 4)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> tiny_runs.TinyRecipe:
    """Two layers and two taps on a target of width 36 with six layers."""
    root = tmp_path_factory.mktemp("initial")
    plain = tiny_runs.save_recipe(root, tiny_runs.save_chat_llama(root / "llama"))
    content = json.loads(plain.file.read_text())
    content["drafter"]["tap_count"] = 2
    plain.file.write_text(json.dumps(content))
    return plain


@pytest.fixture(scope="module")
def folder(recipe) -> pathlib.Path:
    return tiny_models.save_drafter(recipe.root / "drafter", tiny_models.random_drafter(21, **SIZES), taps=TAPS)


def opened(recipe: tiny_runs.TinyRecipe, *more: str) -> Experiment:
    loaded, _ = train.read_arguments(recipe.arguments("unused", *more))
    return Experiment.open(loaded)


def started(experiment: Experiment):
    """The state before the first step, with the drafter's MLP and heads split over two devices."""
    split = dict.fromkeys(["heads", "kv_heads", "mlp"], "model")
    layout = {
        "device_count": 8,
        "target": {"devices": [0], "axes": {"data": 1}},
        "drafter": {"devices": [6, 7], "axes": {"data": 1, "model": 2}, "rules": split},
    }
    meshes = make_meshes(build(MeshLayout, [("test", layout)]), "test")
    optim = experiment.recipe.optim
    programs = make_programs(experiment, meshes, make_optimizer(optim, learning_rate(optim, 20)))
    state = programs.first_state()
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert places == jax.tree.map(lambda leaf: leaf.sharding, programs.abstract)
    return state


def weights(state) -> dict[str, np.ndarray]:
    return {name: np.asarray(variable[...]) for name, variable in names(state.params).items()}


# A folder.


def test_a_run_starts_from_the_weights_of_a_folder_in_their_shards(recipe, folder):
    state = started(opened(recipe, f"drafter.init={folder}"))
    published, found = load_file(folder / "model.safetensors"), weights(state)
    assert found.keys() == published.keys()
    for name, expected in published.items():
        np.testing.assert_array_equal(found[name], expected)
    up = names(state.params)["layers.0.mlp.up_proj.weight"].get_value()
    assert up.sharding.spec == P("model", None)
    assert up.sharding.device_set == set(jax.devices()[6:8])
    assert int(state.step) == 0
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(state.opt))


def test_the_folder_fills_what_the_recipe_leaves_null(recipe, folder):
    experiment = opened(recipe, f"drafter.init={folder}", "drafter.block_size=7")
    assert experiment.taps == TAPS
    assert experiment.drafter == dataclasses.replace(DrafterFolder.open(folder).config, block_size=7)


def test_a_training_with_a_folder_runs_and_then_continues_from_its_own_checkpoint(recipe, folder, capsys):
    arguments = recipe.arguments("from-folder", f"drafter.init={folder}", "eval.every=0", "optim.lr=0")
    assert train.main([*arguments, "train.steps=1"]) == 0
    other = tiny_models.save_drafter(recipe.root / "other", tiny_models.random_drafter(22, **SIZES), taps=TAPS)
    capsys.readouterr()
    assert (
        train.main([*arguments[:2], f"drafter.init={other}", "eval.every=0", "optim.lr=0", "train.steps=2"]) == 0
    )
    assert f"continuing {recipe.root / 'from-folder'} from step 1" in capsys.readouterr().err
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager((recipe.root / "from-folder" / "checkpoints").absolute()) as manager:
        saved = manager.restore(2, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]["params"]
    np.testing.assert_array_equal(
        saved["fc"]["weight"]["value"], load_file(folder / "model.safetensors")["fc.weight"]
    )


AGREEING = {
    "width": 64,
    "mlp_width": 48,
    "heads": 8,
    "kv_heads": 4,
    "head_width": 6,
    "feature_width": 108,
    "mask_token": 9,
    "rope_theta": 1e4,
    "layer_types": (SLIDING, FULL),
    "window": 12,
    "is_causal": True,
    "yarn": Yarn.usual(4.0, 64),
}


@pytest.mark.parametrize(
    "field",
    sorted({f.name for f in dataclasses.fields(DrafterConfig)} - {"block_size", "norm_eps", "target_width"}),
)
def test_every_difference_between_recipe_and_folder_is_found(field):
    """The recipe names every key; the folder differs in one field."""
    base = tiny_models.drafter_sizes(**SIZES)
    section = named_section(base)
    theirs = dataclasses.replace(base, **{field: AGREEING[field]})
    taps = (1, 3, 4) if field == "feature_width" else TAPS
    other = DrafterFolder(pathlib.Path("/d"), DrafterFields(theirs, taps))
    ours = DrafterFolder(pathlib.Path("/d"), DrafterFields(base, TAPS))
    assert initial.agreed(base, ours, taps=TAPS, section=section) == base
    with pytest.raises(UserError, match=r"^drafter\.\w+: the recipe says .*, /d has [^;]*(; drafter|$)"):
        initial.agreed(base, other, taps=TAPS, section=section)


def named_section(config: DrafterConfig) -> DrafterSection:
    return DrafterSection(
        layers=2,
        layer_types=list(config.layer_types),
        taps=list(TAPS),
        mask_token=config.mask_token,
        mlp_width=config.mlp_width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        rope_theta=config.rope_theta,
    )


def test_all_differences_are_listed_before_anything_happens(recipe, folder):
    changes = ["drafter.layers=3", "drafter.mlp_width=52", "drafter.taps=[1,3]", "drafter.is_causal=true"]
    arguments = recipe.arguments("never", f"drafter.init={folder}", *changes)
    with pytest.raises(UserError) as raised:
        train.main(arguments)
    assert str(raised.value) == "; ".join(
        f"drafter.{key}: the recipe says {ours}, {folder} has {theirs}"
        for key, ours, theirs in (
            ("layers", "3", "2"),
            ("taps", "[1, 3]", "[1, 4]"),
            ("mlp_width", "52", "40"),
            ("is_causal", "true", "null"),
        )
    )
    assert not (recipe.root / "never").exists()


def test_a_folder_with_another_number_of_taps_is_named(recipe, folder):
    named = rf"^drafter\.tap_count: the recipe says 3, {re.escape(str(folder))} has 2$"
    with pytest.raises(UserError, match=named):
        opened(recipe, f"drafter.init={folder}", "drafter.tap_count=3")


def test_what_no_key_says_is_the_folders(recipe, tmp_path):
    yarn = Yarn(4.0, 64, 1.25, beta_fast=8.0, truncate=False)
    drafter = tiny_models.random_drafter(23, **SIZES, yarn=yarn, norm_eps=3e-6)
    path = tiny_models.save_drafter(tmp_path / "yarn", drafter, taps=TAPS)
    for named in ([], ["drafter.rope_factor=4", "drafter.rope_original_length=64"]):
        experiment = opened(recipe, f"drafter.init={path}", *named)
        assert experiment.drafter == drafter.config
        # What the checkpoint keeps is JSON.
        assert json.loads(json.dumps(experiment.fingerprint))["drafter.yarn"]["beta_fast"] == 8.0
    with pytest.raises(UserError, match=r"drafter\.rope_factor: the recipe says 2\.0, .* has 4\.0"):
        opened(recipe, f"drafter.init={path}", "drafter.rope_factor=2")


def test_a_folder_of_another_width_is_refused(recipe, tmp_path):
    path = tiny_models.published_folder(tmp_path / "wide", "full")
    with pytest.raises(
        UserError, match=r"drafter\.init: .*wide is not .*: it drafts for a target of width 64, .* 36"
    ):
        opened(recipe, f"drafter.init={path}", "drafter.layers=3", "drafter.tap_count=5")


def test_a_drafter_with_sliding_layers_in_any_place_is_trained_further(recipe, tmp_path):
    drafter = tiny_models.random_drafter(26, **SIZES | {"layer_types": (SLIDING, FULL, SLIDING), "window": 9})
    path = tiny_models.save_drafter(tmp_path / "mixed", drafter, taps=TAPS)
    changes = [f"drafter.init={path}", "drafter.layers=3"]
    assert opened(recipe, *changes).drafter == drafter.config
    named = "drafter.layer_types=[sliding_attention,full_attention,full_attention]"
    with pytest.raises(UserError, match=r"drafter\.layer_types: the recipe says \[.*\], .* has \["):
        opened(recipe, *changes, named)
    with pytest.raises(UserError, match=r"drafter\.layer_types: found 3 layers, but drafter\.layers is 2"):
        opened(recipe, named, "drafter.sliding_window=9", "drafter.layers=2")


def test_a_width_of_the_recipes_own_is_compared_too(recipe, folder):
    with pytest.raises(UserError, match=r"drafter\.width: the recipe says 24, .* has 36"):
        opened(recipe, f"drafter.init={folder}", "drafter.width=24")
    with pytest.raises(
        UserError, match=r"drafter\.width: found 24, but drafter\.init=target copies layers with 36"
    ):
        opened(recipe, "drafter.init=target", "drafter.width=24", "drafter.layers=2", "drafter.block_size=5")


def test_wrong_tensors_of_a_folder_are_named(recipe, tmp_path):
    path = tiny_models.save_drafter(tmp_path / "damaged", tiny_models.random_drafter(24, **SIZES), taps=TAPS)
    tensors = load_file(path / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors | {"lm_head.weight": np.zeros((2, 2), np.float32)}, path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"drafter\.init: .*damaged: 2 tensors .*lm_head\.weight.*missing norm\.weight"
    ):
        started(opened(recipe, f"drafter.init={path}"))


def test_missing_and_damaged_weights_of_a_folder_are_found_before_they_are_read(recipe, tmp_path):
    path = tiny_models.save_drafter(tmp_path / "fetched", tiny_models.random_drafter(25, **SIZES), taps=TAPS)
    experiment = opened(recipe, f"drafter.init={path}")
    initial.check_weights(experiment.folder)
    (path / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(UserError, match=r"^drafter\.init: .*fetched/model\.safetensors: damaged"):
        initial.check_weights(experiment.folder)
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"^drafter\.init: .*fetched: weight file model\.safetensors is missing"):
        initial.check_weights(experiment.folder)
    # A run that goes on from its own checkpoint needs config.json alone.
    assert opened(recipe, f"drafter.init={path}").folder == experiment.folder
    initial.check_weights(opened(recipe).folder)


def test_a_place_that_is_no_folder_is_named(recipe):
    with pytest.raises(UserError, match=r"drafter\.init: found 'targets', allowed: random, target, or a folder"):
        opened(recipe, "drafter.init=targets")


# The target's layers.

COPIES = ("drafter.init=target", "drafter.layers=2")


def test_a_run_starts_from_copies_of_the_targets_last_layers(recipe):
    experiment = opened(recipe, *COPIES)
    found = weights(started(experiment))
    target = load_file(pathlib.Path(experiment.files.path) / "model.safetensors")
    copied = 0
    for name, array in target.items():
        for layer in range(2):
            if name.startswith(f"model.layers.{4 + layer}."):
                ours = name.replace(f"model.layers.{4 + layer}.", f"layers.{layer}.")
                np.testing.assert_array_equal(found.pop(ours), array)
                copied += 1
    assert copied == 2 * 9
    np.testing.assert_array_equal(found.pop("norm.weight"), target["model.norm.weight"])
    norms = [target[f"model.layers.{layer}.input_layernorm.weight"] for layer in (4, 5)]
    np.testing.assert_allclose(found.pop("hidden_norm.weight"), (norms[0] + norms[1]) / 2, rtol=1e-6)
    fc = found.pop("fc.weight")
    noise = fc - np.concatenate([np.zeros((36, 36)), np.eye(36)], axis=1)
    assert np.abs(noise).max() > 0
    assert noise.std() == pytest.approx(0.1 / 72**0.5, rel=0.1)
    assert found.keys() == {f"layers.{layer}.self_attn.{x}_norm.weight" for layer in range(2) for x in "qk"}
    assert all((array == 1).all() for array in found.values())


def test_copies_keep_the_head_norms_of_a_target_that_has_them():
    random = np.random.default_rng(0)
    config = tiny_models.drafter_sizes()
    norms = {
        f"model.layers.{layer}.self_attn.{x}_norm.weight": random.standard_normal(8).astype(np.float32)
        for layer in range(3)
        for x in "qk"
    }
    found = dict(copied_layers(tiny_models.stored(norms), config, target_layers=3, seed=0))
    for layer in range(2):
        for x in "qk":
            ours = found[f"layers.{layer}.self_attn.{x}_norm.weight"].read(())
            np.testing.assert_array_equal(ours, norms[f"model.layers.{layer + 1}.self_attn.{x}_norm.weight"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("drafter.mlp_width=40", r"drafter\.mlp_width: found 40, .* 52; set it to null"),
        ("drafter.heads=4", r"drafter\.heads: found 4, .* 6"),
        ("drafter.kv_heads=3", r"drafter\.kv_heads: found 3, .* 2"),
        ("drafter.head_width=8", r"drafter\.head_width: found 8, .* 10"),
        ("drafter.layers=7", r"drafter\.layers: found 7, .* the target has 6"),
    ],
)
def test_copies_need_the_targets_own_sizes(recipe, change, named):
    with pytest.raises(UserError, match=named):
        opened(recipe, "drafter.init=target", change)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "gemma3_text"}, "model_type 'gemma3_text'"),
        ({"model_type": "llama", "attention_bias": True}, "no biases, and the target has attention_bias"),
    ],
)
def test_a_target_whose_layers_are_no_drafters_layers_is_refused(recipe, fields, named):
    experiment = opened(recipe, *COPIES)
    with pytest.raises(UserError, match=rf"drafter\.init: target .*{named}"):
        initial.check_copies(experiment.drafter, experiment.files.config, fields)


# The drafter's RoPE and its MASK.


def test_yarn_is_on_only_when_asked_for(recipe):
    assert opened(recipe).drafter.yarn is None
    asked = opened(recipe, "drafter.rope_factor=4", "drafter.rope_original_length=64")
    assert asked.drafter.yarn == Yarn.usual(4.0, 64)
    for one in ("rope_factor=4", "rope_original_length=64"):
        with pytest.raises(UserError, match=r"drafter\.rope_\w+: YaRN needs drafter\.rope_factor and"):
            opened(recipe, f"drafter.{one}")


def test_nothing_of_a_targets_scaled_or_partial_rope_reaches_the_drafter():
    sizes = {"width": 36, "mlp_width": 52, "heads": 6, "kv_heads": 2, "head_width": 10, "norm_eps": 1e-5}
    scaled = {"yarn": Yarn.usual(4.0, 64), "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1]}

    def drafter(**fields):
        target = dataclasses.make_dataclass("Target", fields)(**fields)
        return resolve.drafter_config(DrafterSection(), target, taps=TAPS, mask_token=7)

    plain = drafter(**sizes, rope_theta=1e6)
    assert drafter(**sizes, rope_theta=1e6, **scaled) == plain
    assert (plain.rope_theta, plain.yarn) == (1e6, None)


def test_a_mask_token_with_a_row_of_zeros_is_refused(recipe):
    experiment = opened(recipe, "drafter.mask_token=261")
    mesh = tiny_models.one_device()
    target = experiment.load_target(mesh, tiny_models.NO_RULES)
    assert experiment.frozen(target, mesh, None).embedding.shape == (264, 36)
    target.embedding.set_value(target.embedding.get_value().at[261].set(0))
    with pytest.raises(
        UserError, match=r"drafter\.mask_token: .* row of token 261 is all zeros.* set drafter\.mask"
    ):
        experiment.frozen(target, mesh, None)


def test_rows_of_other_tokens_may_be_zero():
    resolve.refuse_zero_row(jnp.zeros((4, 3)).at[2].set(1e-3), 2)
