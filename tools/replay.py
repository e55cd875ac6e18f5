"""Do a skipped step again, in pieces, to see where it stops being finite.

    python tools/replay.py RUN [STEP]

Reads the batches that the training wrote to RUN/bad_steps/ (the last ones without STEP), and takes the parameters
of the last checkpoint before that step, or the first ones where there is none. Exit status 1 if something is not
finite.
"""

import functools
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from dflash_jax import resolve
from dflash_jax.arguments import build, find_named, read_yaml, run_entry_point
from dflash_jax.config import MeshLayout
from dflash_jax.drafters import open_run, training_records
from dflash_jax.errors import UserError
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes, make_meshes, prepare_devices
from dflash_jax.models.drafter import Drafter
from dflash_jax.training import checkpoint_files
from dflash_jax.training.checkpoint import restore_params
from dflash_jax.training.features import FeatureCache, Featured, FeatureSource
from dflash_jax.training.guard import FOLDER, read_batches
from dflash_jax.training.optim import learning_rate, make_optimizer
from dflash_jax.training.programs import make_objective, make_programs
from dflash_jax.training.step import gradient_sums


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        raise UserError("usage: python tools/replay.py RUN [STEP]")
    run = pathlib.Path(arguments[0])
    step, file = kept_batches(run, arguments[1] if len(arguments) == 2 else None)
    batches = read_batches(file)
    experiment = open_run(run, key="RUN")
    place = find_named("meshes", experiment.recipe.mesh, key="mesh")
    layout = build(MeshLayout, [(str(place), read_yaml(place))])
    prepare_devices(layout)
    meshes = make_meshes(layout, experiment.recipe.mesh)
    start = max((saved for saved in checkpoint_files.saved(run / "checkpoints") if saved < step), default=0)
    params = starting_params(experiment, meshes, run, start)
    print(f"step {step} of {run}: {len(batches)} batches, with the parameters of step {start}")
    target = experiment.load_target(meshes.target, meshes.target_rules)
    source = FeatureSource(
        target,
        taps=experiment.taps,
        teacher=experiment.needs_teacher,
        meshes=meshes,
        cache=FeatureCache(0),
    )
    frozen = experiment.frozen(target, meshes.drafter, experiment.draft_tokens(training_records(experiment)))
    broken = list(faults("parameters", params))
    noise = resolve.noise(experiment.recipe.objective, max(step, experiment.recipe.train.steps or step))
    objective = make_objective(experiment, anchors=experiment.recipe.objective.anchors, noise=noise)
    structure: nnx.GraphDef[Drafter] = nnx.graphdef(nnx.eval_shape(experiment.initial_drafter))
    gradients = jax.jit(functools.partial(gradient_sums, structure=structure, objective=objective))
    for batch in batches:
        item = source(batch)
        broken += feature_faults(item, experiment)
        found = gradients(params, item.batch, item.states, frozen, jnp.int32(step - 1))
        weight = float(found.sums.weight)
        norm = float(optax.tree.norm(found.grads)) / max(weight, 1e-9)
        print(f"batch of {batch.tokens.shape}: loss {float(found.sums.loss) / max(weight, 1e-9):.6g}, ", end="")
        print(f"weight {weight:.6g}, gradient's norm {norm:.6g}")
        broken += faults("gradient", found.grads)
    print(
        "\n".join(broken) or "everything is finite: the fault was neither in these batches nor in the parameters"
    )
    return int(bool(broken))


def kept_batches(run: pathlib.Path, wanted: str | None) -> tuple[int, pathlib.Path]:
    """(step, file) of the batches that are meant. Raises UserError if they were not kept."""
    found = {int(file.stem.removeprefix("step-")): file for file in (run / FOLDER).glob("step-*.npz")}
    if not found:
        raise UserError(f"{run / FOLDER} holds no batches: no step of this run was skipped as bad")
    step = max(found) if wanted is None else int(wanted) if wanted.isdecimal() else -1
    if step not in found:
        raise UserError(f"STEP: found {wanted}, allowed: {', '.join(map(str, sorted(found)))}")
    return step, found[step]


def starting_params(experiment: Experiment, meshes: Meshes, run: pathlib.Path, start: int) -> nnx.State:
    """The parameters of a checkpoint, or those that a fresh run has."""
    optimizer = make_optimizer(experiment.recipe.optim, learning_rate(experiment.recipe.optim, 1))
    programs = make_programs(experiment, meshes, optimizer)
    if not start:
        return programs.first_state().params
    return restore_params(run / "checkpoints", start, programs.abstract.params)


def feature_faults(item: Featured, experiment: Experiment) -> Iterator[str]:
    """A line for each tap, and the last states, that is not finite in some row."""
    pieces = dict(
        zip(
            experiment.taps, np.split(np.asarray(item.states.features), len(experiment.taps), axis=-1), strict=True
        )
    )
    named = {f"features of layer {layer}": values for layer, values in pieces.items()}
    if item.states.last is not None:
        named["last states of the target"] = np.asarray(item.states.last)
    for name, values in named.items():
        bad = ~np.isfinite(values.astype(np.float32)).all(axis=-1)  # [B, S]
        for row in np.flatnonzero(bad.any(axis=1)):
            records = [int(record) for record in item.batch.record_ids[row] if record >= 0]
            at = np.flatnonzero(bad[row])
            yield f"{name}: not finite in row {row} (records {records}), {len(at)} positions from {at[0]} on"


def faults(what: str, tree: nnx.State) -> Iterator[str]:
    """A line for each tensor that is not finite."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        values = np.asarray(leaf, np.float32)
        if not np.isfinite(values).all():
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            nan, inf = np.isnan(values).sum(), np.isinf(values).sum()
            yield f"{what}: {name} has {nan} NaN and {inf} Inf among {values.size} values"


if __name__ == "__main__":
    run_entry_point(main)
