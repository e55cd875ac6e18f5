"""What about a run is unusual: where an expert would raise an eyebrow, why it matters, and what to do."""

import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp

from dflash_jax import resolve
from dflash_jax.batches.figures import plan_figures
from dflash_jax.config import Recipe
from dflash_jax.dataset import Dataset
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import Meshes
from dflash_jax.objective.slot_weights import PUBLISHED_GAMMA, default_gamma
from dflash_jax.sharding import ROW_AXES
from dflash_jax.training.bucket_figures import bucket_figures
from dflash_jax.training.device_bytes import DeviceBytes, Machine
from dflash_jax.training.wording import GIB, counted, sized

BETAS = (0.9, 0.95)  # of the published recipes
TREES = (16, 10.0)  # block size and decay constant of a drafter for tree decoding
# The most that passes without a warning: shares of tokens, records and a device's memory, batches in a row.
USUAL_LR, USUAL_PADDING, USUAL_LEFT_OUT, USUAL_MEMORY, USUAL_RUN = 3e-3, 0.25, 0.05, 0.9, 3


def learning_doubts(recipe: Recipe, block_size: int, *, steps: int) -> Iterator[str]:
    section, optim = recipe.objective, recipe.optim
    gamma, usual = resolve.decay(section, block_size), default_gamma(block_size)
    is_known = min(PUBLISHED_GAMMA) <= block_size <= max(PUBLISHED_GAMMA)
    is_usual = math.isclose(gamma, usual, rel_tol=0.1) or (block_size, gamma) == TREES
    if section.slot_weights == "decay" and is_known and not is_usual:
        last, other = (f"{math.exp(-(block_size - 2) / constant):.3f}" for constant in (gamma, usual))
        known = f"{usual:.3g} is usual for block {block_size}, and null means it"
        yield f"objective.gamma: {gamma:g} weighs the last slot {last} instead of {other}; {known}"
    if section.terms is not None and "ce" not in section.terms:
        found = f"objective.terms: {', '.join(section.terms)} without ce, the published loss"
        yield f"{found}; add objective.terms.ce=1, unless the drafter is for sampling at a temperature"
    if noise := max(section.noise_peak, section.noise_end):
        found = f"objective.noise_peak: noise of up to {noise:g} on features, which decoding does not have"
        yield f"{found}; noise_peak=0 and noise_end=0 train as it decodes"
    if (optim.b1, optim.b2) != BETAS:
        found = f"optim.b1, optim.b2: {optim.b1:g} and {optim.b2:g} average over {1 / (1 - optim.b2):.0f} steps"
        yield f"{found}; {BETAS[0]:g} and {BETAS[1]:g}, or 20 steps, are published"
    if optim.lr > USUAL_LR:
        yield f"optim.lr: {optim.lr:g} is high, and a drafter may diverge late; 6e-4 is usual"
    if optim.lr == 0:
        yield "optim.lr: 0 learns nothing; 6e-4 is usual"
    elif round(optim.warmup * steps) == 0:
        found = (
            f"optim.warmup: {optim.warmup:g} of {counted(steps, 'step')} is none, so that the first go furthest"
        )
        yield f"{found}, on moments that know nothing yet; raise it, 0.04 is usual"


