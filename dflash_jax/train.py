"""Train a drafter: ``python -m dflash_jax.train recipe=NAME [mesh=NAME] [out=DIR] [key.sub=value ...]``.

The run directory holds recipe.yaml (as resolved), train_log.jsonl, eval_log.jsonl, tensorboard/, checkpoints/,
data/ (tokenised records), features/ (with data.features=hybrid or cached) and, after an evaluation, report/. Given
again, the same command continues the run.
"""

import contextlib
import dataclasses
import math
import pathlib

import jax
from omegaconf import OmegaConf

from dflash_jax import resolve
from dflash_jax.arguments import build, find_named, parse_assignments, read_yaml, run_entry_point
from dflash_jax.batches.figures import plan_figures
from dflash_jax.batches.loader import HostShare, Reading, batches
from dflash_jax.config import MeshLayout, PipelineSection, Recipe
from dflash_jax.data.records import Records
from dflash_jax.dataset import Dataset, check_source, heldout_data, is_prepared, open_records, training_data
from dflash_jax.errors import UserError
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes, make_meshes, prepare_devices
from dflash_jax.monitor.progress import Preparing, Progress
from dflash_jax.monitor.run_log import RunLog
from dflash_jax.sharding import replicated
from dflash_jax.sources.files import find_files
from dflash_jax.training.checkpoint import Checkpoints, chosen_step
from dflash_jax.training.feature_modes import open_features
from dflash_jax.training.heldout import HeldOut
from dflash_jax.training.interrupt import StopRequest
from dflash_jax.training.loop import Progression, run_steps
from dflash_jax.training.optim import learning_rate, make_optimizer
from dflash_jax.training.programs import make_evaluation, make_programs, parameter_count
from dflash_jax.training.rollout import check_rollouts, heldout_prompts, make_rollout

USAGE = """\
usage: python -m dflash_jax.train recipe=NAME|FILE [mesh=NAME|FILE] [out=DIR] [resume=auto|never|best|STEP]
                                  [debug=true] [key.sub=value ...]

recipe  a name in recipes/ or a YAML file with any of the keys below
resume  auto: continue the run in out= if there is one; never: refuse an existing run; STEP: from that checkpoint;
        best: from the one with the longest held-out accept length

keys, with type, default and meaning:"""


def main(arguments: list[str]) -> int:
    recipe, resume = read_arguments(arguments)
    check_rollouts(recipe)
    file = find_named("meshes", recipe.mesh, key="mesh")
    layout = build(MeshLayout, [(str(file), read_yaml(file))])
    for key, source in (("data.train", recipe.data.train), ("data.heldout", recipe.data.heldout)):
        if source is not None:
            check_source(source, key=key)
    experiment = Experiment.open(recipe)
    run = pathlib.Path(recipe.out)
    start = resumed_step(run, resume)
    prepare_devices(layout)
    train(experiment, make_meshes(layout, recipe.mesh), start=start)
    return 0


def read_arguments(arguments: list[str]) -> tuple[Recipe, str]:
    """The recipe with the command line's values in it, and what resume= says."""
    given = parse_assignments(arguments)
    name, resume = given.pop("recipe", None), str(given.pop("resume", "auto"))
    if name is None:
        raise UserError("recipe: a value is required, for example recipe=quickstart (see --help)")
    file = find_named("recipes", str(name), key="recipe")
    return build(Recipe, [(str(file), read_yaml(file)), ("command line", given)]), resume


def resumed_step(run: pathlib.Path, resume: str) -> int:
    """The checkpoint to continue from, 0 for none. Raises UserError if resume= and the directory disagree."""
    steps = Checkpoints.saved(run / "checkpoints")
    if resume == "never" and (run / "train_log.jsonl").exists():
        raise UserError(f"out: {run} holds a run already; choose another directory, or resume=auto to continue it")
    if resume in ("auto", "never"):
        return steps[-1] if steps else 0
    return chosen_step(run / "checkpoints", resume, key="resume")


