"""Serve a trained drafter in a real engine, vLLM on the CPU, and compare with our own decoding.

    tools/setup_vllm.sh .vllm
    python tools/serve_check.py run=DIR [key=value ...]

The drafter is exported, and the target written as a hub-style folder if it is none. vLLM decodes prompts greedily,
plainly and with the drafter, and so does this package. Prints a table and writes serving.json.
Exit status 1: texts differ by more than a tie in the target's logits, or accept lengths by more than 0.05.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import serving_report
from flax import nnx
from hub_target import hub_target
from serving_report import ENGINE, ENGINE_DRAFTED, OURS, OURS_DRAFTED, EngineResult, Served

from dflash_jax.arguments import build, find_named, parse_assignments, read_yaml, run_entry_point
from dflash_jax.config import DTYPES, MISSING, MeshLayout, option
from dflash_jax.decode.sampling import GREEDY
from dflash_jax.decode.ways import CHAIN, PLAIN, Decoding, Limits, Speculator, Way
from dflash_jax.drafters import DrafterSource, of_run, open_run
from dflash_jax.errors import UserError
from dflash_jax.evaluation.difference import Judge
from dflash_jax.evaluation.measure import measure
from dflash_jax.experiment import Experiment
from dflash_jax.mesh import make_meshes, prepare_devices
from dflash_jax.models.target import Target
from dflash_jax.prompts.prompt import Prompt
from dflash_jax.prompts.reading import read_prompts

MESH = "one"
LOG_END = 2000  # characters of what vLLM said that an error shows


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """What the check is told."""

    run: str = option(MISSING, "run directory of a training")
    vllm: str = option(".vllm/bin/python", "python of an environment that tools/setup_vllm.sh made")
    step: str = option("latest", "checkpoint: latest, best (held-out accept length), or a saved step")
    prompts: str | None = option(
        None, "files of conversations, separated by commas; null: data.heldout of `run`, then its data.train"
    )
    limit: int = option(40, "prompts, the first ones", low=1)
    max_new_tokens: int = option(64, "tokens decoded for each prompt", low=1)
    dtype: str = option("float32", "dtype of the target's weights and of all activations", choices=DTYPES)
    format: str = option("zlab", "of the exported drafter", choices=("zlab", "speculators"))
    weights: str = option("bfloat16", "dtype of the exported drafter's weights", choices=DTYPES)
    repair: bool = option(
        True, "have vLLM use the key norm of each drafter layer, where it uses the first one's for all"
    )
    out: str | None = option(None, "folder for serving.json; null: report/ in `run`")


def main(arguments: list[str]) -> int:
    config = build(ServeConfig, [("command line", parse_assignments(arguments))])
    if not pathlib.Path(config.vllm).is_file():
        raise UserError(f"vllm: {config.vllm} does not exist; tools/setup_vllm.sh DIR makes DIR/bin/python")
    experiment = open_run(pathlib.Path(config.run), key="run")
    source = as_served(of_run(experiment, step=config.step, dtype=config.dtype), config)
    data = experiment.recipe.data
    files = config.prompts or ",".join(filter(None, (data.heldout, data.train)))
    prompts = read_prompts(files, preparation=experiment.preparation, limit=config.limit)[: config.limit]
    print(
        f"{experiment.name}, drafter of {config.run} at step {source.step}, block {source.config.block_size}\n"
        f"{len(prompts)} prompts one at a time, greedy, up to {config.max_new_tokens} tokens, {config.dtype}",
        flush=True,
    )
    plain, drafted = decode_in_engine(experiment, source, config, prompts)
    decodings = compare_here(experiment, source, config, prompts, plain.answers, drafted.answers)
    versions = {"jax": jax.__version__, **plain.versions}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    if drafted.repaired:
        print("vLLM repaired: its CPU kernel uses the key norm of the drafter's first layer for all (see repair=)")
    print(serving_report.table(decodings))
    faults = serving_report.faults(decodings)
    for fault in faults:
        print(f"FAULT: {fault}")
    out = pathlib.Path(config.run) / "report" if config.out is None else pathlib.Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "target": experiment.name,
        "step": source.step,
        "block_size": source.config.block_size,
        "config": dataclasses.asdict(config),
        "versions": versions,
        "repaired": drafted.repaired,
        "totals": serving_report.totals(decodings),
        "same_rounds": serving_report.same_rounds(decodings),
        "faults": faults,
        "answers": serving_report.answers_content(decodings),
    }
    (out / "serving.json").write_text(json.dumps(content, allow_nan=False) + "\n")
    print(f"written: {out / 'serving.json'}")
    return 1 if faults else 0


def as_served(source: DrafterSource, config: ServeConfig) -> DrafterSource:
    """The drafter that a server sees: parameters in the dtype of the exported `weights`, and in z-lab's format
    logits over all tokens, also where training had a draft vocabulary."""
    dtype = jnp.dtype(config.weights)

    def params(abstract: nnx.State) -> nnx.State:
        return jax.tree.map(lambda leaf: leaf.astype(dtype).astype(leaf.dtype), source.params(abstract))

    ends = source.ends if config.format == "speculators" else lambda whole: whole
    return dataclasses.replace(source, params=params, ends=ends)


def decode_in_engine(
    experiment: Experiment, source: DrafterSource, config: ServeConfig, prompts: Sequence[Prompt]
) -> tuple[EngineResult, EngineResult]:
    """Decode the prompts in vLLM plainly, then with the exported drafter."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        export(config, step=source.step, folder=folder / "drafter")
        job = {
            "target": str(hub_target(experiment.files.path, folder / "target", dtype=config.dtype).absolute()),
            "proposals": source.config.block_size - 1,
            "prompts": [prompt.tokens.tolist() for prompt in prompts],
            "stop": list(experiment.stop_tokens),
            "max_new_tokens": config.max_new_tokens,
            "dtype": config.dtype,
            "repair": config.repair,
        }
        plain = run_vllm(config.vllm, job | {"drafter": None}, folder=folder)
        return plain, run_vllm(config.vllm, job | {"drafter": str(folder / "drafter")}, folder=folder)