def data_doubts(data: Dataset) -> Iterator[str]:
    plan, buckets = data.plan, bucket_figures(data)
    figures = plan_figures(plan, tokens=sum(bucket.tokens for bucket in buckets))
    largest, run = max(buckets, key=lambda bucket: bucket.batches), figures.longest_run or 0
    share, finer = largest.batches / figures.batches, f"data.buckets=auto:{2 * max(3, len(buckets))}"
    if plan.batching == "sorted":
        yield "data.batching: sorted trains on short texts first and long ones last; bucketed mixes them"
    # Of two buckets one has half of the batches in any case.
    elif run > USUAL_RUN or (len(buckets) > 2 and share > 0.5 and largest.batches > USUAL_RUN):
        found = (
            f"data.buckets: {share:.0%} of the batches are of {largest.edge} tokens a row, up to {run} in a row"
        )
        yield f"{found}, so that the loss goes in bands; cut that bucket up, or {finer}"
    if (padding := 1 - figures.useful) > USUAL_PADDING:
        found = (
            f"data.buckets: {padding:.0%} of the tokens, and of the time, are padding; {finer} or packed batches"
        )
        yield f"{found} have less, and where records are few, a smaller data.tokens_per_batch"
    if (missing := data.left_out / len(data.records)) > USUAL_LEFT_OUT:
        found = f"data.max_length: {missing:.0%} of the records exceed {plan.edges[-1]} tokens and are left out"
        yield f"{found}; raise it, and the last of data.buckets"


def run_doubts(experiment: Experiment, data: Dataset, *, steps: int, passes: float) -> Iterator[str]:
    recipe = experiment.recipe
    if passes < 1:
        found = f"train.steps: {counted(steps, 'step')} see {passes:.0%} of the data"
        yield f"{found}; {math.ceil(steps / passes)} see all of it once, null goes by train.epochs"
    width = experiment.drafter.feature_width + experiment.needs_teacher * experiment.files.config.width
    size = sum(bucket.tokens for bucket in bucket_figures(data)) * width * jnp.dtype(recipe.target.dtype).itemsize
    is_kept = recipe.data.features != "online" or recipe.pipeline.feature_cache_gib > 0
    if passes >= 2 and not is_kept and size <= recipe.data.features_gib * GIB:
        found = f"data.features: the target computes {sized(size)} of features anew in each of {passes:.3g} passes"
        yield f"{found}; pipeline.feature_cache_gib={math.ceil(size / GIB)} or data.features=hybrid keeps them"
    if recipe.data.heldout is None or not recipe.eval.every:
        found = "data.heldout: there is none" if recipe.data.heldout is None else "eval.every: 0 is never"
        yield f"{found}, so that no best checkpoint is kept; name a file in data.heldout, and eval.every=N steps"
    if recipe.checkpoint.every >= steps:
        found = f"checkpoint.every: {recipe.checkpoint.every} of {counted(steps, 'step')} saves the last step only"
        yield f"{found}, and a kill before it loses everything; set it to {max(steps // 10, 1)} or so"


def machine_doubts(
    recipe: Recipe, machine: Machine, *, meshes: Meshes, memory: Mapping[int, DeviceBytes]
) -> Iterator[str]:
    sides = (("target", meshes.target, meshes.target_rules), ("drafter", meshes.drafter, meshes.drafter_rules))
    for side, mesh, rules in sides:
        for axis in (axis for axis, size in mesh.shape.items() if size > 1):
            if axis not in (*ROW_AXES, *rules.values()):
                found = f"mesh: {recipe.mesh} splits nothing of the {side} over its axis {axis}"
                yield f"{found}, whose devices do the same work; name it in {side}.rules, or use data"
    if machine.platform == "cpu":
        return
    if exact := [f"{side}.dtype" for side, _, _ in sides if getattr(recipe, side).dtype == "float32"]:
        found = f"{', '.join(exact)}: float32 on a {machine.platform} takes twice the memory of bfloat16"
        yield f"{found} and several times its time; set bfloat16"
    # One of eight stays idle where six run the target.
    if (idle := machine.devices - len(memory)) > 1:
        yield f"mesh: {recipe.mesh} leaves {idle} of {machine.devices} devices idle; choose a mesh that has them"
    shares = [memory[device].total / limit for device, limit in machine.limits.items() if device in memory]
    if (most := max(shares, default=0.0)) > USUAL_MEMORY:
        found = f"mesh: weights alone take {most:.0%} of a device's memory, and activations come on top"
        yield f"{found}; split them by the rules of {recipe.mesh}, or over more devices"
