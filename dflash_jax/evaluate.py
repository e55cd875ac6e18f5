"""Evaluate a trained drafter: ``python -m dflash_jax.evaluate run=DIR [step=latest|N] [key=value ...]``.

Teacher-forced on the held-out records, then by really decoding held-out prompts: plainly and with the drafter,
comparing every token. Writes report/evaluation.json and report/training.png in the run. Exit status 1 says that
tokens differ by more than a tie in the target's logits.
"""

import collections
import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
from flax import nnx

from dflash_jax.arguments import build, find_named, parse_assignments, read_yaml, run_entry_point
from dflash_jax.config import EvaluateConfig, MeshLayout, Recipe
from dflash_jax.data.records import Records
from dflash_jax.dataset import heldout_data, is_prepared, open_records
from dflash_jax.decode.measure import Prompt, compare
from dflash_jax.decode.report import by_set, table
from dflash_jax.errors import UserError
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes, make_meshes, prepare_devices
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.target import Target
from dflash_jax.monitor.json_lines import read_lines
from dflash_jax.monitor.picture import draw_report
from dflash_jax.monitor.progress import Loading
from dflash_jax.monitor.run_log import plain
from dflash_jax.objective.objective import Frozen
from dflash_jax.sharding import shardings
from dflash_jax.sources.conversations import read_conversations
from dflash_jax.training.checkpoint import Checkpoints, chosen_step
from dflash_jax.training.features import FeatureCache, FeatureSource
from dflash_jax.training.heldout import HeldOut
from dflash_jax.training.programs import make_evaluation

# Logit gaps that rounding alone makes between one-token and block passes of a target, by its dtype.
TIE = {"float32": 1e-3, "bfloat16": 0.25}

USAGE = """\
usage: python -m dflash_jax.evaluate run=DIR [step=latest|N] [mesh=NAME|FILE] [debug=true] [key=value ...]

keys, with type, default and meaning:"""


def main(arguments: list[str]) -> int:
    config = build(EvaluateConfig, [("command line", parse_assignments(arguments))])
    run = pathlib.Path(config.run)
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"run: {run} is not a run directory (it has no recipe.yaml)")
    # The run may have been moved since it wrote its recipe.
    given = read_yaml(run / "recipe.yaml") | {"out": config.run}
    recipe = build(Recipe, [(str(run / "recipe.yaml"), given)])
    source = config.prompts or recipe.data.heldout
    if source is None:
        raise UserError("prompts: the run's recipe names no data.heldout, so a file of prompts is required")
    if is_prepared(source):
        raise UserError(f"prompts: {source} holds tokens, not conversations; name a file of conversations")
    step = chosen_step(Checkpoints.saved(run / "checkpoints"), config.step, key="step")
    layout = build(MeshLayout, [(config.mesh, read_yaml(find_named("meshes", config.mesh, key="mesh")))])
    experiment = Experiment.open(recipe)
    prompts = read_prompts(experiment, source, limit=config.limit)
    prepare_devices(layout)
    meshes = make_meshes(layout, config.mesh)
    if set(meshes.target.devices.flat) != set(meshes.drafter.devices.flat):
        raise UserError(
            f"mesh: {config.mesh} has target and drafter on different devices; decoding needs both on one"
        )
    lossless = evaluate(experiment, meshes, config=config, step=step, prompts=prompts)
    return 0 if lossless else 1


def read_prompts(experiment: Experiment, source: str, *, limit: int | None) -> list[Prompt]:
    """The prompts of a file of conversations: everything before the last answer, at most `limit` of each set."""
    chat, prompts = experiment.preparation.chat(), list[Prompt]()
    taken: collections.Counter[str] = collections.Counter()
    for conversation in read_conversations(source):
        messages = conversation.messages
        asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if limit is None or taken[conversation.set] < limit:
            taken[conversation.set] += 1
            prompts.append(Prompt(conversation.set, chat.prompt(asked, conversation.tools)))
    return prompts


def restore_drafter(experiment: Experiment, meshes: Meshes, *, step: int) -> Drafter:
    """The drafter of a checkpoint, without its optimizer state, on the drafter's mesh."""
    graph, shapes = nnx.split(nnx.eval_shape(experiment.initial_drafter))
    places = shardings(shapes, meshes.drafter, meshes.drafter_rules)
    abstract = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
    )
    directory = pathlib.Path(experiment.recipe.out) / "checkpoints"
    with Checkpoints(directory, keep=experiment.recipe.checkpoint.keep) as checkpoints:
        return nnx.merge(graph, checkpoints.restore_params(step, abstract))


