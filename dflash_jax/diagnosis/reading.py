"""The log of a training as columns: one row for each optimizer step, in the order of the steps.

Reads train_log.jsonl and what other trainers write: one JSON object a line, with "step" and any other keys. Lines
of the same step become one row, in which the later value of a key stands.
"""

import dataclasses
import gzip
import json
import math
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from dflash_jax.errors import UserError

LARGEST_STEP = 2**53  # beyond it a float64 is no exact whole number
LOG, EVALUATIONS = "train_log.jsonl", "eval_log.jsonl"
NOT_FINITE = {sign + word: float(sign + word) for sign in ("", "+", "-") for word in ("nan", "inf", "infinity")}


@dataclasses.dataclass(frozen=True)
class Log:
    """A log of N steps.

    steps: [N] int64, rising. columns: a key -> [N] float64, NaN where a row lacks it. lists: a key of lists of K
    numbers -> [N, K] float64. texts: a key -> [N] texts, "" where there is none. not_finite: a key -> [N] bool,
    where its value is there but is no finite number. evaluations: steps of eval_log.jsonl. repeated: rows whose
    loss is logged more than once. unread: lines that are no JSON object with a step.
    """

    name: str
    steps: np.ndarray
    columns: Mapping[str, np.ndarray]
    lists: Mapping[str, np.ndarray]
    texts: Mapping[str, Sequence[str]]
    not_finite: Mapping[str, np.ndarray]
    evaluations: frozenset[int]
    repeated: int
    unread: int

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, *names: str) -> np.ndarray:
        """[N] of the first of these keys that the log has: values of float32's range, else NaN."""
        name = next((name for name in names if name in self.columns), None)
        if name is None:
            return np.full(len(self), np.nan)
        values = self.columns[name]
        return np.where(np.abs(values) <= np.finfo(np.float32).max, values, np.nan)

    def has(self, *names: str) -> bool:
        """Whether the log has a number under at least one of these keys."""
        return any(name in self.columns for name in names)


def read_log(path: pathlib.Path) -> Log:
    """The log in a file, plain or gzipped, or in a run directory.

    Raises UserError if there is none, or if none of its lines has a step.
    """
    file = path / LOG if path.is_dir() else path
    if not file.is_file():
        what = f"is a folder without {LOG}" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}; give a run directory or a file of JSON lines")
    beside = file.with_name(EVALUATIONS)
    evaluations = _objects(beside) if file.name == LOG and beside.is_file() else ()
    return as_log(_objects(file), name=str(path), evaluations=evaluations)


def as_log(lines: Iterable[dict], *, name: str, evaluations: Iterable[dict] = ()) -> Log:
    """The log of these lines, in any order. Raises UserError if none of them has a step."""
    rows: dict[int, dict] = {}
    repeated, unread = set(), 0
    for line in lines:
        step = _step(line)
        if step is None:
            unread += 1
            continue
        if "loss" in rows.setdefault(step, {}) and "loss" in line:
            repeated.add(step)
        rows[step].update(line)
    if not rows:
        raise UserError(f"{name}: none of its {unread} lines is a JSON object with a step; give a training's log")
    steps = sorted(rows)
    columns, lists, texts, not_finite = _columns([rows[step] for step in steps])
    return Log(
        name=name,
        steps=np.array(steps, np.int64),
        columns=columns,
        lists=lists,
        texts=texts,
        not_finite=not_finite,
        evaluations=frozenset(step for step in map(_step, evaluations) if step is not None),
        repeated=len(repeated),
        unread=unread,
    )


def _objects(file: pathlib.Path) -> Iterator[dict]:
    """Every line's object; an empty one for a line that is none, as a kill leaves it."""
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
            for line in lines:
                if line.strip():
                    yield _parse(line)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: cannot be read ({error}); give a file of JSON lines, plain or gzipped") from None


def _parse(line: bytes) -> dict:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _step(line: dict) -> int | None:
    step = _number(line.get("step"))
    return None if step is None or not abs(step) < LARGEST_STEP else int(step)


def _number(value: object) -> float | None:
    """A number, or the words of one that is not finite; None of anything else: a digest may look like a number."""
    if isinstance(value, float):
        return value
    if isinstance(value, str):
        return NOT_FINITE.get(value.strip().lower())
    if isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def _columns(
    rows: Sequence[dict],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, list[str]], dict[str, np.ndarray]]:
    """(columns, lists, texts, not_finite) of a Log."""
    columns, lists, texts, not_finite = {}, {}, {}, {}
    for name in dict.fromkeys(name for line in rows for name in line):
        values = [line.get(name) for line in rows]
        numbers = [_number(value) for value in values]
        found = np.array([math.nan if number is None else number for number in numbers])
        broken = ~np.isfinite(found)
        broken[broken] = [numbers[row] is not None for row in np.flatnonzero(broken)]
        series = {row: _members(value) for row, value in enumerate(values) if isinstance(value, list)}
        for row, members in series.items():
            broken[row] = not all(map(math.isfinite, members))
        if broken.any():
            not_finite[name] = broken
        if any(number is not None for number in numbers):
            columns[name] = found
        elif any(isinstance(value, str) for value in values):
            texts[name] = [value if isinstance(value, str) else "" for value in values]
        if longest := max(map(len, series.values()), default=0):
            lists[name] = np.full((len(rows), longest), np.nan)
            for row, members in series.items():
                lists[name][row, : len(members)] = members
    return columns, lists, texts, not_finite


def _members(values: list) -> list[float]:
    """The numbers of a list; none if it holds anything else."""
    numbers = [number for number in map(_number, values) if number is not None]
    return numbers if len(numbers) == len(values) else []
