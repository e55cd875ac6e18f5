"""Train a drafter: ``python -m dflash_jax.train recipe=NAME [mesh=NAME] [out=DIR] [key.sub=value ...]``.

The run directory holds recipe.yaml (as resolved), train_log.jsonl, eval_log.jsonl, tensorboard/, checkpoints/,
data/ (tokenised records), features/ (with data.features=hybrid or cached) and, after an evaluation, report/. Given
again, the same command continues the run.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import sys

import jax
from omegaconf import OmegaConf

from dflash_jax import initial, resolve
from dflash_jax.arguments import build, find_named, leaves, parse_assignments, read_yaml, run_entry_point
from dflash_jax.batches.loader import HostShare, Reading, batches
from dflash_jax.config import MeshLayout, PipelineSection, Recipe
from dflash_jax.data.records import Records
from dflash_jax.dataset import check_source, heldout_data, is_prepared, open_records, training_data
from dflash_jax.errors import UserError
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes, make_meshes, prepare_devices
from dflash_jax.monitor.progress import Preparing, Progress
from dflash_jax.monitor.run_log import RunLog
from dflash_jax.sharding import replicated
from dflash_jax.sources.files import find_files
from dflash_jax.training import checkpoint_files
from dflash_jax.training.briefing import briefing
from dflash_jax.training.checkpoint import Checkpoints
from dflash_jax.training.checkpoint_files import Fingerprint
from dflash_jax.training.feature_modes import open_features
from dflash_jax.training.guard import Guard
from dflash_jax.training.heldout import HeldOut
from dflash_jax.training.interrupt import StopRequest
from dflash_jax.training.loop import Progression, Training, run_steps
from dflash_jax.training.optim import learning_rate, make_optimizer
from dflash_jax.training.programs import make_evaluation, make_programs
from dflash_jax.training.read_ahead import ReadAhead
from dflash_jax.training.rollout import check_evaluation, heldout_prompts, make_rollout
from dflash_jax.training.trace import Trace, parse_steps
from dflash_jax.training.usage import Usage

READ_AHEAD = 8  # batches that wait for the target at most
# What of a fingerprint gives the weights their shapes.
SIZES = {
    f"drafter.{name}"
    for name in (
        *("width", "target_width", "mlp_width", "heads", "kv_heads", "head_width", "feature_width"),
        *("layer_types", "vocab"),
    )
}

USAGE = """\
usage: python -m dflash_jax.train recipe=NAME|FILE [mesh=NAME|FILE] [out=DIR] [resume=auto|never|best|STEP]
                                  [resume_allow=[KEY,...]] [debug=true] [key.sub=value ...]

recipe        a name in recipes/ or a YAML file with any of the keys below
resume        auto: continue the run in out= if there is one; never: refuse an existing run; STEP: from that
              checkpoint; best: from the one with the longest held-out accept length
resume_allow  what may differ from the checkpoint that is resumed, though its weights have another meaning then

keys, with type, default and meaning:"""


def main(arguments: list[str]) -> int:
    recipe, resume = read_arguments(arguments)
    check_evaluation(recipe)
    parse_steps(recipe.profile.steps)
    # What Orbax and tensorstore say of a disk that refuses them, with tracebacks; checkpoint.py says it in a line.
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    file = find_named("meshes", recipe.mesh, key="mesh")
    layout = build(MeshLayout, [(str(file), read_yaml(file))])
    for key, source in (("data.train", recipe.data.train), ("data.heldout", recipe.data.heldout)):
        if source is not None:
            check_source(source, key=key)
    run = pathlib.Path(recipe.out)
    check_out(run)
    experiment = Experiment.open(recipe)
    start = resumed_step(run, resume.point)
    if not start:
        initial.check_weights(experiment.folder)
    prepare_devices(layout)
    train(experiment, make_meshes(layout, recipe.mesh), start=start, allowed=resume.allow)
    return 0


@dataclasses.dataclass(frozen=True)
class Resume:
    """What the command line says of an earlier run. point: auto, never, best or a step; allow: keys of its
    fingerprint that may differ from it."""

    point: str
    allow: tuple[str, ...]


def read_arguments(arguments: list[str]) -> tuple[Recipe, Resume]:
    """The recipe with the command line's values in it, and how to resume."""
    given = parse_assignments(arguments)
    name, point, allow = (given.pop(key, None) for key in ("recipe", "resume", "resume_allow"))
    if name is None:
        raise UserError("recipe: a value is required, for example recipe=quickstart (see --help)")
    allowed = [] if allow is None else allow if isinstance(allow, list) else str(allow).split(",")
    file = find_named("recipes", str(name), key="recipe")
    recipe = build(Recipe, [(str(file), read_yaml(file)), ("command line", given)])
    return recipe, Resume("auto" if point is None else str(point), tuple(map(str, allowed)))


