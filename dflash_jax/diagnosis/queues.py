"""Depths of queues that drift with time, or that differ between workers."""

from collections.abc import Iterator

import numpy as np

from dflash_jax.diagnosis.facts import Facts
from dflash_jax.diagnosis.findings import QUEUE_DRIFT, Diagnosis, Explanation, Finding, number

QUEUES = ("prefetch_queue", "feature_queue")
PARTS, FEWEST = 6, 60  # parts of a stretch whose medians are compared; steps that a stretch needs
LEAST, SHARE = 4.0, 0.5  # a drift or a spread is that many elements, and that share of the greater depth, at least
ONE_STEP = 0.6  # more of the change than that between two parts is a step, as after a pass without features
TOGETHER = 0.7  # correlation with the step


def read_queues(facts: Facts) -> Diagnosis:
    """Drift of each queue over the whole run or within a pass, and uneven depths where workers have their own."""
    log, findings = facts.log, []
    known = [name for name in QUEUES if name in log.columns or name in log.lists]
    for name in known:
        if name in log.lists:
            depths, single = log.lists[name], np.nanmean(np.nan_to_num(log.lists[name]), axis=1)
            findings += _uneven(facts, name, depths)
        else:
            single = log.column(name)
        findings += _drifting(facts, name, single)
    unknown = [] if known else [f"queue drift: neither {' nor '.join(QUEUES)} in the log"]
    return Diagnosis(findings, unknown=unknown)


def _stretches(facts: Facts) -> Iterator[tuple[str, np.ndarray]]:
    """Rows of the run, then of each pass: (what it is, [rows])."""
    rows = np.flatnonzero(facts.settled)
    yield "the run", rows
    epoch = facts.log.column("epoch")[rows]
    if np.isfinite(epoch).all() and len(rows):
        number_of = np.ceil(epoch - 1e-9)
        for single in np.unique(number_of) if len(np.unique(number_of)) > 1 else ():
            yield f"pass {int(single)}", rows[number_of == single]


def _drifting(facts: Facts, name: str, depth: np.ndarray) -> list[Finding]:
    """At most one finding: of the first stretch over which the depth goes steadily up or down."""
    for what, stretch in _stretches(facts):
        rows = stretch[np.isfinite(depth[stretch])]
        if len(rows) < FEWEST:
            continue
        medians = np.array([np.mean(depth[part]) for part in np.array_split(rows, PARTS)])
        moves, whole = np.diff(medians), medians[-1] - medians[0]
        least = max(LEAST, SHARE * max(medians[0], medians[-1]))
        steady = (np.sign(moves) == np.sign(whole)).all() and abs(moves).max() <= ONE_STEP * abs(whole)
        if not steady or abs(whole) < least or depth[rows].std() == 0:
            continue
        if abs(np.corrcoef(rows, depth[rows])[0, 1]) < TOGETHER:
            continue
        steps = facts.log.steps[rows]
        direction = "grows" if whole > 0 else "falls"
        return [
            Finding(
                QUEUE_DRIFT,
                int(steps[0]),
                int(steps[-1]),
                f"{name} {direction} over {what}: {number(medians[0])} -> {number(medians[-1])}",
                [f"means of {PARTS} equal parts: {', '.join(number(median) for median in medians)}"],
                [_faster(facts, rows, grows=bool(whole > 0))],
            )
        ]
    return []


def _faster(facts: Facts, rows: np.ndarray, *, grows: bool) -> Explanation:
    """Whether the consumer changed its pace, or the producer or the counting did."""
    step_s = facts.log.column("step_s")[rows]
    cause = "the step got slower" if grows else "the step got faster"
    if not np.isfinite(step_s).any():
        return Explanation(cause, "undecidable", "no step_s in the log")
    first, last = (float(np.nanmedian(part)) for part in (step_s[: len(rows) // 3], step_s[-(len(rows) // 3) :]))
    changed = last > 1.2 * first if grows else last < first / 1.2
    return Explanation(cause, "supported" if changed else "refuted", f"{number(first)} -> {number(last)} s a step")


def _uneven(facts: Facts, name: str, depths: np.ndarray) -> list[Finding]:
    """A finding if the queues of the workers [N, workers] have different usual depths."""
    rows = np.flatnonzero(facts.settled & np.isfinite(depths).all(axis=1))
    if len(rows) < FEWEST // 3 or depths.shape[1] < 2:
        return []
    usual = np.median(depths[rows[len(rows) // 2 :]], axis=0)
    spread = float(usual.max() - usual.min())
    if spread < max(LEAST, SHARE * float(usual.mean())):
        return []
    steps = facts.log.steps[rows]
    early = np.median(depths[rows[: max(len(rows) // 6, 1)]], axis=0)
    apart = spread > 1.5 * float(early.max() - early.min())
    return [
        Finding(
            QUEUE_DRIFT,
            int(steps[0]),
            int(steps[-1]),
            f"{name} is uneven: usual depths {_depths(usual)}",
            [f"at the start {_depths(early)}", f"step {steps[-1]}: {_depths(depths[rows[-1]])}"],
            [
                Explanation(
                    "separate counters",
                    "supported" if apart else "undecidable",
                    "the queues come apart with time" if apart else "they differ from the start",
                )
            ],
        )
    ]


def _depths(values: np.ndarray) -> str:
    return "[" + ", ".join(number(float(value)) for value in values) + "]"
