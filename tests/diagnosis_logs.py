"""Logs of trainings that never were: healthy ones of many shapes, and ones with a single planted fault.

Lines have the keys of train_log.jsonl. Bucket b of B has twice the length of bucket b - 1 and a higher loss.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

Lines = list[dict]
PEAK = 6e-4


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a healthy log is like. shares: of the buckets; spread: of single losses, relative; resumed: the steps
    after which the process began anew; evaluated: interval of evaluations that pause the run; 0 for none."""

    steps: int = 600
    shares: Sequence[float] = (0.5, 0.3, 0.2)
    apart: float = 1.4  # loss of a bucket over that of the one before
    spread: float = 0.06
    accuracy_spread: float = 0.012
    schedule: str = "cosine"
    noise: float = 0.0
    resumed: Sequence[int] = ()
    evaluated: int = 0
    saved: int = 200
    passes: int = 3
    skew: float = 0.15  # of the time of a step
    tail: int = 0  # degrees of freedom of the scatter of single losses; 0: normal
    recalled: bool = False  # after the first pass the features are read back, and a step takes a fifth
    partial: bool = False  # each pass ends with a third of a batch


def even_order(shares: Sequence[float], steps: int) -> np.ndarray:
    """[steps] buckets by the largest debt: each as often as its share, runs as short as they can be."""
    debt, order = np.zeros(len(shares)), np.zeros(steps, np.int64)
    for step in range(steps):
        debt += shares
        order[step] = debt.argmax()
        debt[order[step]] -= 1.0
    return order


