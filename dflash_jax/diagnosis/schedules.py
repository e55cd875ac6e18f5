"""Learning rate and noise that start at their full value where they should rise from zero."""

import numpy as np

from dflash_jax.diagnosis.facts import Facts
from dflash_jax.diagnosis.findings import NO_WARM_UP, Diagnosis, Explanation, Finding, number

FEWEST = 40  # logged steps that make a run long enough for a warm-up of more than one step
START = 5  # the log must begin at one of the first steps
HEAD, LEAST = 0.02, 5  # share of the steps that are looked at, and how many at least
FULL = 0.9  # of the highest value; a rise begins lower
WHAT = {"lr": "the learning rate", "noise_std": "the noise"}


def read_warm_up(facts: Facts) -> Diagnosis:
    """lr and noise_std that are as high in the first steps as they ever get."""
    log = facts.log
    unknown = [] if log.has("lr") else ["warm-up: no lr in the log"]
    if len(log) < FEWEST or log.steps[0] > START * max(facts.stride, 1.0):
        return Diagnosis(
            unknown=unknown or ["warm-up: the log does not hold the first steps of a run, or too few"]
        )
    findings = []
    for name, what in WHAT.items():
        values = log.column(name)
        values = values[np.isfinite(values)]
        if len(values) < FEWEST or values.max() <= 0:
            continue
        head = values[: max(LEAST, round(HEAD * len(values)))]
        if head[0] < FULL * values.max() or np.ptp(head) > (1 - FULL) * values.max():
            continue
        last = int(log.steps[min(len(head), len(log)) - 1])
        flat = int(np.argmax(np.abs(values - head[0]) > 1e-3 * head[0])) or len(values)
        findings.append(
            Finding(
                NO_WARM_UP,
                int(log.steps[0]),
                last,
                f"{what} ({name}) does not rise: {number(head[0])} at step {log.steps[0]}, "
                f"{number(head[-1])} at step {last}",
                [
                    f"it stays within 0.1% of {number(head[0])} for {flat} logged steps",
                    f"highest {number(values.max())}, last {number(values[-1])}",
                ],
                [_elsewhere(facts, other) for other in WHAT if other != name and log.has(other)],
            )
        )
    return Diagnosis(findings, unknown=unknown)


def _elsewhere(facts: Facts, name: str) -> Explanation:
    """Whether the run has no warm-up at all, or only this schedule lacks it."""
    values = facts.log.column(name)
    values = values[np.isfinite(values)]
    rises = len(values) > 0 and values[0] < FULL * values.max()
    text = f"{name} begins at {number(values[0])}, highest {number(values.max())}" if len(values) else f"no {name}"
    return Explanation("run without warm-up", "refuted" if rises else "supported", text)