def export(config: ServeConfig, *, step: int | None, folder: pathlib.Path) -> None:
    """The run's drafter in a folder, by the command that a user runs."""
    options = {"run": config.run, "step": step, "to": folder, "format": config.format, "dtype": config.weights}
    command = [sys.executable, "-m", "dflash_jax.export", *(f"{key}={value}" for key, value in options.items())]
    if code := subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        raise UserError(f"run: dflash_jax.export ended with status {code}; what it said stands above")


def run_vllm(python: str, job: Mapping[str, Any], *, folder: pathlib.Path) -> EngineResult:
    """Run vllm_decode.py in vLLM's own python. Raises UserError with the end of what it said, if it failed."""
    script = pathlib.Path(__file__).with_name("vllm_decode.py")
    asked, answered, log = (folder / name for name in ("job.json", "result.json", "vllm.log"))
    asked.write_text(json.dumps(job))
    with log.open("w") as out:
        command = [python, str(script), str(asked), str(answered)]
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise UserError(f"vllm: {script.name} ended with status {code}: ... {log.read_text()[-LOG_END:]}")
    return EngineResult.read(answered)


def compare_here(
    experiment: Experiment,
    source: DrafterSource,
    config: ServeConfig,
    prompts: Sequence[Prompt],
    plain: Sequence[Served],
    drafted: Sequence[Served],
) -> dict[str, list[Served]]:
    """Decode the prompts here too; all answers by decoding, with their differences from vLLM's plain ones."""
    layout = build(MeshLayout, [(MESH, read_yaml(find_named("meshes", MESH, key="mesh")))])
    prepare_devices(layout)
    meshes = make_meshes(layout, MESH)
    recipe = experiment.recipe
    recipe = dataclasses.replace(recipe, target=dataclasses.replace(recipe.target, dtype=config.dtype))
    experiment = dataclasses.replace(experiment, recipe=recipe)
    target: Target = experiment.load_target(meshes.target, meshes.target_rules)
    loaded = source.load(target, meshes.target)
    speculators = {source.name: Speculator(loaded.drafter, loaded.frozen, source.taps)}
    limits = Limits(experiment.stop_tokens, config.max_new_tokens)
    decoding = Decoding(target, speculators, meshes.target, limits=limits)
    ways = {OURS: Way(PLAIN), OURS_DRAFTED: Way(CHAIN, source.name, slots=source.config.block_size)}
    measured = sorted(measure(decoding, prompts, list(ways.values()), None), key=lambda item: item.index)
    found: dict[str, list[Served]] = {ENGINE: list(plain), ENGINE_DRAFTED: list(drafted)}
    for name, way in ways.items():
        found[name] = []
        for answer in (item.answers[way] for item in measured):
            accepted = serving_report.accepted_by_position(answer.accepted, positions=way.slots - 1)
            tokens = tuple(answer.tokens.tolist())
            found[name].append(Served(tokens, answer.seconds, len(answer.accepted), accepted))
    judge = Judge(
        target,
        meshes.target,
        sampling=GREEDY,
        seed=0,
        dtype=config.dtype,
        room=max(len(prompt.tokens) for prompt in prompts) + config.max_new_tokens,
    )
    for answers in found.values():
        for number, answer in enumerate(answers):
            said, other = (np.array(tokens, np.int32) for tokens in (plain[number].tokens, answer.tokens))
            difference = judge.difference(prompts[number].tokens, said, other, number)
            answers[number] = dataclasses.replace(answer, difference=difference)
    return found


if __name__ == "__main__":
    run_entry_point(main, usage=__doc__, schema=ServeConfig)