def healthy(seed: int, shape: Shape = Shape()) -> Lines:
    """The lines of a run without faults."""
    rng = np.random.default_rng(seed)
    count = shape.steps
    step = np.arange(1, count + 1)
    warm_up = max(round(0.04 * count), 1)
    bucket = even_order(shape.shares, count)
    ramp = np.minimum((step - 1) / warm_up, 1.0)
    done = np.clip((step - 1 - warm_up) / max(count - warm_up, 1), 0.0, 1.0)
    decay = {"cosine": 0.5 * (1 + np.cos(np.pi * done)), "constant": np.ones(count)}[shape.schedule]
    level = 0.4 + 10.0 * (step + 2.0) ** -0.45
    epoch = step * shape.passes / count
    last = np.append(np.diff(np.ceil(epoch - 1e-9)) > 0, True) & shape.partial
    wide = np.where(last, np.sqrt(3.0), 1.0)
    scatter = rng.standard_t(shape.tail, count) if shape.tail else rng.standard_normal(count)
    loss = level * shape.apart**bucket * np.exp(shape.spread * wide * scatter)
    skill = 0.5 * (1.0 - (1.0 + step / (0.1 * count)) ** -0.7)
    acc = np.clip(skill * 0.95**bucket + shape.accuracy_spread * wide * rng.standard_normal(count), 0.0, 1.0)
    streak = np.clip(3.0 * skill * 0.95**bucket * np.exp(0.05 * rng.standard_normal(count)), 0.0, None)
    seq_len = 128 * 2**bucket
    rows = np.maximum(4096 // seq_len, 1)
    tokens = np.rint(rows * seq_len * rng.uniform(0.8, 1.0, count) / wide**2).astype(int)
    again = shape.recalled & (epoch > 1.0)
    step_s = (0.5 + 0.1 * bucket) * np.exp(shape.skew * rng.standard_normal(count)) * np.where(again, 0.2, 1.0)
    restarts = {0, *shape.resumed}
    lines, elapsed, seen, saved = [], 0.0, set(), 0
    for row in range(count):
        if row in restarts:
            elapsed, seen = 30.0, set()
        if bucket[row] not in seen:
            step_s[row] += 20.0
            seen.add(bucket[row])
        if row and shape.evaluated and row % shape.evaluated == 0:
            elapsed += 25.0
        elapsed += float(step_s[row])
        whole = row // shape.saved * shape.saved
        saved, saving = (whole, 0) if row - whole >= 3 else (max(whole - shape.saved, 0), int(whole > 0))
        line = {
            "step": row + 1,
            "epoch": float(epoch[row]),
            "epochs": shape.passes,
            "tokens": int(tokens[row]),
            "rows": int(rows[row]),
            "records": f"{rng.integers(1 << 62):016x}",
            "seq_len": int(seq_len[row]),
            "bucket": int(bucket[row]),
            "recalled": float(again[row]),
            "data_wait_s": float(rng.uniform(0, 0.01)),
            "loss": float(loss[row]),
            "acc": float(acc[row]),
            "accept_len": 1.0 + float(streak[row]),
            "streak": float(streak[row]),
            "acc_by_position": [float(acc[row])] * 3,
            "blocks": 72.0 / wide[row] ** 2,
            "grad_norm": float(np.exp(0.3 * rng.standard_normal())),
            "update_ratio": 1e-3,
            "lr": float(PEAK * ramp[row] * decay[row]),
            "skipped": 0,
            "prefetch_queue": int(rng.integers(8, 13)),
            "feature_queue": int(rng.integers(1, 3) + 6 * again[row]),
            "tokens_s": float(tokens[row] / step_s[row]),
            "drafter_tok_s": float(tokens[row] / step_s[row]),
            "step_s": float(step_s[row]),
            "checkpoint": saved,
            "saving": saving,
            "elapsed_s": elapsed,
            "eta_s": 1.0,
            "host_memory_gib": 10.0,
        }
        if shape.noise:
            line["noise_std"] = float(shape.noise * ramp[row] * (1 - done[row]))
        lines.append(line)
    return lines


def save(lines: Lines, file: pathlib.Path) -> pathlib.Path:
    """Write a log as the training writes it: numbers that are not finite as text."""

    def plain(value: object) -> object:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    texts = (json.dumps({key: plain(value) for key, value in line.items()}) for line in lines)
    file.write_text("".join(f"{text}\n" for text in texts))
    return file


def _somewhere(lines: Lines, rng: np.random.Generator) -> int:
    """A row in the middle part of a log."""
    return int(rng.integers(len(lines) // 4, 3 * len(lines) // 4))


def not_finite(lines: Lines, rng: np.random.Generator) -> Lines:
    key = ("loss", "grad_norm", "acc", "update_ratio")[rng.integers(4)]
    lines[_somewhere(lines, rng)][key] = (math.nan, math.inf, -math.inf)[rng.integers(3)]
    return lines


def loss_jump(lines: Lines, rng: np.random.Generator) -> Lines:
    row, lasts = _somewhere(lines, rng), int(rng.integers(1, 6))
    for line in lines[row : row + lasts]:
        line["loss"] *= rng.uniform(5.0, 16.0)
    return lines


def accuracy_fall(lines: Lines, rng: np.random.Generator) -> Lines:
    row, lasts, deep = _somewhere(lines, rng), int(rng.integers(1, 80)), rng.uniform(0.12, 0.25)
    for offset, line in enumerate(lines[row : row + lasts]):
        line["acc"] = max(line["acc"] - deep * min((offset + 1) / min(lasts, 3), 1.0), 0.0)
    return lines


def step_gap(lines: Lines, rng: np.random.Generator) -> Lines:
    row, absent = _somewhere(lines, rng), int(rng.integers(1, 40))
    return lines[:row] + lines[row + absent :]


def time_gap(lines: Lines, rng: np.random.Generator) -> Lines:
    """Neither where evaluations may be nor where a process begins and compiles."""
    row, pause = 0, float(rng.uniform(30.0, 200.0))
    while row % 50 == 0 or lines[row]["elapsed_s"] < lines[row - 40]["elapsed_s"]:
        row = _somewhere(lines, rng)
    for line in lines[row:]:
        line["elapsed_s"] += pause
    return lines


def spikes(lines: Lines, rng: np.random.Generator) -> Lines:
    for row in range(30, len(lines)):
        if rng.random() < 0.04:
            lines[row]["loss"] *= rng.uniform(1.5, 1.9)
    return lines


def modes(lines: Lines, rng: np.random.Generator) -> Lines:
    share = rng.uniform(0.25, 0.75)
    for line in lines:
        line["loss"] *= 1.7 if rng.random() < share else 1.0
    return lines


def bucket_runs(lines: Lines, rng: np.random.Generator) -> Lines:
    """The buckets in long stretches, after each has come once."""
    width = int(rng.integers(20, 50))
    parts = [lines[start : start + width] for start in range(50, len(lines), width)]
    moving = ("seq_len", "bucket", "rows")
    factors = {line["bucket"]: 1.4 ** line["bucket"] for line in lines}
    for part in parts:
        order = sorted(part, key=lambda line: line["bucket"])
        found = [{key: line[key] for key in moving} for line in order]
        for line, values in zip(part, found, strict=True):
            line["loss"] *= factors[values["bucket"]] / factors[line["bucket"]]
            line.update(values)
    return lines


def queue_drift(lines: Lines, rng: np.random.Generator) -> Lines:
    name, far = ("prefetch_queue", "feature_queue")[rng.integers(2)], int(rng.integers(20, 60))
    for row, line in enumerate(lines):
        line[name] += far * row // len(lines)
    return lines


def uneven_queues(lines: Lines, rng: np.random.Generator) -> Lines:
    depths = rng.permutation([43, 50, 28, 31, 25, 39])
    for row, line in enumerate(lines):
        grown = 12 + (depths - 12) * min(2 * row / len(lines), 1.0)
        line["feature_queue"] = [int(depth) for depth in grown + rng.integers(-1, 2, 6)]
    return lines


def flat_noise(lines: Lines, rng: np.random.Generator) -> Lines:
    """start * frac + start * (1 - frac) while it should rise, then down to zero."""
    start, warm = float(rng.uniform(0.01, 0.2)), round(0.04 * len(lines))
    for row, line in enumerate(lines):
        frac = min(row / warm, 1.0)
        line["noise_std"] = (start * frac + start * (1 - frac)) * min(
            (len(lines) - row) / (len(lines) - warm), 1.0
        )
    return lines


def flat_rate(lines: Lines, rng: np.random.Generator) -> Lines:
    warm = round(0.04 * len(lines))
    for line in lines[:warm]:
        line["lr"] = PEAK
    return lines


def plateau(lines: Lines, rng: np.random.Generator) -> Lines:
    """From a third of the run on nothing gets better; buckets and noise stay."""
    row = int(len(lines) * rng.uniform(0.25, 0.35))
    step = np.arange(1, len(lines) + 1)
    level, skill = 0.4 + 10.0 * (step + 2.0) ** -0.45, 1.0 - (1.0 + step / (0.1 * len(lines))) ** -0.7
    for at in range(row, len(lines)):
        lines[at]["loss"] *= level[row] / level[at]
        for key in ("acc", "streak"):
            lines[at][key] *= skill[row] / skill[at]
        lines[at]["accept_len"] = 1.0 + lines[at]["streak"]
    return lines


def skipped(lines: Lines, rng: np.random.Generator) -> Lines:
    row = _somewhere(lines, rng)
    for line in lines[row : row + int(rng.integers(1, 4))]:
        line.update(skipped=1, grad_norm=80.0)
    return lines


def slower(lines: Lines, rng: np.random.Generator) -> Lines:
    row, times = _somewhere(lines, rng), float(rng.uniform(2.6, 6.0))
    extra = 0.0
    for line in lines[row:]:
        extra += (times - 1.0) * line["step_s"]
        line["step_s"] *= times
        line["tokens_s"] /= times
        line["drafter_tok_s"] /= times
        line["elapsed_s"] += extra
    return lines


PLANTS: dict[str, Sequence[Callable[[Lines, np.random.Generator], Lines]]] = {
    "not finite": [not_finite],
    "loss jump": [loss_jump],
    "accuracy fall": [accuracy_fall],
    "step gap": [step_gap],
    "time gap": [time_gap],
    "spikes": [spikes],
    "several losses": [modes],
    "bucket runs": [bucket_runs],
    "queue drift": [queue_drift, uneven_queues],
    "no warm-up": [flat_noise, flat_rate],
    "plateau": [plateau],
    "skipped steps": [skipped],
    "slower": [slower],
}

HEALTHY = {
    "plain": Shape(),
    "short 20": Shape(steps=20),
    "short 50": Shape(steps=50),
    "packed": Shape(shares=(1.0,)),
    "six buckets": Shape(shares=(0.05, 0.08, 0.1, 0.11, 0.14, 0.52), apart=1.25),
    "long": Shape(steps=3000, passes=6),
    "noisy": Shape(spread=0.15, accuracy_spread=0.05, skew=0.4),
    "constant": Shape(schedule="constant"),
    "noise": Shape(noise=0.1),
    "resumed": Shape(resumed=(130, 400)),
    "evaluated": Shape(evaluated=100),
    "evaluated and resumed": Shape(evaluated=200, resumed=(200, 371), noise=0.05, spread=0.1),
    "far apart": Shape(apart=2.0, shares=(0.6, 0.25, 0.15)),
    "recalled": Shape(recalled=True, partial=True, evaluated=200),
    "heavy tails": Shape(spread=0.08, tail=8, partial=True),
    "small": Shape(steps=120, spread=0.1, accuracy_spread=0.03),
    "calm": Shape(spread=0.01, accuracy_spread=0.002),
}


def real_events(seed: int) -> Lines:
    """A log with the figures of a run that went wrong: a line every two or three steps, two stretches absent after
    saves at 2000 and 4001, two jumps of the loss and a fall of accuracy."""
    rng = np.random.default_rng(seed)
    steps, step = [], 1
    fixed = [1304, 1306, 1309, 2000, 2027, 2029, 4001, 4019, 4021]
    while step < 5000:
        steps.append(step)
        following = next((at for at in fixed if at > step), None)
        apart = int(rng.integers(2, 4))
        near = following is not None and following - step <= 4
        step = following if near and following is not None else step + apart
        step = {2000: 2000, 4001: 4001}.get(step, step)
    steps = [
        at for at in steps if not (2000 < at < 2027 or 4001 < at < 4019 or 1304 < at < 1306 or 1306 < at < 1309)
    ]
    lines = []
    for at in steps:
        pause = 167.0 * (at > 2000) + 112.0 * (at > 4001)
        level = 1.9 * (at + 20.0) ** -0.115
        lines.append(
            {
                "step": at,
                "loss": level * float(np.exp(0.05 * rng.standard_normal())),
                "acc": 0.0886 * (at / 1304) ** 0.3 + 0.004 * float(rng.standard_normal()),
                "lr": 6e-4 * min(at / 1600, 1.0),
                "grad_norm": float(np.exp(0.2 * rng.standard_normal())),
                "tokens": at * 40_000,
                "bucket": int(rng.integers(3)),
                "elapsed_s": 3.0 * at + pause,
            }
        )
    fixed_values = {
        1304: {"acc": 0.0886},
        1306: {"acc": 0.0326},
        1309: {"acc": 0.0084},
        2027: {"loss": 0.793},
        2029: {"loss": 13.004},
        4019: {"loss": 0.731},
        4021: {"loss": 7.235},
    }
    for line in lines:
        line.update(fixed_values.get(line["step"], {}))
    return lines