def evaluate(
    experiment: Experiment, meshes: Meshes, *, config: EvaluateConfig, step: int, prompts: list[Prompt]
) -> bool:
    """Measure, print the table and write the report; True if decoding changed no token but ties."""
    recipe, run = experiment.recipe, pathlib.Path(config.run)
    drafter = restore_drafter(experiment, meshes, step=step)
    with Loading(experiment.name, experiment.files.weight_bytes) as loading:
        target = experiment.load_target(meshes.target, meshes.target_rules, on_bytes=loading.add)
    trained_on = recipe.data.train if is_prepared(recipe.data.train) else run / "data" / "train"
    draft_tokens = experiment.draft_tokens(Records.open(trained_on))
    frozen = experiment.frozen(target, meshes.drafter, draft_tokens)
    print(f"{experiment.name}, drafter of {run} at step {step}", flush=True)
    forced = teacher_forced(experiment, meshes, target=target, drafter=drafter, frozen=frozen)
    if forced:
        length, blocks = forced["accept_len"], int(forced["blocks"])
        walk = f"; along the way that decoding takes: {forced['walk_tau']:.2f}" if forced["walk_tau"] else ""
        print(f"held-out accept length, teacher-forced: {length:.2f} over {blocks} blocks{walk}")
    found = []
    for item in compare(
        target,
        drafter,
        frozen,
        prompts,
        taps=experiment.taps,
        stop=experiment.stop_tokens,
        max_new_tokens=config.max_new_tokens,
    ):
        found.append(item)
        if sys.stderr.isatty():
            print(f"\rdecoded {len(found)}/{len(prompts)} prompts ", end="", file=sys.stderr, flush=True)
    reports = by_set(found)
    print(table(reports))
    for item in found:
        if item.difference:
            kind = "tie" if item.difference.logit_gap <= TIE[recipe.target.dtype] else "DIFFERENT"
            print(
                f"{kind}: a prompt of {item.prompt.set!r} parts at token {item.difference.position}, "
                f"logit gap {item.difference.logit_gap:.2g}"
            )
    report = run / "report"
    report.mkdir(exist_ok=True)
    content = {
        "target": experiment.name,
        "step": step,
        "max_new_tokens": config.max_new_tokens,
        "teacher_forced": forced,
        "sets": [dataclasses.asdict(item) for item in reports],
    }
    (report / "evaluation.json").write_text(json.dumps(content, indent=2) + "\n")
    draw_report(
        list(read_lines(run / "train_log.jsonl")),
        list(read_lines(run / "eval_log.jsonl")),
        reports[-1].survival_by_position,
        report / "training.png",
        title=f"{experiment.name}: DFlash drafter, block {experiment.drafter.block_size}",
    )
    print(f"written: {report / 'evaluation.json'}, {report / 'training.png'}")
    gaps = (item.difference.logit_gap for item in found if item.difference)
    return all(gap <= TIE[recipe.target.dtype] for gap in gaps)


def teacher_forced(
    experiment: Experiment, meshes: Meshes, *, target: Target, drafter: Drafter, frozen: Frozen
) -> dict[str, Any] | None:
    """The held-out measures at sampled anchors, or None for a recipe without held-out data."""
    recipe = experiment.recipe
    if recipe.data.heldout is None:
        return None
    directory = pathlib.Path(recipe.out) / "data" / "heldout"
    data = heldout_data(experiment, open_records(experiment, recipe.data.heldout, directory), meshes=meshes)
    source = FeatureSource(
        target, taps=experiment.taps, teacher=experiment.needs_teacher, meshes=meshes, cache=FeatureCache(0)
    )
    held_out = HeldOut(data, frozen, source=source, evaluate=make_evaluation(experiment, meshes))
    measures = held_out.measure(nnx.state(drafter, nnx.Param))
    return {name: plain(value) for name, value in jax.device_get(measures).items()}


if __name__ == "__main__":
    run_entry_point(main, usage=USAGE, schema=EvaluateConfig)
