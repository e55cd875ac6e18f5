"""What a person checks before leaving a run alone: its facts in words, and what about them is unusual.

Memory follows from shapes and shardings; nothing is allocated on a device but the few numbers of the schedules.
"""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax import resolve
from dflash_jax.batches.figures import plan_figures
from dflash_jax.config import Recipe
from dflash_jax.dataset import Dataset
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes
from dflash_jax.training.bucket_figures import BucketFigures, bucket_figures
from dflash_jax.training.device_bytes import DeviceBytes, Machine, memory_by_device
from dflash_jax.training.doubts import data_doubts, learning_doubts, machine_doubts, run_doubts
from dflash_jax.training.optim import learning_rate
from dflash_jax.training.programs import parameter_count
from dflash_jax.training.state import TrainState
from dflash_jax.training.wording import counted, sized

COLUMNS, LABEL = 100, 9  # of a terminal, and of the labels at its left
POINTS = (0.0, 0.04, 0.5, 1.0)  # of a schedule, as shares of the steps
Facts = Iterator[tuple[str, str]]  # label, text


@dataclasses.dataclass(frozen=True)
class Briefing:
    """lines: the facts, in 100 columns; warnings: what is unusual, why it matters, what to do, a line each."""

    lines: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def text(self) -> str:
        """The facts and below them the warnings, in 100 columns."""
        warned = (line for warning in self.warnings for line in _labelled("warning", warning))
        return "\n".join([*self.lines, *warned])


def briefing(
    experiment: Experiment,
    data: Dataset,
    *,
    steps: int,
    state: TrainState,
    meshes: Meshes,
    held_out: Dataset | None,
    machine: Machine | None = None,
) -> Briefing:
    """The facts of a run of `steps` steps over `data`, and what about them is unusual.

    state: shapes, dtypes and shardings of the train state. machine: that of this process where None.
    """
    recipe, machine = experiment.recipe, Machine.found() if machine is None else machine
    passes = steps * recipe.train.accumulate / data.plan.batches_per_epoch
    memory = memory_by_device(experiment, state=state, meshes=meshes)
    facts = [
        *_model_facts(experiment, state=state, meshes=meshes),
        *_objective_facts(experiment),
        *_schedule_facts(recipe, steps),
        *_data_facts(data),
        *_run_facts(recipe, data, steps=steps, passes=passes, state=state, held_out=held_out),
        ("memory", _memory_text(memory, meshes=meshes, machine=machine)),
    ]
    doubts = [
        *learning_doubts(recipe, experiment.drafter.block_size, steps=steps),
        *data_doubts(data),
        *run_doubts(experiment, data, steps=steps, passes=passes),
        *machine_doubts(recipe, machine, meshes=meshes, memory=memory),
    ]
    return Briefing(tuple(line for label, text in facts for line in _labelled(label, text)), tuple(doubts))


def _labelled(label: str, text: str) -> Iterator[str]:
    """Lines of a text beside its label; those that are too long are wrapped, and what has no blank stays whole."""
    margin = label.ljust(LABEL)
    for paragraph in text.splitlines():
        for line in textwrap.wrap(paragraph, COLUMNS - LABEL, break_long_words=False, break_on_hyphens=False):
            yield margin + line
            margin = " " * LABEL


def _model_facts(experiment: Experiment, *, state: TrainState, meshes: Meshes) -> Facts:
    recipe, drafter, tokenizer = experiment.recipe, experiment.drafter, experiment.tokenizer
    name, layers, taps = experiment.name, experiment.files.config.layers, ", ".join(map(str, experiment.taps))
    yield "target", f"{name}, {layers} layers, {recipe.target.dtype}, on {_devices(meshes.target)}"
    yield "taps", f"layers {taps}, features of {drafter.feature_width:,} channels"
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(drafter.layer_types)]
    kinds = ", ".join(f"{count} {kind.removesuffix('_attention')}" for kind, count in runs)
    weights = f"{parameter_count(state) / 1e6:.1f} M parameters, first weights {recipe.drafter.init}"
    yield "drafter", f"{kinds} layers, {weights}, {recipe.drafter.dtype}, on {_devices(meshes.drafter)}"
    mask, known = drafter.mask_token, len(tokenizer)
    text = repr(tokenizer.decode([mask])) if mask < known else f"past the tokenizer's {known:,} tokens"
    yield "block", f"{drafter.block_size} slots, MASK is token {mask}: {text}"


def _devices(mesh: Mesh) -> str:
    ids = sorted(device.id for device in mesh.devices.flat)
    spans = [list(span) for _, span in itertools.groupby(ids, lambda index: index - ids.index(index))]
    named = ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return f"{mesh.devices.flat[0].device_kind} {named} ({axes})"