def train(experiment: Experiment, meshes: Meshes, *, start: int) -> None:
    """Train from checkpoint `start` (0: from the beginning) to the end of the recipe."""
    recipe, run = experiment.recipe, pathlib.Path(experiment.recipe.out)
    accumulate = recipe.train.accumulate
    data = training_data(experiment, opened(experiment, recipe.data.train, run / "data" / "train"), meshes=meshes)
    per_epoch = data.plan.batches_per_epoch
    steps = recipe.train.steps or math.ceil(per_epoch * recipe.train.epochs / accumulate)
    data = data.lasting(steps * accumulate)
    held_out, prompts = None, []
    if recipe.data.heldout is not None and (recipe.eval.every or recipe.eval.decode_every):
        records = opened(experiment, recipe.data.heldout, run / "data" / "heldout")
        held_out = heldout_data(experiment, records, meshes=meshes)
        prompts = heldout_prompts(held_out, recipe.eval.decode_prompts) if recipe.eval.decode_every else []
    head_sample = experiment.head_sample(data.records)
    if start >= steps:
        print(f"{run} is trained to its last step {start}; nothing to do")
        return
    optimizer = make_optimizer(recipe.optim, learning_rate(recipe.optim, steps))
    noise = resolve.noise(recipe.objective, steps)
    programs = make_programs(experiment, meshes, optimizer, noise=noise)
    print_start(experiment, data, steps=steps, parameters=parameter_count(programs.abstract))
    sample = jax.device_put(head_sample, replicated(meshes.drafter))
    fingerprint = experiment.fingerprint | data.fingerprint
    with contextlib.ExitStack() as stack:
        measured = held_out if recipe.eval.every else None
        features = stack.enter_context(open_features(experiment, meshes, train=data, heldout=measured))
        frozen = features.frozen
        Checkpoints.set_aside(run / "checkpoints", after=start)
        checkpoints = stack.enter_context(Checkpoints(run / "checkpoints", keep=recipe.checkpoint.keep))
        if start:
            restored = checkpoints.restore(start, programs.abstract, fingerprint=fingerprint)
            state, cursor = restored.state, restored.cursor
            print(f"continuing {run} from step {start}")
        else:
            state, cursor = programs.first_state(), 0
        progress = stack.enter_context(Progress(steps, start=start))
        log = stack.enter_context(RunLog(run, resumed_at=start, observer=progress.show))
        recipe_text = OmegaConf.to_yaml(OmegaConf.structured(recipe))
        (run / "recipe.yaml").write_text(recipe_text)
        log.text("recipe", recipe_text)
        stop = stack.enter_context(StopRequest())
        reader = batches(data.records, data.plan, start=cursor, reading=reading(recipe.pipeline))
        _, step = run_steps(
            state,
            stack.enter_context(contextlib.closing(reader)),
            at=Progression(start, cursor, steps, plan=data.plan),
            recipe=recipe,
            programs=programs,
            source=features.train,
            frozen=dataclasses.replace(frozen, sample=sample),
            log=log,
            checkpoints=checkpoints,
            fingerprint=fingerprint,
            held_out=measured
            and features.heldout
            and HeldOut(measured, frozen, source=features.heldout, evaluate=make_evaluation(experiment, meshes)),
            rollout=make_rollout(experiment, meshes, target=features.target, frozen=frozen, prompts=prompts),
            stop=stop,
        )
    if stop.received:
        print(f"stopped by {stop.received} after step {step} of {steps}; the same command continues from there")
    else:
        print(f"trained {run} to step {step}; next: python -m dflash_jax.evaluate run={run}")


def opened(experiment: Experiment, source: str, directory: pathlib.Path) -> Records:
    """The records of data.train or data.heldout, with a bar while they are tokenised."""
    if is_prepared(source) or directory.exists():
        return open_records(experiment, source, directory)
    with Preparing(sum(file.stat().st_size for file in find_files(source))) as preparing:
        return open_records(experiment, source, directory, on_progress=preparing.add)


def reading(section: PipelineSection) -> Reading:
    """How this process reads batches."""
    share = HostShare(jax.process_index(), jax.process_count())
    return Reading(section.read_threads, int(section.prefetch_mib * 2**20), share)


def print_start(experiment: Experiment, data: Dataset, *, steps: int, parameters: int) -> None:
    """What a person checks before leaving the run alone."""
    recipe, drafter, plan = experiment.recipe, experiment.drafter, data.plan
    sizes = zip(plan.edges, plan.rows, plan.batches_per_bucket, strict=True)
    shapes = ", ".join(f"{rows} x {edge} tokens ({count} batches)" for edge, rows, count in sizes)
    useful = plan_figures(plan, tokens=int(data.records.lengths[data.record_ids].sum())).useful
    print(
        f"target   {experiment.name}, {experiment.files.config.layers} layers, taps {list(experiment.taps)}\n"
        f"drafter  {len(drafter.layer_types)} layers, {parameters / 1e6:.1f} M parameters, "
        f"block {drafter.block_size}, MASK {drafter.mask_token}\n"
        f"loss     {resolve.rule(recipe.objective, drafter.block_size)}\n"
        f"data     {len(data.records)} records, {int(data.records.lengths.sum())} tokens, "
        f"{data.left_out} left out as too long; {plan.batching}, {1 - useful:.0%} padding; per pass {shapes}\n"
        f"run      {steps} steps, {plan.epochs} passes, {recipe.objective.anchors} anchors a row, "
        f"lr {recipe.optim.lr:g}, mesh {recipe.mesh}, out {recipe.out}",
        flush=True,
    )


if __name__ == "__main__":
    run_entry_point(main, usage=USAGE, schema=Recipe)
