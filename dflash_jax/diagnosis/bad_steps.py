"""Values that are no finite numbers, and steps that the trainer skipped."""

from collections.abc import Sequence

import numpy as np

from dflash_jax.diagnosis.evidence import row_text
from dflash_jax.diagnosis.facts import Facts
from dflash_jax.diagnosis.findings import NOT_FINITE, SKIPPED, Diagnosis, Explanation, Finding, number, some

GROWN = 5.0  # a gradient norm or loss that many times the usual one announces what follows
BEFORE = 20  # steps before, whose median is usual
SHOWN = 5


def read_not_finite(facts: Facts) -> Diagnosis:
    """Every stretch of steps with a value that is NaN or infinite."""
    log = facts.log
    broken = np.zeros(len(log), bool)
    for rows in log.not_finite.values():
        broken |= rows
    findings = []
    for rows in _stretches(broken):
        names = {name: log.steps[rows][mask[rows]] for name, mask in log.not_finite.items() if mask[rows].any()}
        steps = log.steps[rows]
        where = f"step {steps[0]}" if len(rows) == 1 else f"steps {steps[0]} to {steps[-1]}"
        findings.append(
            Finding(
                NOT_FINITE,
                int(steps[0]),
                int(steps[-1]),
                f"{', '.join(names)} not finite at {where} ({len(rows)} logged)",
                [
                    *(f"{name}: steps {some(found)}" for name, found in names.items()),
                    *(
                        row_text(facts, row)
                        for row in range(max(rows[0] - 1, 0), min(rows[-1] + 2, rows[0] + 3, len(log)))
                    ),
                ],
                [_announced(facts, int(rows[0])), _left_out(facts, rows), _recovered(facts, int(rows[-1]))],
            )
        )
    return Diagnosis(findings)


def read_skipped(facts: Facts) -> Diagnosis:
    """All steps with skipped = 1, as one finding."""
    skipped = facts.log.column("skipped")
    if not np.isfinite(skipped).any():
        return Diagnosis(unknown=["skipped steps: no skipped in the log"])
    rows = np.flatnonzero(skipped > 0)
    if not len(rows):
        return Diagnosis()
    steps = facts.log.steps[rows]
    digests = [facts.log.texts["records"][int(row)] for row in rows] if "records" in facts.log.texts else []
    evidence = [row_text(facts, int(row)) for row in rows[:SHOWN]]
    if facts.grouped_by:
        values, counts = np.unique(facts.log.column(facts.grouped_by)[rows], return_counts=True)
        shares = (f"{number(value)}: {count}" for value, count in zip(values, counts, strict=True))
        evidence.append(f"by {facts.grouped_by}: {some(shares)}")
    apart = np.diff(rows)
    in_a_row = max((len(stretch) for stretch in _stretches(skipped > 0)), default=0)
    finding = Finding(
        SKIPPED,
        int(steps[0]),
        int(steps[-1]),
        f"{len(rows)} of {len(skipped)} steps were skipped: {some(steps)}; at most {in_a_row} in a row",
        evidence,
        [_not_finite_there(facts, rows), _gradient_there(facts, rows), _same_records(digests, apart)],
    )
    return Diagnosis([finding])


def _stretches(marked: np.ndarray) -> list[np.ndarray]:
    rows = np.flatnonzero(marked)
    return np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if len(rows) else []


def _announced(facts: Facts, row: int) -> Explanation:
    """Whether the gradient grew before the first value that is not finite."""
    norm = facts.log.column("grad_norm")
    recent = norm[max(row - BEFORE, 0) : max(row - 1, 0)]
    near = norm[max(row - 2, 0) : row]
    if not np.isfinite(near).any() or not np.isfinite(recent).any():
        return Explanation("growing gradient", "undecidable", "no grad_norm of steps before")
    level, peak = float(np.nanmedian(recent)), float(np.nanmax(near))
    text = f"norm {number(peak)} just before, {number(level)} usual"
    return Explanation("growing gradient", "supported" if peak > GROWN * level else "refuted", text)


def _left_out(facts: Facts, rows: np.ndarray) -> Explanation:
    """Whether the updates of these steps were skipped, so that the parameters are as before."""
    skipped = facts.log.column("skipped")[rows]
    if not np.isfinite(skipped).any():
        return Explanation("update left out", "undecidable", "no skipped in the log")
    all_skipped = bool((skipped > 0).all())
    text = "skipped is 1 in all of them" if all_skipped else "skipped is 0: the update was applied"
    return Explanation("update left out", "supported" if all_skipped else "refuted", text)


def _recovered(facts: Facts, row: int) -> Explanation:
    """Whether it was the batch and not the parameters: the steps after are finite."""
    if row + 1 >= len(facts.log):
        return Explanation("bad batch", "undecidable", "the log ends there")
    near = np.arange(row + 1, min(row + 1 + BEFORE, len(facts.log)))
    clean = not any(mask[near].any() for mask in facts.log.not_finite.values())
    loss = facts.log.column("loss")[row + 1]
    text = f"finite again: loss {number(loss)} at step {facts.log.steps[row + 1]}"
    return Explanation(
        "bad batch", "supported" if clean else "refuted", text if clean else "it happens again soon"
    )


def _not_finite_there(facts: Facts, rows: np.ndarray) -> Explanation:
    count = sum(any(mask[row] for mask in facts.log.not_finite.values()) for row in rows)
    verdict = "supported" if count else "refuted"
    return Explanation("NaN", verdict, f"{count} of them have a value that is not finite")


def _gradient_there(facts: Facts, rows: np.ndarray) -> Explanation:
    norm, skipped = facts.log.column("grad_norm"), facts.log.column("skipped") > 0
    if not np.isfinite(norm[rows]).any() or not np.isfinite(norm[~skipped]).any():
        return Explanation("gradient", "undecidable", "no finite grad_norm at them")
    highest, level = float(np.nanmax(norm[rows])), float(np.nanmedian(norm[~skipped]))
    text = f"norm up to {number(highest)}, {number(level)} usual"
    return Explanation("gradient", "supported" if highest > GROWN * level else "refuted", text)


def _same_records(digests: Sequence[str], apart: np.ndarray) -> Explanation:
    if not any(digests) or len(digests) < 2:
        return Explanation("same records", "undecidable", "one step only, or no records in the log")
    repeated = len(digests) - len(set(digests))
    text = f"{repeated} of {len(digests)} have records skipped before" + (
        f"; {int((apart == 1).sum())} follow each other" if repeated == 0 else ""
    )
    return Explanation("same records", "supported" if repeated else "refuted", text)
