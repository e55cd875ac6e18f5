"""Where the features of a run come from: data.features = online, hybrid or cached.

    online    the target computes those of each batch; host memory keeps what it has room for
    hybrid    what is on disk is read; the rest is computed, and written while data.features_gib allows
    cached    all are on disk before the first step: those that are missing are computed in a pass of their own

Once the disk holds all of them the target is not loaded, but for the embedding and head that the drafter uses and,
unless cached, for eval.decode_every.
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator, Mapping

import jax.numpy as jnp

from dflash_jax.batches.loader import batches
from dflash_jax.dataset import Dataset
from dflash_jax.errors import UserError
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes
from dflash_jax.models.target import Target
from dflash_jax.monitor.progress import Loading
from dflash_jax.objective.objective import Frozen
from dflash_jax.training.feature_store import Content, FeatureStore
from dflash_jax.training.features import FeatureCache, FeatureSource, spots

GIB = 2**30
FIRST_LINE_S, LINE_S = 3.0, 15.0  # until the first line of a pass that fills the disk, and between lines


@dataclasses.dataclass(frozen=True)
class Features:
    """frozen: what the drafter uses of the target, draft vocabulary included; train, heldout: of the data sets;
    target: None where it is not loaded."""

    frozen: Frozen
    train: FeatureSource
    heldout: FeatureSource | None
    target: Target | None


@contextlib.contextmanager
def open_features(
    experiment: Experiment, meshes: Meshes, *, train: Dataset, heldout: Dataset | None
) -> Iterator[Features]:
    """The features of both data sets, as the recipe's data.features wants them.

    Raises UserError if they do not fit on disk (cached), are being written by another process, or are damaged.
    """
    recipe, mode = experiment.recipe, experiment.recipe.data.features
    datasets = {"data.train": train} | ({} if heldout is None else {"data.heldout": heldout})
    stores = {} if mode == "online" else open_stores(experiment, datasets)
    if mode == "cached":
        for key, store in stores.items():
            _refuse_too_large(store, limit_gib=recipe.data.features_gib, key=key)
    with contextlib.ExitStack() as stack:
        for store in {store.directory: store for store in stores.values()}.values():
            stack.enter_context(store)
        complete = bool(stores) and all(store.complete for store in stores.values())
        needed = mode != "cached" and (not complete or recipe.eval.decode_every > 0)
        target = _load_target(experiment, meshes) if needed else None
        ends = experiment.load_ends(meshes.drafter) if target is None else target
        frozen = experiment.frozen(ends, meshes.drafter, experiment.draft_tokens(train.records))
        del ends
        if mode == "cached" and not complete:
            _fill(experiment, meshes, stores, datasets)
        for key, store in stores.items():
            held, everything = store.record_counts
            size = f"{store.size_bytes / GIB:.3g} GiB in {store.directory}"
            print(f"features {held} of {everything} records of {key} are on disk, {size}", flush=True)
        make = functools.partial(_source, experiment, meshes, target=target)
        gib = recipe.pipeline.feature_cache_gib
        sources = {key: make(cache_gib=gib, store=stores.get(key)) for key in datasets}
        yield Features(frozen, sources["data.train"], sources.get("data.heldout"), target)
        # Only after a run that ended well: what a failed one left on the devices may be broken too.
        for found in sources.values():
            found.keep_rest()


def open_stores(experiment: Experiment, datasets: Mapping[str, Dataset]) -> dict[str, FeatureStore]:
    """The store of each data set; equal data sets have one together."""
    section = experiment.recipe.data
    folder = pathlib.Path(section.features_dir or pathlib.Path(experiment.recipe.out) / "features")
    width, taps = experiment.files.config.width, experiment.taps
    found: dict[str, FeatureStore] = {}
    for key, data in datasets.items():
        content = Content(
            target=experiment.files.digest,
            name=experiment.name,
            dtype=jnp.dtype(experiment.recipe.target.dtype).name,
            taps=taps,
            data=data.records.digest,
            features_width=len(taps) * width,
            last_width=width if experiment.needs_teacher else 0,
        )
        store = FeatureStore(
            folder,
            content,
            lengths=data.records.lengths,
            record_ids=data.record_ids,
            limit_bytes=int(section.features_gib * GIB),
            patient=section.features == "cached",
        )
        found[key] = next((other for other in found.values() if other.directory == store.directory), store)
    return found


def _refuse_too_large(store: FeatureStore, *, limit_gib: float, key: str) -> None:
    missing, whole = store.missing_bytes, store.size_bytes + store.missing_bytes
    if missing and whole > limit_gib * GIB:
        raise UserError(
            f"data.features=cached: the features of {key} take {whole / GIB:.4g} GiB and data.features_gib is "
            f"{limit_gib:.4g}; raise it, or set data.features=hybrid to keep as many as fit"
        )
    existing = next(place for place in store.directory.absolute().parents if place.exists())
    free = shutil.disk_usage(existing).free
    if missing > free:
        raise UserError(
            f"data.features=cached: the features of {key} take {missing / GIB:.4g} GiB more and {existing} has "
            f"{free / GIB:.4g} GiB free; set data.features_dir to a larger disk, or data.features=hybrid"
        )


def _load_target(experiment: Experiment, meshes: Meshes) -> Target:
    with Loading(experiment.name, experiment.files.weight_bytes) as loading:
        return experiment.load_target(meshes.target, meshes.target_rules, on_bytes=loading.add)


def _source(
    experiment: Experiment,
    meshes: Meshes,
    *,
    target: Target | None,
    cache_gib: float,
    store: FeatureStore | None,
) -> FeatureSource:
    cache = FeatureCache(int(cache_gib * GIB))
    taps, teacher = experiment.taps, experiment.needs_teacher
    return FeatureSource(target, taps=taps, teacher=teacher, meshes=meshes, cache=cache, store=store)


def _fill(
    experiment: Experiment,
    meshes: Meshes,
    stores: Mapping[str, FeatureStore],
    datasets: Mapping[str, Dataset],
) -> None:
    """Compute what the stores lack, and write it. The target is in memory only meanwhile."""
    target = _load_target(experiment, meshes)
    for key, store in stores.items():
        if store.complete:
            continue
        source = _source(experiment, meshes, target=target, cache_gib=0.0, store=store)
        data, todo, started = datasets[key], store.missing_bytes, time.monotonic()
        due = started + FIRST_LINE_S
        with contextlib.closing(batches(data.records, data.plan, start=0)) as reader:
            for batch, _ in itertools.islice(reader, data.plan.batches_per_epoch):
                if any(store.wants(spot.record_id) for spot in spots(batch)):
                    source(batch)
                if time.monotonic() >= due:
                    _report(key, store, todo=todo, started=started)
                    due = time.monotonic() + LINE_S
        source.keep_rest()
        store.finish()
        _report(key, store, todo=todo, started=started)


def _report(key: str, store: FeatureStore, *, todo: int, started: float) -> None:
    done, seconds = todo - store.missing_bytes, time.monotonic() - started
    line = f"computing features of {key}: {done / GIB:.3g} of {todo / GIB:.3g} GiB, {seconds:.0f} s"
    left = f", {seconds * (todo / done - 1):.0f} s left" if 0 < done < todo else ""
    print(line + left, file=sys.stderr, flush=True)
