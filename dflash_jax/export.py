"""Write a drafter for engines: ``python -m dflash_jax.export run=DIR to=DIR [step=..] [format=..] [dtype=..]``.

With ``drafter=FOLDER target=PATH`` a published folder is converted instead. What is written is checked before it
appears at `to`, whole or not at all.
"""

import dataclasses
import hashlib
import json
import pathlib

import jax
import numpy as np
from flax import nnx

from dflash_jax.arguments import build, parse_assignments, run_entry_point
from dflash_jax.config import ExportConfig
from dflash_jax.drafters import of_run, open_run, training_records
from dflash_jax.errors import UserError
from dflash_jax.models.drafter import Drafter
from dflash_jax.published import speculators_format, zlab_format
from dflash_jax.published.drafter_card import SPECULATORS, ZLAB, History, card
from dflash_jax.published.drafter_folder import DrafterFolder
from dflash_jax.published.export_folder import CARD, CONFIG, WEIGHTS, whole_folder
from dflash_jax.published.finished_drafter import FinishedDrafter, TargetEnds
from dflash_jax.published.folder_check import check_folder
from dflash_jax.published.stored import Stored
from dflash_jax.published.targets import TargetFiles
from dflash_jax.published.tensor_file import write_tensors
from dflash_jax.published.weights import names
from dflash_jax.target_path import target_path

USAGE = """\
usage: python -m dflash_jax.export run=DIR to=DIR [step=latest|best|N] [format=zlab|speculators] [key=value ...]
       python -m dflash_jax.export drafter=FOLDER target=PATH to=DIR [format=zlab|speculators] [key=value ...]

keys, with type, default and meaning:"""
FORMATS = {ZLAB: zlab_format, SPECULATORS: speculators_format}


def main(arguments: list[str]) -> int:
    config = build(ExportConfig, [("command line", parse_assignments(arguments))])
    if (config.run is None) == (config.drafter is None):
        raise UserError("run: give either run=DIR, or drafter=FOLDER and target=PATH")
    drafter, history, digest = of_training(config) if config.run else of_folder(config)
    export(drafter, history, config=config, identity=f"{history.target} {identity(drafter, digest)}")
    return 0


def export(drafter: FinishedDrafter, history: History, *, config: ExportConfig, identity: str) -> None:
    """Write, check and show at its place; identity: what tells this drafter from another."""
    trained, drafter = drafter, drafter.covering_all() if config.format == ZLAB else drafter
    fields = FORMATS[config.format].write(drafter.fields(), drafter.ends.facts, dtype=config.dtype)
    to = pathlib.Path(config.to)
    with whole_folder(to, drafter=identity) as folder:
        (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
        write_tensors(folder / WEIGHTS, drafter.tensors(config.dtype))
        check_folder(folder, drafter, dtype=config.dtype)
        text = card(trained, history, format=config.format, dtype=config.dtype, place=config.to)
        (folder / CARD).write_text(text)
    size = (to / WEIGHTS).stat().st_size
    print(
        f"written: {to} ({size / 1e6:.1f} MB, {config.dtype}, {config.format}); its README.md says how to serve it"
    )


def of_training(config: ExportConfig) -> tuple[FinishedDrafter, History, str]:
    """The drafter of a run's checkpoint, its history, and the digest of its target."""
    run = pathlib.Path(str(config.run))
    experiment = open_run(run, key="run")
    source = of_run(experiment, step=config.step, dtype=None)
    step, records = source.step, training_records(experiment)
    shapes = nnx.state(nnx.eval_shape(lambda: Drafter(experiment.drafter, nnx.Rngs(0))))
    host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    params = source.params(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host), shapes)
    )
    drafter = FinishedDrafter(
        experiment.drafter,
        experiment.taps,
        {name: Stored.of(np.asarray(variable.get_value())) for name, variable in names(params).items()},
        TargetEnds.of(experiment.files),
        draft_tokens=experiment.draft_tokens(records),
    )
    tokens = int(records.lengths.sum())
    history = History(
        target=experiment.name,
        origin=(
            f"trained with dflash_jax, step {step}",
            f"data: {len(records)} records, {tokens} tokens, sha256 `{records.digest}`",
            f"target: digest `{experiment.files.digest}` (configuration, and both ends of its weight files)",
        ),
        check=f"python tools/serve_check.py run={run}" + ("" if config.step == "latest" else f" step={step}"),
        measured=measured(run, step),
        recipe=(run / "recipe.yaml").read_text(),
    )
    return drafter, history, experiment.files.digest


def measured(run: pathlib.Path, step: int | None) -> tuple[tuple[str, str, str], ...]:
    """Rows of prompt set, way of decoding and accept length, if the run's last evaluation was of this step."""
    file = run / "report" / "evaluation.json"
    report = json.loads(file.read_text()) if file.exists() else {}
    own = report.get("drafters", [])[:1]  # the run's own comes first
    if not own or own[0].get("step") != step:
        return ()
    return tuple(
        (found["set"], way["decoding"], f"{way['accept_len']:.2f}")
        for found in report.get("sets", [])
        for way in found.get("ways", [])
        if way.get("drafter") == own[0]["name"] and way.get("accept_len") is not None
    )


def of_folder(config: ExportConfig) -> tuple[FinishedDrafter, History, str]:
    """A published folder's drafter, its history, and the digest of its target."""
    if config.target is None:
        raise UserError(
            "target: a value is required with drafter=FOLDER, for the drafter is checked with its target"
        )
    folder, files = (
        DrafterFolder.open(pathlib.Path(str(config.drafter))),
        TargetFiles.open(target_path(config.target)),
    )
    if misfits := folder.misfits(files.config):
        raise UserError(f"drafter: {folder.path} is not for {files.name}: {'; '.join(misfits)}")
    drafter = FinishedDrafter(
        folder.config,
        folder.taps,
        dict(folder.tensors()),
        TargetEnds.of(files),
        draft_tokens=folder.draft_tokens(),
        own_embedding=folder.own_embedding(),
        own_head=folder.own_head(),
    )
    origin = f"converted with dflash_jax from the folder `{folder.path.name}`, which says how it was trained"
    return drafter, History(target=files.name, origin=(origin,)), files.digest


def identity(drafter: FinishedDrafter, digest: str) -> str:
    """What tells one drafter from another: its target by digest, its sizes and its taps."""
    what = {"target": digest, "drafter": dataclasses.asdict(drafter.config), "taps": drafter.taps}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    run_entry_point(main, usage=USAGE, schema=ExportConfig)
