"""Trainings with features on disk: the same as with computed ones, and without the target once all are there."""

import contextlib
import dataclasses
import gc
import itertools
import pathlib
import shutil
import weakref
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from run_files import lines, repeatable, saved_arrays

from dflash_jax import train
from dflash_jax.arguments import build, find_named, read_yaml
from dflash_jax.batch import Batch
from dflash_jax.batches.loader import batches
from dflash_jax.config import MeshLayout
from dflash_jax.dataset import Dataset, open_records, training_data
from dflash_jax.errors import UserError
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes, make_meshes
from dflash_jax.published import hub_folder
from dflash_jax.training import feature_modes, feature_shards
from dflash_jax.training import features as features_module
from dflash_jax.training.feature_modes import open_features, open_stores
from dflash_jax.training.features import FeatureSource

TERMS = "objective.terms={ce: 0.5, tv: 0.5}"  # the second compares with the target's last states
STEPS = ["train.steps=10", "eval.every=5", "checkpoint.every=5", "data.buckets=[192]", TERMS]
STEPS += ["pipeline.feature_cache_gib=0", "drafter.layers=1"]
pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def online(recipe) -> pathlib.Path:
    """A run whose target computes every batch."""
    return trained(recipe, "online")


@pytest.fixture(scope="module")
def cached(recipe) -> pathlib.Path:
    """The same with all features on disk, in the folder `features` beside it."""
    return trained(recipe, "cached", "data.features=cached", f"data.features_dir={recipe.root / 'features'}")


def trained(recipe: tiny_runs.TinyRecipe, name: str, *more: str) -> pathlib.Path:
    assert train.main(recipe.arguments(name, *STEPS, *more)) == 0
    return recipe.root / name


def recalled(run: pathlib.Path) -> list[float]:
    return [line["recalled"] for line in lines(run)]


def check_equal(run: pathlib.Path, other: pathlib.Path) -> None:
    """That two runs logged the same figures and saved the same weights, bit for bit."""
    assert repeatable(run) == repeatable(other)
    assert lines(run, "eval_log.jsonl") == lines(other, "eval_log.jsonl")
    for found, expected in zip(saved_arrays(run, 10), saved_arrays(other, 10), strict=True):
        np.testing.assert_array_equal(found, expected)


def opened(recipe: tiny_runs.TinyRecipe, *more: str, out: str = "opened") -> tuple[Experiment, Meshes, Dataset]:
    """What a training opens before it asks for features."""
    loaded, _ = train.read_arguments(recipe.arguments(out, "data.buckets=[192]", *more))
    layout = build(MeshLayout, [("cpu8", read_yaml(find_named("meshes", "cpu8", key="mesh")))])
    experiment, meshes = Experiment.open(loaded), make_meshes(layout, "cpu8")
    folder = recipe.root / out / f"data {'-'.join(more).replace('/', '_')}"
    records = open_records(experiment, loaded.data.train, folder)
    return experiment, meshes, training_data(experiment, records, meshes=meshes)


def one_pass(data: Dataset) -> list[Batch]:
    with contextlib.closing(batches(data.records, data.plan, start=0)) as reader:
        return [batch for batch, _ in itertools.islice(reader, data.plan.batches_per_epoch)]


@contextlib.contextmanager
def without_target() -> Iterator[list[str]]:
    """Loading the target fails; yields the names of the tensors that are read from its files."""
    names: list[str] = []
    read = hub_folder._read

    def noted(opened, file, name, index):
        names.append(name)
        return read(opened, file, name, index)

    def refused(*_, **__):
        raise AssertionError("the target was loaded")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hub_folder, "_read", noted)
        patched.setattr(Experiment, "load_target", refused)
        yield names


def test_cached_training_equals_online_training(online, cached):
    assert set(recalled(online)) == {0.0}
    assert set(recalled(cached)) == {1.0}
    check_equal(cached, online)


def test_full_store_needs_no_target_but_its_embedding_and_head(recipe, online, cached):
    with without_target() as names:
        run = trained(recipe, "again", "data.features=cached", f"data.features_dir={recipe.root / 'features'}")
    assert sorted(names) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert set(recalled(run)) == {1.0}
    check_equal(run, online)


