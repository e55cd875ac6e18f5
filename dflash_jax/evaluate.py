"""Decode prompts as they will be served, and compare: ``python -m dflash_jax.evaluate run=DIR [key=value ...]``.

Every prompt is decoded plainly and with each drafter, as a chain and as trees, and every answer is held against
the plain one. A table says what each way accepts and how fast it is. With run= or report=, the numbers of every
prompt and a picture are kept. Exit status 1 says that greedy answers differ by more than a tie in the target's
logits.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax import drafters
from dflash_jax.arguments import build, find_named, parse_assignments, read_yaml, run_entry_point
from dflash_jax.chat.tokenizer import load_tokenizer
from dflash_jax.config import EvaluateConfig, MeshLayout, Recipe
from dflash_jax.data.origin import Preparation
from dflash_jax.decode.sampling import Sampling
from dflash_jax.decode.ways import CHAIN, KINDS, PLAIN, TREE, Decoding, Limits, Speculator, Way
from dflash_jax.drafters import DrafterSource
from dflash_jax.errors import UserError
from dflash_jax.evaluation.difference import Judge
from dflash_jax.evaluation.files import Evaluation, write_evaluation
from dflash_jax.evaluation.measure import Measured, measure
from dflash_jax.evaluation.replay import replay
from dflash_jax.evaluation.report import by_set
from dflash_jax.evaluation.table import comparison_lines, main_table, position_table
from dflash_jax.mesh import Meshes, make_meshes, prepare_devices
from dflash_jax.models.target import Target
from dflash_jax.monitor.progress import Decoded, Loading
from dflash_jax.prompts.prompt import Prompt
from dflash_jax.prompts.reading import read_prompts
from dflash_jax.published.end_tokens import stop_tokens
from dflash_jax.published.targets import TargetFiles
from dflash_jax.sharding import shardings
from dflash_jax.target_path import target_path

MOST_NODES = 1024  # of a tree
SHOWN_DIFFERENCES = 10

USAGE = """\
usage: python -m dflash_jax.evaluate run=DIR [drafter=DIR,...] [step=latest|best|N] [debug=true] [key=value ...]
       python -m dflash_jax.evaluate target=PATH drafter=DIR,... prompts=FILE,... [debug=true] [key=value ...]

