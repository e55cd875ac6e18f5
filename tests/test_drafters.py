"""Drafters for an evaluation: published folders and runs as they are loaded, and what is refused before that."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny_exports import exported, finished
from tiny_models import load_target, one_device, random_drafter, save_drafter

from dflash_jax.data.prepare import prepare_records
from dflash_jax.drafters import open_drafter, open_run, params_digest, told_apart
from dflash_jax.errors import UserError
from dflash_jax.published.targets import TargetFiles
from dflash_jax.published.weights import names

TAPS = (0, 1)


@pytest.fixture(scope="module")
def files(recipe) -> TargetFiles:
    return TargetFiles.open(recipe.root / "llama")


@pytest.fixture(scope="module")
def target(files):
    return load_target(files.path)


@pytest.fixture(scope="module")
def run(recipe):
    return tiny_runs.save_run(recipe, "run", steps=(3, 7))


def opened(path, files, *, step="latest", dtype="float32"):
    return open_drafter(path, target=files, step=step, dtype=dtype, folder_dtype="bfloat16")


def parameters(drafter):
    return {name: np.asarray(value[...]) for name, value in names(nnx.state(drafter)).items()}


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def test_a_folder_is_loaded_with_the_targets_embedding_and_head(tmp_path, files, target):
    drafter = random_drafter(1)
    source = opened(save_drafter(tmp_path / "theirs", drafter, taps=TAPS), files)
    assert (source.name, source.step, source.taps, source.dtype) == ("theirs", None, TAPS, "float32")
    assert source.config == drafter.config
    loaded = source.load(target, one_device())
    equal(parameters(loaded.drafter), parameters(drafter))
    np.testing.assert_array_equal(loaded.frozen.embedding, target.embedding[...])
    np.testing.assert_array_equal(loaded.frozen.head, target.head[...])
    assert loaded.frozen.draft_tokens is None
    assert loaded.digest == params_digest(nnx.state(drafter))


def test_a_digest_knows_every_weight_and_its_name(tmp_path):
    one = params_digest(nnx.state(random_drafter(1)))
    assert one == params_digest(nnx.state(random_drafter(1)))
    changed = random_drafter(1)
    changed.norm.weight.set_value(changed.norm.weight[...].at[3].add(1e-6))
    swapped = random_drafter(1)
    swapped.norm.weight, swapped.hidden_norm.weight = swapped.hidden_norm.weight, swapped.norm.weight
    assert len({one, params_digest(nnx.state(changed)), params_digest(nnx.state(swapped))}) == 3


@pytest.mark.parametrize(("dtype", "expected"), [(None, "bfloat16"), ("float32", "float32")])
def test_a_folder_computes_as_it_is_told(tmp_path, files, target, dtype, expected):
    source = opened(save_drafter(tmp_path / "theirs", random_drafter(1), taps=TAPS), files, dtype=dtype)
    assert source.dtype == expected
    assert source.load(target, one_device()).frozen.head.dtype == expected


def test_a_narrow_drafters_folder_brings_its_own_embedding_and_head(tmp_path, files, target):
    """Folded into the folder, the two projections must still make the same drafter."""
    narrow = random_drafter(2, width=24, target_width=36)
    path = exported(finished(narrow, files.path), tmp_path / "narrow", dtype="float32")
    loaded = opened(path, files).load(target, one_device())
    assert loaded.drafter.config.width == loaded.drafter.config.target_width == 24
    assert loaded.frozen.embedding.shape == loaded.frozen.head.shape == (264, 24)
    tokens, states = jnp.array([5, 200]), jax.random.normal(jax.random.key(0), (3, 24))
    np.testing.assert_allclose(
        loaded.frozen.embed(tokens), narrow.embed_proj(target.embedding[...][tokens]), atol=1e-5
    )
    np.testing.assert_allclose(
        loaded.frozen.logits(states), target.logits(narrow.head_proj(states)), rtol=1e-4, atol=1e-4
    )


def test_a_folders_draft_vocabulary_is_the_heads(tmp_path, files, target):
    tokens = [1, 7, 100, 263]
    path = exported(
        finished(random_drafter(1), files.path, draft_tokens=tokens),
        tmp_path / "few",
        dtype="float32",
        format="speculators",
    )
    frozen = opened(path, files).load(target, one_device()).frozen
    assert frozen.draft_tokens.tolist() == tokens
    np.testing.assert_array_equal(frozen.head, target.head[...][jnp.array(tokens)])


@pytest.mark.parametrize(
    ("sizes", "changes", "taps", "said"),
    [
        ({"width": 24, "target_width": 24, "feature_width": 48}, {}, TAPS, r"width 24, .* width 36"),
        ({}, {"vocab_size": 66}, TAPS, r"vocab_size is 66, .* 264"),
        ({}, {}, (0, 5), r"layer 5, .* 4"),
        ({"mask_token": 264}, {}, TAPS, r"MASK is token 264, .* 263"),
    ],
    ids=["width", "vocabulary", "taps", "mask"],
)
def test_what_does_not_fit_is_refused_before_a_weight_is_read(tmp_path, files, sizes, changes, taps, said):
    path = save_drafter(tmp_path / "other", random_drafter(1, **sizes), taps=taps, **changes)
    (path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=rf"^drafter: .*other does not fit llama: .*{said}"):
        opened(path, files)


def test_weights_that_are_not_the_configurations_are_named(tmp_path, files, target):
    path = save_drafter(tmp_path / "short", random_drafter(1), taps=TAPS)
    tensors = load_file(path / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(UserError, match=r"short: 1 tensors do not fit the model: missing norm\.weight"):
        opened(path, files).load(target, one_device())


@pytest.mark.parametrize(("step", "number"), [("latest", 7), ("7", 7), ("3", 3)])
def test_a_run_is_loaded_at_the_step_that_is_asked_for(run, files, target, step, number):
    source = opened(run, files, step=step)
    assert (source.name, source.step, source.taps) == ("run", number, (1, 2, 3))
    loaded = source.load(target, one_device())
    fresh = parameters(open_run(run, key="run").initial_drafter())
    equal(parameters(loaded.drafter), {name: array * np.float32(number) for name, array in fresh.items()})
    assert all(leaf.sharding.device_set == {jax.devices()[0]} for leaf in jax.tree.leaves(loaded.drafter))


def test_a_run_with_a_draft_vocabulary_looks_up_its_training_records(recipe, files, target):
    run = tiny_runs.save_run(recipe, "few", "drafter.vocab=9")
    experiment = open_run(run, key="run")
    records = prepare_records(
        [recipe.root / "train.jsonl"], run / "data" / "train", preparation=experiment.preparation, workers=1
    )
    frozen = opened(run, files).load(target, one_device()).frozen
    _, supervised = records.token_counts()
    assert len(frozen.draft_tokens) == 9
    assert np.argmax(supervised) in frozen.draft_tokens
    assert frozen.head.shape == (9, 36)


def test_a_run_for_another_target_is_refused_with_both_digests(recipe, run, tmp_path, files):
    other = TargetFiles.open(tiny_runs.save_chat_llama(tmp_path / "llama", seed=6))
    assert other.name == files.name
    said = rf"drafter: .*run was trained for .*\(digest {files.digest[:12]}\), .*\(digest {other.digest[:12]}\)"
    with pytest.raises(UserError, match=said):
        opened(run, other)


def test_a_step_that_no_checkpoint_has_is_named_with_its_run(run, files):
    with pytest.raises(
        UserError, match=r"step: found '4', allowed: latest, best, or a saved step \(3, 7\), of .*run"
    ):
        opened(run, files, step="4")


def test_a_run_whose_target_is_gone_is_named(tmp_path, run, files):
    moved = tmp_path / "moved"
    moved.mkdir()
    recipe = (run / "recipe.yaml").read_text().replace(str(files.path), "/nowhere/llama")
    (moved / "recipe.yaml").write_text(recipe)
    with pytest.raises(UserError, match=r"drafter: .*moved: target\.path: /nowhere/llama"):
        opened(moved, files)


def test_a_folder_that_is_neither_is_named(tmp_path, files):
    with pytest.raises(UserError, match=r"neither a run directory \(with recipe\.yaml\) nor a drafter's folder"):
        opened(tmp_path, files)
    with pytest.raises(UserError, match=r"^run: .* is not a run directory"):
        open_run(tmp_path, key="run")


def test_names_are_told_apart(tmp_path, files):
    sources = []
    for folder in ("a/drafter", "b/drafter", "c/other"):
        (tmp_path / folder).parent.mkdir()
        sources.append(opened(save_drafter(tmp_path / folder, random_drafter(1), taps=TAPS), files))
    found = [source.name for source in told_apart(sources)]
    assert found == [str(tmp_path / "a/drafter"), str(tmp_path / "b/drafter"), "other"]
    again = dataclasses.replace(sources[2], path=tmp_path / "c" / ".." / "c" / "other")
    with pytest.raises(UserError, match=r"drafter: .*c/other is named twice"):
        told_apart([*sources, again])
