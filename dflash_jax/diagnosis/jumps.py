"""Steps whose loss is far above what it usually is: single jumps, and the share of spikes."""

import numpy as np

from dflash_jax.diagnosis.evidence import causes, rows_around
from dflash_jax.diagnosis.facts import Facts, usual
from dflash_jax.diagnosis.findings import LOSS_JUMP, SPIKES, Diagnosis, Explanation, Finding, number, some
from dflash_jax.diagnosis.gaps import gap_rows
from dflash_jax.diagnosis.levels import rolling_median, scatter

SMALLEST = 1e-30  # loss that can be told from zero
RATIO = 2.5  # to the step before, and to the usual loss of the bucket
BACK = 1.5  # a loss within that many times the usual one has recovered
NEIGHBOURS = 31  # steps of a bucket whose median is the local level
FAR, HIGHER = 6.0, 1.3  # a spike is that many standard deviations above, and that many times the level
LONGEST_SPIKE = 5  # steps of a bucket; what lasts longer is another level
RATE, FEWEST_SPIKES = 0.01, 5


def read_jumps(facts: Facts) -> Diagnosis:
    """Losses over RATIO times the one before and the usual one of their bucket."""
    loss = facts.log.column("loss")
    if not np.isfinite(loss).any():
        return Diagnosis(unknown=["loss jumps, spikes and modes: no loss in the log"])
    level = _levels(facts, loss)
    ratio = np.full(len(loss), np.nan)
    ratio[1:] = loss[1:] / np.where(loss[:-1] > SMALLEST, loss[:-1], np.nan)
    up = facts.settled & (ratio > RATIO)
    findings = [_jump(facts, int(row), loss, ratio, level) for row in np.flatnonzero(up & (loss > RATIO * level))]
    between = int((up & ~(loss > RATIO * level)).sum())
    notes = [f"{between} steps over {RATIO} x the loss before are usual for their bucket"] if between else []
    return Diagnosis(findings, notes)


def read_spikes(facts: Facts) -> Diagnosis:
    """The share of steps whose loss is far above the local median of its bucket, if it is RATE or more."""
    high = np.zeros(len(facts.log), bool)
    for kind in np.unique(facts.kinds):
        mine = np.flatnonzero((facts.kinds == kind) & np.isfinite(facts.own_away))
        if len(mine) < NEIGHBOURS:
            continue
        above = facts.own_away[mine] - rolling_median(facts.own_away[mine], NEIGHBOURS)
        far = above > np.maximum(FAR * scatter(above), np.log(HIGHER))
        high[mine] = far & ~_lasting(far)
    total, count = int(np.isfinite(facts.own_away).sum()), int(high.sum())
    apart = int((np.diff(np.flatnonzero(high), prepend=-2) > 1).sum())  # steps in a row are one event
    if apart < FEWEST_SPIKES or count < RATE * total:
        return Diagnosis()
    steps, loss = facts.log.steps[high], facts.log.column("loss")
    rows = np.flatnonzero(high)
    highest = rows[np.argsort(-facts.own_away[rows], kind="stable")[:3]]
    finding = Finding(
        SPIKES,
        int(steps[0]),
        int(steps[-1]),
        f"{count} of {total} steps ({count / total:.1%}) have a loss far above the median around them",
        [f"steps {some(steps)}", *(rows_around(facts, row, before=0, after=0)[0] for row in sorted(highest))],
        [_by_bucket(facts, high), _by_gradient(facts, high)],
    )
    return Diagnosis(
        [finding], [f"usual loss of the last steps {number(float(np.nanmedian(loss[-NEIGHBOURS:])))}"]
    )


def _levels(facts: Facts, loss: np.ndarray) -> np.ndarray:
    """[N] usual loss by bucket; where a bucket has no earlier steps, the highest of any bucket at that time."""
    level = usual(facts, loss)
    highest = np.full(len(loss), -np.inf)
    for kind in np.unique(facts.kinds):
        mine = facts.kinds == kind
        highest = np.fmax(highest, _carried(np.where(mine, level, np.nan)))
    return np.where(np.isfinite(level), level, np.where(np.isfinite(highest), highest, np.inf))


def _carried(values: np.ndarray) -> np.ndarray:
    """values [N] with each NaN replaced by the value before it."""
    rows = np.maximum.accumulate(np.where(np.isfinite(values), np.arange(len(values)), 0))
    return values[rows]


def _jump(facts: Facts, row: int, loss: np.ndarray, ratio: np.ndarray, level: np.ndarray) -> Finding:
    steps = facts.log.steps
    later = np.flatnonzero(loss[row:] < BACK * level[row])
    back = int(row + later[0]) if len(later) else None
    recovery = f"usual again at step {steps[back]}" if back is not None else "not usual again by the last step"
    evidence = [*rows_around(facts, row, before=2, after=2), f"usual loss here {number(level[row])}; {recovery}"]
    gaps = [gap for gap in gap_rows(facts) if row - 2 <= gap <= row]
    evidence += [
        f"steps {steps[gap - 1] + 1} to {steps[gap] - 1}, just before, are absent from the log" for gap in gaps
    ]
    brief = back is not None and back - row <= 2
    one_batch = Explanation(
        "one odd batch", "supported" if brief else "refuted", recovery if brief else f"it lasts: {recovery}"
    )
    return Finding(
        LOSS_JUMP,
        int(steps[row - 1]),
        int(steps[back - 1] if back is not None else steps[-1]),
        f"loss {number(loss[row - 1])} at step {steps[row - 1]} -> {number(loss[row])} at step {steps[row]}, "
        f"{ratio[row]:.1f}x",
        evidence,
        [*causes(facts, row), one_batch],
    )


def _lasting(far: np.ndarray) -> np.ndarray:
    """[N] bool: the members of runs of more than LONGEST_SPIKE."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], far.astype(int), [0]])))
    lasting = np.zeros(len(far), bool)
    for start, end in bounds.reshape(-1, 2):
        lasting[start:end] = end - start > LONGEST_SPIKE
    return lasting


def _by_bucket(facts: Facts, high: np.ndarray) -> Explanation:
    if facts.grouped_by is None:
        return Explanation("one bucket", "undecidable", "neither bucket nor seq_len in the log")
    values = facts.log.column(facts.grouped_by)
    among, all_steps = (
        [(values[rows] == value).mean() for value in np.unique(values[high])] for rows in (high, facts.settled)
    )
    most = int(np.argmax(among))
    name = f"{facts.grouped_by} {number(float(np.unique(values[high])[most]))}"
    text = f"{name} has {among[most]:.0%} of them and {all_steps[most]:.0%} of all steps"
    return Explanation(
        "one bucket", "supported" if among[most] > max(0.6, 1.5 * all_steps[most]) else "refuted", text
    )


def _by_gradient(facts: Facts, high: np.ndarray) -> Explanation:
    norm = facts.log.column("grad_norm")
    if not (np.isfinite(norm[high]).any() and np.isfinite(norm[facts.settled]).any()):
        return Explanation("gradient", "undecidable", "no grad_norm in the log")
    there, level = float(np.nanmedian(norm[high])), float(np.nanmedian(norm[facts.settled]))
    text = f"median norm {number(there)} at them, {number(level)} elsewhere"
    return Explanation("gradient", "supported" if there > 2.0 * level else "refuted", text)