def test_tied_head_is_read_once(tmp_path):
    folder = tiny_runs.save_chat_llama(tmp_path / "llama", tie_word_embeddings=True)
    recipe = tiny_runs.save_recipe(tmp_path, folder)
    experiment, meshes, _ = opened(recipe)
    loaded = experiment.load_target(meshes.target, meshes.target_rules)
    with without_target() as names:
        found = experiment.frozen(experiment.load_ends(meshes.drafter), meshes.drafter, None)
    assert names == ["model.embed_tokens.weight"]
    assert found.head is found.embedding
    np.testing.assert_array_equal(found.embedding, np.asarray(loaded.embedding[...]))


def test_target_leaves_memory_once_its_states_are_on_disk(recipe, monkeypatch):
    loaded: list[weakref.ref] = []
    load = Experiment.load_target

    def noted(*arguments, **options):
        target = load(*arguments, **options)
        loaded.append(weakref.ref(target.model.layers[0].mlp.up_proj.weight.get_value()))
        return target

    monkeypatch.setattr(Experiment, "load_target", noted)
    experiment, meshes, data = opened(recipe, TERMS, "data.features=cached", out="memory")
    with open_features(experiment, meshes, train=data, heldout=None):
        gc.collect()
        assert [found() for found in loaded] == [None]


def test_hybrid_training_equals_online_training_and_leaves_a_full_store(recipe, online):
    run = trained(recipe, "hybrid", "data.features=hybrid")
    assert recalled(run)[0] == 0.0
    check_equal(run, online)
    assert len(list((run / "features").iterdir())) == 2  # the held-out data has its own
    options = [TERMS, "data.features=hybrid", f"data.features_dir={run / 'features'}"]
    experiment, meshes, data = opened(recipe, *options)
    with without_target(), open_features(experiment, meshes, train=data, heldout=None) as features:
        assert all(features.train(batch).recalled for batch in one_pass(data))


def test_bounded_hybrid_training_mixes_batches_and_equals_online_training(recipe, online):
    token = (3 * 36 + 36) * 4  # bytes: three taps and the last states
    bound = 2600 * token
    options = ["data.features=hybrid", f"data.features_gib={bound / 2**30}"]
    options.append(f"data.features_dir={recipe.root / 'bounded features'}")
    check_equal(trained(recipe, "bounded", *options), online)
    stores = (recipe.root / "bounded features").iterdir()
    sizes = [sum(file.stat().st_size for file in store.iterdir()) for store in stores]
    assert 0.5 * bound < max(sizes) < bound + 2**17  # an empty ArrayRecord file has 64 KiB
    again = trained(recipe, "bounded again", *options)
    assert set(recalled(again)) == {0.0, 1.0}
    check_equal(again, online)


def test_bfloat16_states_come_back_as_they_were_computed(recipe):
    experiment, meshes, data = opened(
        recipe, "target.dtype=bfloat16", TERMS, "data.features=hybrid", out="bfloat16"
    )
    every = one_pass(data)
    passes = []
    for _ in range(2):
        with open_features(experiment, meshes, train=data, heldout=None) as features:
            passes.append([features.train(batch) for batch in every])
    for batch, computed, again in zip(every, *passes, strict=True):
        assert (computed.recalled, again.recalled) == (False, True)
        assert again.states.features.dtype == jnp.bfloat16
        real = batch.segment_ids > 0
        for found, expected in zip(again.states, computed.states, strict=True):
            np.testing.assert_array_equal(np.asarray(found)[real], np.asarray(expected)[real])
            np.testing.assert_array_equal(np.asarray(found)[~real], 0)


def test_packed_rows_are_put_together_from_what_padded_rows_wrote(recipe, cached):
    folder = f"data.features_dir={recipe.root / 'features'}"
    passes = []
    for mode in ("online", "cached"):
        experiment, meshes, data = opened(
            recipe, TERMS, "data.batching=packed", f"data.features={mode}", folder, out=f"packed {mode}"
        )
        every = one_pass(data)
        with open_features(experiment, meshes, train=data, heldout=None) as features:
            passes.append([features.train(batch) for batch in every])
    assert max(batch.record_ids.shape[1] for batch in every) > 1
    for batch, computed, read in zip(every, *passes, strict=True):
        assert (computed.recalled, read.recalled) == (False, True)
        real = batch.segment_ids > 0
        for found, expected in zip(read.states, computed.states, strict=True):
            # Sums over keys are taken in another order in another row.
            np.testing.assert_allclose(np.asarray(found)[real], np.asarray(expected)[real], rtol=1e-4, atol=1e-4)


