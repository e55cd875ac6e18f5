"""Drafters to decode with: checkpoints of runs, and published folders in either format.

Opening one reads its configuration and refuses what was made for another target; no weight is read before `load`.
"""

import collections
import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dflash_jax.arguments import build, read_yaml
from dflash_jax.config import Recipe
from dflash_jax.data.records import Records
from dflash_jax.dataset import is_prepared
from dflash_jax.errors import UserError
from dflash_jax.experiment import Experiment, frozen_ends
from dflash_jax.models.drafter import Drafter, DrafterConfig
from dflash_jax.models.target import Target
from dflash_jax.objective.objective import Frozen
from dflash_jax.published.drafter_folder import DrafterFolder
from dflash_jax.published.targets import TargetFiles
from dflash_jax.published.weights import fill, names
from dflash_jax.sharding import replicated
from dflash_jax.training.checkpoint import restore_params
from dflash_jax.training.checkpoint_files import chosen_step


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """drafter and frozen: on one mesh; digest: the sha256, in hex, of the drafter's parameters."""

    drafter: Drafter
    frozen: Frozen
    digest: str

    def drafting(self, tokens: np.ndarray | None) -> Frozen:
        """`frozen` for drafts among these tokens only, ascending; None: any. A draft vocabulary stays as it is."""
        return self.frozen if self.frozen.draft_tokens is not None else self.frozen.covering(tokens)


@dataclasses.dataclass(frozen=True)
class DrafterSource:
    """A drafter that fits its target, and whose weights have not been read.

    name: what reports call it; step: of a run's checkpoint, None for a folder; dtype: that it computes in;
    params: the parameters, from their shapes and shardings; ends: what the drafter uses of the target's embedding
    and head, or has of its own, from the target's.
    """

    name: str
    path: pathlib.Path
    step: int | None
    config: DrafterConfig
    taps: tuple[int, ...]
    dtype: str
    params: Callable[[nnx.State], nnx.State]
    ends: Callable[[Frozen], Frozen]

    def load(self, target: Target, mesh: Mesh) -> LoadedDrafter:
        """Drafter and arrays for its use, whole on each device of a mesh."""
        graph, shapes = nnx.split(nnx.eval_shape(lambda: Drafter(self.config, nnx.Rngs(0))))
        place = replicated(mesh)
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)
        params = self.params(abstract)
        frozen = self.ends(frozen_ends(target, mesh, dtype=self.dtype))
        return LoadedDrafter(nnx.merge(graph, params), frozen, params_digest(params))


def params_digest(params: nnx.State) -> str:
    """The sha256, in hex, of parameters with their names."""
    digest = hashlib.sha256()
    for name, variable in sorted(names(params).items()):
        digest.update(name.encode())
        digest.update(np.asarray(variable.get_value()).data)
    return digest.hexdigest()


def open_run(run: pathlib.Path, *, key: str) -> Experiment:
    """The experiment of a run directory, wherever it has been moved. key: the option that names it."""
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{key}: {run} is not a run directory (it has no recipe.yaml)")
    given = read_yaml(run / "recipe.yaml") | {"out": str(run)}
    return Experiment.open(build(Recipe, [(str(run / "recipe.yaml"), given)]))


def training_records(experiment: Experiment) -> Records:
    """The records that a run was trained on."""
    source = experiment.recipe.data.train
    return Records.open(source if is_prepared(source) else pathlib.Path(experiment.recipe.out) / "data" / "train")


def open_drafter(
    path: pathlib.Path, *, target: TargetFiles, step: str, dtype: str | None, folder_dtype: str
) -> DrafterSource:
    """The drafter of a run directory or a published folder, for `target`.

    step: of a run, as of `chosen_step`; dtype: that it computes in; None: a run's own, and folder_dtype.
    Raises UserError that names the drafter, what does not fit, and both values.
    """
    if (path / "recipe.yaml").is_file():
        try:
            experiment = open_run(path, key="drafter")
        except UserError as fault:
            raise UserError(f"drafter: {path}: {fault}") from None
        if experiment.files.digest != target.digest:
            raise UserError(
                f"drafter: {path} was trained for {experiment.files.path} (digest "
                f"{experiment.files.digest[:12]}), and the target is {target.path} (digest {target.digest[:12]}); "
                "drafters are compared on one target"
            )
        return of_run(experiment, step=step, dtype=dtype)
    if not (path / "config.json").is_file():
        raise UserError(
            f"drafter: {path} is neither a run directory (with recipe.yaml) nor a drafter's folder (with "
            "config.json)"
        )
    return of_folder(DrafterFolder.open(path), target=target, dtype=dtype or folder_dtype)


def of_run(experiment: Experiment, *, step: str, dtype: str | None) -> DrafterSource:
    """The drafter of a run's checkpoint."""
    recipe, run = experiment.recipe, pathlib.Path(experiment.recipe.out)
    try:
        number = chosen_step(run / "checkpoints", step, key="step")
    except UserError as fault:
        raise UserError(f"{fault}, of {run}") from None

    def params(abstract: nnx.State) -> nnx.State:
        return restore_params(run / "checkpoints", number, abstract)

    def ends(whole: Frozen) -> Frozen:
        if recipe.drafter.vocab is None:
            return whole
        return whole.covering(experiment.draft_tokens(training_records(experiment)))

    return DrafterSource(
        name=run.resolve().name,
        path=run,
        step=number,
        config=experiment.drafter,
        taps=experiment.taps,
        dtype=dtype or recipe.drafter.dtype,
        params=params,
        ends=ends,
    )


def of_folder(folder: DrafterFolder, *, target: TargetFiles, dtype: str) -> DrafterSource:
    """The drafter of a published folder. Raises UserError unless it fits the target."""
    if faults := folder.misfits(target.config):
        raise UserError(f"drafter: {folder.path} does not fit {target.name}: {'; '.join(faults)}")

    def params(abstract: nnx.State) -> nnx.State:
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        return fill(abstract, folder.tensors(), shardings=places, source=str(folder.path))

    def ends(whole: Frozen) -> Frozen:
        embedding, head, draft_tokens = folder.own_embedding(), folder.own_head(), folder.draft_tokens()
        place = whole.embedding.sharding
        if embedding is None or head is None:
            return whole.covering(draft_tokens)
        return dataclasses.replace(
            whole,
            embedding=jax.device_put(embedding.read(()), place).astype(jnp.dtype(dtype)),
            embedding_scale=None,  # it is in the rows
            head=jax.device_put(head.read(()), place).astype(jnp.dtype(dtype)),
            draft_tokens=None if draft_tokens is None else jax.device_put(jnp.asarray(draft_tokens), place),
        )

    return DrafterSource(
        name=folder.path.resolve().name,
        path=folder.path,
        step=None,
        config=folder.config,
        taps=folder.taps,
        dtype=dtype,
        params=params,
        ends=ends,
    )


def told_apart(sources: Sequence[DrafterSource]) -> list[DrafterSource]:
    """The drafters with names that no two of them share. Raises UserError if one is named twice."""
    places = collections.Counter(source.path.resolve() for source in sources)
    if twice := [path for path, count in places.items() if count > 1]:
        raise UserError(f"drafter: {twice[0]} is named twice")
    counts = collections.Counter(source.name for source in sources)
    return [
        source if counts[source.name] == 1 else dataclasses.replace(source, name=str(source.path))
        for source in sources
    ]