def _objective_facts(experiment: Experiment) -> Facts:
    recipe, section, slots = experiment.recipe, experiment.recipe.objective, experiment.drafter.block_size - 1
    rule, vocab = resolve.rule(section, slots + 1), experiment.files.config.vocab
    yield "loss", str(rule)
    if section.slot_weights != "dpace":  # whose weights are the drafter's own probabilities
        said = [f"{weight:.3g}" for weight in np.asarray(rule.weights(jnp.zeros(slots), jnp.ones(slots)))]
        yield "slots", f"1 to {slots} weigh {', '.join(said if slots < 8 else [*said[:4], '..', *said[-3:]])}"
    evaluated = f", {recipe.eval.anchors} in evaluations" if recipe.eval.every else ""
    yield "anchors", f"{section.anchors} a row{evaluated}"
    drafted, sampled = recipe.drafter.vocab or vocab, section.head_sample or vocab
    head = f"{drafted:,} of the target's {vocab:,} tokens" if drafted < vocab else f"all {vocab:,} tokens"
    yield "head", f"{head}{f', {sampled:,} of them in the softmax of a step' if sampled < vocab else ''}"


def _schedule_facts(recipe: Recipe, steps: int) -> Facts:
    optim, objective = recipe.optim, recipe.objective
    moments = f"betas {optim.b1:g} and {optim.b2:g}, eps {optim.eps:g}, weight decay {optim.weight_decay:g}"
    yield "adamw", f"{moments}, gradients clipped to norm {optim.clip_norm:g}"
    points = list(dict.fromkeys(round(share * steps) for share in POINTS))
    for label, schedule, warmup, shape in (
        ("lr", learning_rate(optim, steps), optim.warmup, optim.schedule),
        ("noise", resolve.noise(objective, steps), objective.noise_warmup, objective.noise_schedule),
    ):
        if schedule is not None:
            values = ", ".join(
                f"{np.asarray(schedule(step)):.3g} at {'' if step else 'step '}{step:,}" for step in points
            )
            yield label, f"{values}; warm-up of {counted(round(warmup * steps), 'step')}, then {shape}"


def _data_facts(data: Dataset) -> Facts:
    manifest, plan, buckets = data.records.manifest, data.plan, bucket_figures(data)
    trained = f"{manifest['tokens']:,} tokens, {manifest['supervised']:,} of them trained"
    yield "data", f"{len(data.records):,} records, {data.left_out:,} left out as too long; {trained}"
    arguments = (manifest.get("template_arguments") or {}).items()
    yield "template", ", ".join(f"{name}={value}" for name, value in arguments) or "without arguments"
    run = plan_figures(plan, tokens=0).longest_run
    turns = f", at most {counted(run, 'batch')} of one bucket in a row" if run else ""
    yield "batches", f"{plan.batching}{turns}\n{_table(buckets)}"


def _table(buckets: Sequence[BucketFigures]) -> str:
    records, batches = (sum(getattr(bucket, name) for bucket in buckets) for name in ("records", "batches"))
    tokens, held = (sum(getattr(bucket, name) for bucket in buckets) for name in ("tokens", "held"))
    lines = ["row length   rows     records   share   batches   share          tokens  padding"]
    for bucket in buckets:
        shares = bucket.records / records, bucket.batches / batches
        lines.append(
            f"{bucket.edge:10,}  {bucket.rows:5,}  {bucket.records:10,}  {shares[0]:6.1%}  {bucket.batches:8,}  "
            f"{shares[1]:6.1%}  {bucket.tokens:14,}  {1 - bucket.tokens / max(bucket.held, 1):7.1%}"
        )
    padding = 1 - tokens / held
    total = f"{'all':>10}  {'':5}  {records:10,}  {'':6}  {batches:8,}  {'':6}  {tokens:14,}  {padding:7.1%}"
    return "\n".join([*lines, total] if len(buckets) > 1 else lines)


def _run_facts(
    recipe: Recipe, data: Dataset, *, steps: int, passes: float, state: TrainState, held_out: Dataset | None
) -> Facts:
    length = f"{counted(steps, 'step')} of {counted(recipe.train.accumulate, 'batch')}"
    whole = f"{passes:.3g} passes over {counted(data.plan.batches_per_epoch, 'batch')}"
    yield "run", f"{length}, {whole}, features {recipe.data.features}, seed {recipe.train.seed}"
    yield "out", f"{recipe.out}, mesh {recipe.mesh}"
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    best = " and the best" if held_out is not None and recipe.eval.every else ""
    kept = f"the last {recipe.checkpoint.keep}{best} kept, {sized(size)} each"
    yield "saves", f"every {counted(recipe.checkpoint.every, 'step')}, {kept}"
    if held_out is not None:
        records = f"{len(held_out.record_ids):,} held-out records"
        intervals = ((recipe.eval.every, records), (recipe.eval.decode_every, "decoded prompts"))
        yield "eval", ", ".join(f"every {counted(every, 'step')} on {what}" for every, what in intervals if every)


def _memory_text(memory: Mapping[int, DeviceBytes], *, meshes: Meshes, machine: Machine) -> str:
    target, drafter = (memory[mesh.devices.flat[0].id] for mesh in (meshes.target, meshes.drafter))
    said = ", ".join(f"{sized(getattr(drafter, name))} {name}" for name in ("parameters", "moments", "gradient"))
    told = [machine.limits[device] for device in memory if device in machine.limits]
    limit = f" of {sized(min(told))}" if told else ""
    return (
        f"a device{limit}, without activations, features and batches\n"
        f"target   {sized(target.target)} of weights\n"
        f"drafter  {sized(drafter.total - drafter.target)}: {said},\n"
        f"         {sized(drafter.ends)} embedding and head"
    )
