"""Rates that fall below half of what they were, and stay there, in steps of the same bucket and the same work."""

import numpy as np

from dflash_jax.diagnosis.facts import Facts
from dflash_jax.diagnosis.findings import SLOWER, Diagnosis, Explanation, Finding, Verdict, number
from dflash_jax.diagnosis.levels import rolling_median

RATES = ("drafter_tok_s", "tokens_s")
WIDTH = 15  # steps of a bucket whose median is its rate at a time
DROP = 0.5
LASTS, LASTS_STEPS = 0.2, 30  # share of all steps and steps that a drop lasts, unless the log ends before
FEWEST = 40  # steps of a bucket
RECALLED = 0.5  # share of features read back above which the target does nothing


def read_rates(facts: Facts) -> Diagnosis:
    """One finding for each rate that falls, of the bucket with most steps that shows it."""
    log, findings = facts.log, []
    rates = {name: log.column(name) for name in RATES if log.has(name)}
    if not rates and log.has("tokens") and log.has("step_s"):
        rates = {
            "tokens / step_s": log.column("tokens")
            / np.where(log.column("step_s") > 0, log.column("step_s"), np.nan)
        }
    for name, rate in rates.items():
        found = [
            finding for rows in _alike(facts, rate) if (finding := _fall(facts, name, rate, rows)) is not None
        ]
        findings += found[:1]
    return Diagnosis(
        findings[:1], unknown=[] if rates else [f"throughput: neither {' nor '.join(RATES)} in the log"]
    )


def _alike(facts: Facts, rate: np.ndarray) -> list[np.ndarray]:
    """Rows of the same bucket, with features computed or read back alike; the most numerous first."""
    recalled = np.nan_to_num(facts.log.column("recalled")) > RECALLED
    usable = facts.settled & np.isfinite(rate) & (rate > 0)
    classes = [
        np.flatnonzero(usable & (facts.groups == group) & (recalled == back))
        for group in np.unique(facts.groups)
        for back in (False, True)
    ]
    return sorted((rows for rows in classes if len(rows) >= FEWEST), key=len, reverse=True)


def _fall(facts: Facts, name: str, rate: np.ndarray, rows: np.ndarray) -> Finding | None:
    smooth = rolling_median(rate[rows], WIDTH)
    best = np.maximum.accumulate(smooth)
    slow = smooth < DROP * best
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], slow.astype(int), [0]]))).reshape(-1, 2)
    for start, end in bounds:
        steps = facts.log.steps[rows]
        lasting = steps[end - 1] - steps[start] >= max(
            LASTS_STEPS, LASTS * (facts.log.steps[-1] - facts.log.steps[0])
        )
        to_the_end = end == len(rows) and end - start >= WIDTH and steps[-1] >= facts.log.steps[-1] - LASTS_STEPS
        if end - start < WIDTH or not (lasting or to_the_end):
            continue
        before, during = float(np.median(rate[rows[:start]])), float(np.median(rate[rows[start:end]]))
        until = "to the end of the log" if end == len(rows) else f"until step {steps[end - 1]}"
        where = (
            f" in {facts.grouped_by} {number(float(facts.log.column(facts.grouped_by)[rows[0]]))}"
            if facts.grouped_by
            else ""
        )
        return Finding(
            SLOWER,
            int(steps[start]),
            int(steps[end - 1]),
            f"{name}{where} falls from {number(before)} to {number(during)} at step {steps[start]}, {until}",
            [
                f"median of {start} steps before {number(before)}, of {end - start} steps since {number(during)}",
                f"best median of {WIDTH} steps {number(float(best[start]))}",
            ],
            _causes(facts, rows[max(start - 5 * WIDTH, 0) : start], rows[start:end]),
        )
    return None


def _causes(facts: Facts, before: np.ndarray, during: np.ndarray) -> list[Explanation]:
    """Whether what takes a step's time, or how full it is, changed with the rate."""
    found = []
    for cause, name, times in (
        ("waiting for data", "data_wait_s", 2.0),
        ("waiting for features", "feature_wait_s", 2.0),
        ("longer steps", "step_s", 1.5),
        ("emptier batches", "tokens", 1 / 1.5),
        ("host memory", "host_memory_gib", 1.2),
    ):
        values = facts.log.column(name)
        if not (np.isfinite(values[before]).any() and np.isfinite(values[during]).any()):
            continue
        old, now = float(np.nanmedian(values[before])), float(np.nanmedian(values[during]))
        changed = now > times * old if times > 1 else now < times * old
        verdict: Verdict = "supported" if changed else "refuted"
        if name.endswith("wait_s"):  # a wait counts only if it is much of the step
            step_s = facts.log.column("step_s")[during]
            verdict = "supported" if changed and now > 0.3 * np.nanmedian(step_s) else "refuted"
        found.append(Explanation(cause, verdict, f"{name} {number(old)} -> {number(now)}"))
    return found