def check_out(run: pathlib.Path) -> None:
    """Raise UserError if the run directory cannot be written, or made."""
    if run.exists() and not run.is_dir():
        raise UserError(f"out: {run} is a file; name a directory")
    nearest = next(place for place in (run.absolute(), *run.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"out: {run} cannot be written, for {nearest} cannot; name another directory")


def resumed_step(run: pathlib.Path, point: str) -> int:
    """The checkpoint to continue from, 0 for none. Raises UserError if resume= and the directory disagree."""
    if point == "never" and (run / "train_log.jsonl").exists():
        raise UserError(f"out: {run} holds a run already; choose another directory, or resume=auto to continue it")
    if point in ("auto", "never"):
        return checkpoint_files.newest_whole(run / "checkpoints", warn)
    return checkpoint_files.chosen_step(run / "checkpoints", point, key="resume")


def warn(text: str) -> None:
    """Tell what a person should know, though the run goes on."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def train(experiment: Experiment, meshes: Meshes, *, start: int, allowed: tuple[str, ...]) -> None:
    """Train from checkpoint `start` (0: from the beginning) to the end of the recipe. allowed: as Resume.allow."""
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
    told = briefing(experiment, data, steps=steps, state=programs.abstract, meshes=meshes, held_out=held_out).text
    print(told, flush=True)
    sample = jax.device_put(head_sample, replicated(meshes.drafter))
    fingerprint = experiment.fingerprint | data.fingerprint
    check_allowed(allowed, fingerprint)
    if start:
        checkpoint_files.check_fingerprint(run / "checkpoints", start, fingerprint, allowed=allowed)
    with contextlib.ExitStack() as stack:
        measured = held_out if recipe.eval.every else None
        features = stack.enter_context(open_features(experiment, meshes, train=data, heldout=measured))
        frozen = features.frozen
        # Up to the end of the last save, which a signal must not cut short.
        stop = stack.enter_context(StopRequest())
        folder, section = run / "checkpoints", recipe.checkpoint
        checkpoint_files.set_aside(folder, after=start)
        progress = stack.enter_context(Progress(steps, start=start))
        checkpoints = stack.enter_context(
            Checkpoints(
                folder,
                keep=section.keep,
                keep_every=section.keep_every,
                max_failures=section.max_failures,
                warn=progress.warn,
            )
        )
        if start:
            state, cursor = checkpoints.restore(start, programs.abstract)
            progress.note(f"continuing {run} from step {start}{told_changes(recipe, run, start)}")
        else:
            state, cursor = programs.first_state(), 0
        guard = Guard(run, max_bad_steps=recipe.guard.max_bad_steps, warn=progress.warn)
        observers = (progress.show, guard.observe)
        log = stack.enter_context(RunLog(run, resumed_at=start, warn=progress.warn, observers=observers))
        recipe_text = OmegaConf.to_yaml(OmegaConf.structured(recipe))
        (run / "recipe.yaml").write_text(recipe_text)
        log.text("recipe", recipe_text)
        log.text("briefing", told)
        reader = ReadAhead(
            batches(data.records, data.plan, start=cursor, reading=reading(recipe.pipeline)),
            start=cursor,
            depth=READ_AHEAD,
            stuck_s=recipe.pipeline.stuck_s,
        )
        training = Training(
            recipe=recipe,
            programs=programs,
            source=features.train,
            frozen=dataclasses.replace(frozen, sample=sample),
            held_out=measured
            and features.heldout
            and HeldOut(measured, frozen, source=features.heldout, evaluate=make_evaluation(experiment, meshes)),
            rollout=make_rollout(experiment, meshes, target=features.target, frozen=frozen, prompts=prompts),
            fingerprint=fingerprint,
            checkpoints=checkpoints,
            log=log,
            guard=guard,
            usage=Usage(experiment, meshes, head_rows=recipe.objective.head_sample or frozen.head.shape[0]),
            trace=stack.enter_context(Trace(parse_steps(recipe.profile.steps), run / "profile")),
            stop=stop,
        )
        stack.enter_context(contextlib.closing(reader))
        step = run_steps(training, state, reader, at=Progression(start, cursor, steps, plan=data.plan))
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


def check_allowed(keys: tuple[str, ...], fingerprint: Fingerprint) -> None:
    """Raise UserError for a key of resume_allow= that is not compared, or without which the weights do not fit."""
    known = sorted(set(fingerprint) - SIZES)
    for key in keys:
        if key not in known:
            raise UserError(f"resume_allow: found {key}, allowed: {', '.join(known)}")


def told_changes(recipe: Recipe, run: pathlib.Path, step: int) -> str:
    """What of a recipe differs from the one that a run had until `step`: noted in the run, and in words."""
    file = run / "recipe.yaml"
    try:
        before = build(Recipe, [(str(file), read_yaml(file))])
    except UserError as fault:
        return f" (its former recipe cannot be compared: {fault})"
    former = {key: value for key, value, _ in leaves(before)}
    changes = {key: (former[key], value) for key, value, _ in leaves(recipe) if former[key] != value}
    with (run / "recipe_changes.jsonl").open("a") as notes:
        for key, (old, now) in changes.items():
            notes.write(json.dumps({"step": step, "key": key, "before": old, "now": now}) + "\n")
    return "".join(f"\n  {key} is {now}, was {old}" for key, (old, now) in changes.items())


def reading(section: PipelineSection) -> Reading:
    """How this process reads batches."""
    share = HostShare(jax.process_index(), jax.process_count())
    return Reading(section.read_threads, int(section.prefetch_mib * 2**20), share)


if __name__ == "__main__":
    run_entry_point(main, usage=USAGE, schema=Recipe)