def test_run_may_change_its_mode_when_it_is_resumed(recipe, online, cached):
    run = recipe.root / "changed"
    shutil.copytree(cached, run)
    assert train.main(recipe.arguments("changed", *STEPS, "resume=5", "data.features=online")) == 0
    assert recalled(run) == [1.0] * 5 + [0.0] * 5
    check_equal(run, online)


def test_interrupted_first_pass_goes_on_where_it_was(recipe, monkeypatch):
    call, asked = FeatureSource.__call__, []

    def counted(self, batch):
        asked.append(batch)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return call(self, batch)

    def fill() -> tuple[int, int]:
        with open_features(experiment, meshes, train=data, heldout=None) as features:
            assert all(features.train(batch).recalled for batch in every)
        (store,) = open_stores(experiment, {"data.train": data}).values()
        return store.record_counts

    experiment, meshes, data = opened(recipe, TERMS, "data.features=cached", out="interrupted")
    every = one_pass(data)
    monkeypatch.setattr(features_module, "MAX_UNFETCHED", 0)
    monkeypatch.setattr(FeatureSource, "__call__", counted)
    with pytest.raises(KeyboardInterrupt):
        fill()
    computed = len(asked) - 1
    held, everything = next(iter(open_stores(experiment, {"data.train": data}).values())).record_counts
    assert 0 < held < everything
    assert fill() == (everything, everything)
    # All batches but one were asked for once to be computed, and all of them to be read.
    assert len(asked) - 1 - computed <= 2 * len(every) - 1


def test_what_does_not_fit_is_refused_before_any_work(recipe, capsys):
    with without_target() as names, pytest.raises(UserError) as error:
        trained(recipe, "large", "data.features=cached", "data.features_gib=1e-4")
    message = str(error.value)
    assert "features of data.train take 0.00" in message
    assert "data.features_gib is 0.0001; raise it" in message
    assert names == []
    assert not (recipe.root / "large" / "features").exists()


def test_too_small_a_disk_is_refused_before_any_work(recipe, monkeypatch):
    usage = shutil.disk_usage(recipe.root)
    monkeypatch.setattr(feature_modes.shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    with without_target(), pytest.raises(UserError, match=r"has 0\.0009766 GiB free; set data\.features_dir"):
        trained(recipe, "small disk", "data.features=cached")


def test_disk_that_becomes_full_ends_a_first_pass_but_no_training(recipe, online, monkeypatch, capfd):
    real = feature_shards.array_record_module.ArrayRecordWriter

    def writer(path: str, options: str):
        return real("/dev/full" if "features-" in path else path, options)

    monkeypatch.setattr(feature_shards.array_record_module, "ArrayRecordWriter", writer)
    check_equal(trained(recipe, "full hybrid", "data.features=hybrid"), online)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 2  # one for each data set
    assert all("No space left on device" in line for line in warnings)
    experiment, meshes, data = opened(recipe, TERMS, "data.features=cached", out="full cached")
    with (
        pytest.raises(UserError, match=r"No space left on device.*the same command continues"),
        open_features(experiment, meshes, train=data, heldout=None),
    ):
        pass


def test_address_changes_with_all_that_the_states_depend_on(recipe, tmp_path):
    def address(*more: str) -> str:
        experiment, _, data = opened(recipe, *more)
        (store,) = open_stores(experiment, {"data.train": data}).values()
        return store.directory.name

    other = tiny_runs.save_chat_llama(tmp_path / "other", seed=6)
    moved = shutil.copytree(recipe.root / "llama", tmp_path / "moved")
    same = [address(), address("train.seed=3"), address("objective.anchors=7"), address(f"target.path={moved}")]
    assert len(set(same)) == 1
    changes = (
        "drafter.taps=[0,1,3]",
        TERMS,
        "target.dtype=bfloat16",
        f"target.path={other}",
        f"data.train={recipe.root / 'heldout.jsonl'}",
    )
    assert len({same[0], *(address(change) for change in changes)}) == 1 + len(changes)


def test_one_data_set_in_both_roles_has_one_store(recipe):
    experiment, _, data = opened(recipe)
    stores = open_stores(experiment, {"data.train": data, "data.heldout": dataclasses.replace(data)})
    assert stores["data.train"] is stores["data.heldout"]
