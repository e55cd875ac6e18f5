"""What an evaluation leaves behind: evaluation.json, two pictures, and points in the run's TensorBoard record."""

import dataclasses
import importlib.metadata
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_jax.config import EvaluateConfig
from dflash_jax.drafters import DrafterSource
from dflash_jax.evaluation.measure import Measured
from dflash_jax.evaluation.report import SetReport, WayReport, entries
from dflash_jax.monitor.board import record
from dflash_jax.monitor.decoding_picture import Shown, draw_decoding
from dflash_jax.monitor.json_lines import read_lines
from dflash_jax.monitor.picture import draw_report
from dflash_jax.prompts.packaged import PACKAGED
from dflash_jax.published.targets import TargetFiles

LINE = 115  # characters of the report that stand on one line
PACKAGES = ("dflash-jax", "jax", "jaxlib", "flax", "transformers")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """dtype: of the target; run: the run directory that was evaluated, None without one; folder: for the report,
    None for nowhere; sources: the drafters, the run's own first; digests: of their parameters, by name; reports:
    by prompt set, the last over all of them."""

    config: EvaluateConfig
    target: TargetFiles
    dtype: str
    run: pathlib.Path | None
    folder: pathlib.Path | None
    sources: Sequence[DrafterSource]
    digests: Mapping[str, str]
    measured: Sequence[Measured]
    reports: Sequence[SetReport]


def write_evaluation(evaluation: Evaluation) -> Iterator[pathlib.Path]:
    """Write all files; yields each that a person would open."""
    run, folder = evaluation.run, evaluation.folder
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "evaluation.json"
        file.write_text(_text(content(evaluation)) + "\n")
        yield file
        file = folder / "decoding.png"
        _draw(evaluation, file)
        yield file
    if run is not None and folder is not None and evaluation.sources:
        yield _training_picture(evaluation, run, folder)
    if run is not None and evaluation.sources:
        own = evaluation.sources[0]
        assert own.step is not None
        record(run, own.step, dict(points(evaluation.reports, own=own.name)), name="evaluate")


def content(evaluation: Evaluation) -> dict[str, Any]:
    """Everything about the evaluation, as JSON has it."""
    config, target = evaluation.config, evaluation.target
    return {
        "settings": dataclasses.asdict(config),
        "target": {
            "name": target.name,
            "path": str(target.path),
            "digest": target.digest,
            "dtype": evaluation.dtype,
        },
        "drafters": [
            {
                "name": source.name,
                "path": str(source.path),
                "step": source.step,
                "digest": evaluation.digests[source.name],
                "dtype": source.dtype,
                "taps": list(source.taps),
                "layers": len(source.config.layer_types),
                "block_size": source.config.block_size,
            }
            for source in evaluation.sources
        ],
        "packages": _versions([*PACKAGES, *(kind.install.partition("==")[0] for kind in PACKAGED.values())]),
        "sets": [
            {"set": report.set, "prompts": report.prompts, "ways": [_way(way) for way in report.ways]}
            for report in evaluation.reports
        ],
        "prompts": entries(evaluation.measured),
    }


def points(reports: Sequence[SetReport], *, own: str) -> Iterator[tuple[str, float]]:
    """TensorBoard's decode/SET/WAY/WHAT; ways of drafters other than `own` have their name before them."""
    for report in reports:
        for way in report.ways:
            foreign = way.way.drafter not in (None, own)
            name = way.way.decoding.replace(" ", "")
            where = f"decode/{report.set}/{f'{way.way.drafter}/' if foreign else ''}{name}"
            values = {"tokens_s": way.tokens_s, "ratio": way.ratio, "accept_len": way.accept_len}
            yield from ((f"{where}/{key}", value) for key, value in values.items() if value is not None)


def _text(value: Any, indent: str = "") -> str:
    """JSON in which what fits a line stands on one, and so does every list of numbers."""
    flat = json.dumps(value, allow_nan=False)
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    listed = isinstance(value, list) and not any(isinstance(item, dict | list) for item in inner)
    if len(indent) + len(flat) <= LINE or not inner or listed:
        return flat
    deeper = f"{indent}  "
    heads = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(inner)
    rows = (f"{deeper}{head}{_text(item, deeper)}" for head, item in zip(heads, inner, strict=True))
    ends = "{}" if isinstance(value, dict) else "[]"
    return f"{ends[0]}\n" + ",\n".join(rows) + f"\n{indent}{ends[1]}"


def _way(report: WayReport) -> dict[str, Any]:
    found = dataclasses.asdict(report)
    way = found.pop("way")
    named = {"drafter": way["drafter"], "decoding": report.way.decoding, "slots": way["slots"]}
    return named | found | {"different": report.different}


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _draw(evaluation: Evaluation, file: pathlib.Path) -> None:
    reports = evaluation.reports[:1] if len(evaluation.reports) == 2 else evaluation.reports
    ways = [way for way in evaluation.reports[-1].ways if way.way.drafter is not None]
    shown = [
        Shown(
            str(way.way.drafter),
            way.way.decoding,
            accept_lens=[report.of(way.way).accept_len for report in reports],
            ratios=[report.of(way.way).ratio for report in reports],
            survival=way.survival_by_position,
        )
        for way in ways
    ]
    draw_decoding([report.set for report in reports], shown, file, title=f"{evaluation.target.name}: decoding")


def _training_picture(evaluation: Evaluation, run: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The run's picture, from its logs."""
    file, own = folder / "training.png", evaluation.sources[0]
    draw_report(
        list(read_lines(run / "train_log.jsonl")),
        list(read_lines(run / "eval_log.jsonl")),
        file,
        title=f"{evaluation.target.name}: DFlash drafter, block {own.config.block_size}",
    )
    return file