keys, with type, default and meaning:"""


@dataclasses.dataclass(frozen=True)
class Subject:
    """Whom the drafters draft for. recipe: of the run that named it, None without one; dtype: the target's;
    drafter_dtype: of drafters that do not say themselves; draft_tokens: [V'] all that may be drafted, None for any
    token."""

    files: TargetFiles
    preparation: Preparation
    recipe: Recipe | None
    dtype: str
    drafter_dtype: str
    draft_tokens: np.ndarray | None = None


def main(arguments: list[str]) -> int:
    config = build(EvaluateConfig, [("command line", parse_assignments(arguments))])
    check_arguments(config)
    kinds, budgets = listed_kinds(config.decode), listed_budgets(config.budget)
    subject, sources = open_all(config)
    ways = list_ways(config, kinds, budgets, sources)
    where = config.prompts or (subject.recipe and subject.recipe.data.heldout)
    if where is None:
        raise UserError("prompts: a value is required where no run with data.heldout is given (see --help)")
    prompts = read_prompts(where, preparation=subject.preparation, limit=config.limit)
    if not prompts:
        raise UserError(f"prompts: {where} holds no prompt")
    file = find_named("meshes", config.mesh, key="mesh")
    layout = build(MeshLayout, [(str(file), read_yaml(file))])
    prepare_devices(layout)
    meshes = make_meshes(layout, config.mesh)
    print_start(config, subject, sources, prompts, ways)
    with Loading(subject.files.name, subject.files.weight_bytes) as loading:
        graph, abstract = subject.files.abstract(jnp.dtype(subject.dtype))
        places = shardings(abstract, meshes.target, meshes.target_rules)
        target: Target = nnx.merge(graph, subject.files.load(abstract, places, on_bytes=loading.add))
    return 0 if evaluate(config, subject, sources, ways, prompts=prompts, target=target, meshes=meshes) else 1


def check_arguments(config: EvaluateConfig) -> None:
    """Raise UserError for what does not go together."""
    if (config.run is None) == (config.target is None):
        found = "neither" if config.run is None else "both"
        raise UserError(f"run, target: found {found}; give one of them: a run brings its target")
    if config.temperature == 0 and (config.top_p < 1 or config.top_k):
        name, value = ("top_p", config.top_p) if config.top_p < 1 else ("top_k", config.top_k)
        raise UserError(f"{name}: found {value}, but temperature=0 takes the likeliest token; set temperature=1")
    if config.draft_vocab is not None and config.run is None:
        raise UserError(f"draft_vocab: found {config.draft_vocab}, but only run= has data to count tokens in")


def listed_kinds(given: str) -> list[str]:
    """What decode= says, each kind once, plain decoding first."""
    found = [name.strip() for name in given.split(",")]
    if unknown := [name for name in found if name not in KINDS]:
        raise UserError(f"decode: found {unknown[0]!r}, allowed: {', '.join(KINDS)}, separated by commas")
    return [kind for kind in KINDS if kind in found]


def listed_budgets(given: str) -> list[int]:
    """What budget= says, ascending."""
    found = [number.strip() for number in given.split(",")]
    if wrong := [number for number in found if not number.isdigit() or not 1 <= int(number) <= MOST_NODES]:
        raise UserError(
            f"budget: found {wrong[0]!r}, allowed: numbers from 1 to {MOST_NODES}, separated by commas"
        )
    return sorted({int(number) for number in found})


def open_all(config: EvaluateConfig) -> tuple[Subject, list[DrafterSource]]:
    """Target and drafters that fit it, by their configurations; no weights are read."""
    sources = []
    if config.run is not None:
        experiment = drafters.open_run(pathlib.Path(config.run), key="run")
        recipe = experiment.recipe
        preparation = dataclasses.replace(
            experiment.preparation, arguments=dict(recipe.data.template) | config.template
        )
        subject = Subject(
            experiment.files,
            preparation,
            recipe,
            dtype=config.dtype or recipe.target.dtype,
            drafter_dtype=config.dtype or recipe.drafter.dtype,
            draft_tokens=experiment.frequent_tokens(drafters.training_records(experiment), config.draft_vocab)
            if config.draft_vocab
            else None,
        )
        sources.append(drafters.of_run(experiment, step=config.step, dtype=config.dtype))
    else:
        assert config.target is not None
        path = target_path(config.target)
        files, tokenizer = TargetFiles.open(path), load_tokenizer(path)
        preparation = Preparation(tokenizer, stop_tokens(path, tokenizer), config.template)
        dtype = config.dtype or "bfloat16"
        subject = Subject(files, preparation, None, dtype=dtype, drafter_dtype=dtype)
    for name in filter(None, map(str.strip, (config.drafter or "").split(","))):
        sources.append(
            drafters.open_drafter(
                pathlib.Path(name),
                target=subject.files,
                step=config.step,
                dtype=config.dtype,
                folder_dtype=subject.drafter_dtype,
            )
        )
    return subject, drafters.told_apart(sources)


def list_ways(
    config: EvaluateConfig, kinds: Sequence[str], budgets: Sequence[int], sources: Sequence[DrafterSource]
) -> list[Way]:
    """Plain decoding, if asked for, and then each drafter's chain and trees."""
    ways = [Way(PLAIN)] if PLAIN in kinds else []
    if not sources and set(kinds) != {PLAIN}:
        raise UserError(f"drafter: a value is required for decode={config.decode} with target=")
    for source in sources:
        most = source.config.block_size
        slots = config.block_size or most
        if slots > most:
            raise UserError(f"block_size: found {slots}, but {source.path} drafts blocks of at most {most}")
        if config.min_accept > slots - 1:
            raise UserError(
                f"min_accept: found {config.min_accept:g}, but {source.path} drafts {slots - 1} tokens at a time, "
                f"so nothing would ever be verified; set at most {slots - 1}"
            )
        every = ([None] if CHAIN in kinds else []) + (list(budgets) if TREE in kinds else [])
        ways += [Way(TREE if budget else CHAIN, source.name, budget, slots, config.min_accept) for budget in every]
    return ways


def evaluate(
    config: EvaluateConfig,
    subject: Subject,
    sources: Sequence[DrafterSource],
    ways: Sequence[Way],
    *,
    prompts: Sequence[Prompt],
    target: Target,
    meshes: Meshes,
) -> bool:
    """Measure, print the tables and write the report; True unless greedy decoding changed a token."""
    mesh = meshes.target
    used = [source for source in sources if any(way.drafter == source.name for way in ways)]
    loaded, tokens = {source.name: source.load(target, mesh) for source in used}, subject.draft_tokens
    speculators = {
        source.name: Speculator(loaded[source.name].drafter, loaded[source.name].drafting(tokens), source.taps)
        for source in used
    }
    sampling = Sampling(config.temperature, config.top_p, config.top_k)
    limits = Limits(
        subject.preparation.stop_tokens,
        config.max_new_tokens,
        sampling=sampling,
        seed=config.seed,
        batch_size=config.batch_size,
    )
    decoding = Decoding(target, speculators, mesh, limits=limits)
    with_plain = Way(PLAIN) in ways
    compared = [way for way in ways if with_plain and way.keeps_text(sampling)]
    longest = max(len(prompt.tokens) for prompt in prompts)
    judge = Judge(
        target,
        mesh,
        sampling=sampling,
        seed=config.seed,
        dtype=subject.dtype,
        room=longest + config.max_new_tokens,
    )
    measured = []
    with Decoded(len(prompts)) as progress:
        for item in measure(decoding, prompts, ways, judge if with_plain else None):
            measured.append(item)
            progress.add()
    simulated = {}
    if config.simulate and with_plain and speculators:
        simulated = replay(
            target, speculators, mesh, measured, ways, size=decoding.size, max_new_tokens=config.max_new_tokens
        )
    reports = by_set(measured, ways, compared=compared, simulated=simulated)
    print(main_table(reports, in_distribution=config.temperature > 0))
    if positions := position_table(reports):
        print(f"\n{positions}\n")
    print_differences(measured)
    for line in comparison_lines(reports):
        print(line)
    run = None if config.run is None else pathlib.Path(config.run)
    folder = (run and run / "report") if config.report is None else pathlib.Path(config.report)
    evaluation = Evaluation(
        config=config,
        target=subject.files,
        dtype=subject.dtype,
        run=run,
        folder=folder,
        sources=used,
        digests={name: drafter.digest for name, drafter in loaded.items()},
        measured=measured,
        reports=reports,
    )
    for file in write_evaluation(evaluation):
        print(f"written: {file}")
    return config.temperature > 0 or not any(way.different for way in reports[-1].ways)


def print_start(
    config: EvaluateConfig,
    subject: Subject,
    sources: Sequence[DrafterSource],
    prompts: Sequence[Prompt],
    ways: Sequence[Way],
) -> None:
    """What is compared with what, before it takes time."""
    print(f"target   {subject.files.name}, {subject.dtype}")
    for source in sources:
        step = "" if source.step is None else f" at step {source.step}"
        print(
            f"drafter  {source.name}: {source.path}{step}, {len(source.config.layer_types)} layers, block "
            f"{source.config.block_size}, taps {list(source.taps)}, {source.dtype}"
        )
    counts = collections.Counter(prompt.set for prompt in prompts)
    print(f"prompts  {', '.join(f'{name} {count}' for name, count in counts.items())}")
    decodings = ", ".join(dict.fromkeys(way.decoding for way in ways))
    print(
        f"decode   {decodings}; temperature {config.temperature:g}, at most {config.max_new_tokens} tokens, "
        f"batches of {config.batch_size}; rates are of whole answers, with the prompt's prefill",
        flush=True,
    )


def print_differences(measured: Sequence[Measured]) -> None:
    """Where answers part from plain decoding's: what is not a tie first, and not all of very many."""
    found = [
        (answer.difference, way, item)
        for item in measured
        for way, answer in item.answers.items()
        if answer.difference is not None
    ]
    found.sort(key=lambda row: (row[0].tie, row[2].index))
    for difference, way, item in found[:SHOWN_DIFFERENCES]:
        print(
            f"{'tie' if difference.tie else 'DIFFERENT'}: {way.drafter} {way.decoding}, prompt {item.index} of "
            f"{item.prompt.set!r} parts at token {difference.position}, logit gap {difference.logit_gap:.2g}"
        )
    if len(found) > SHOWN_DIFFERENCES:
        print(f"... and {len(found) - SHOWN_DIFFERENCES} more")


if __name__ == "__main__":
    run_entry_point(main, usage=USAGE, schema=EvaluateConfig)
