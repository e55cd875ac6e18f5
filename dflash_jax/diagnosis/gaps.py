"""Steps that are absent from a log, and time that passed without any: where, how much, and why."""

import math

import numpy as np

from dflash_jax.diagnosis.facts import CHANCE, ROUND, Facts, shared_interval
from dflash_jax.diagnosis.findings import STEP_GAP, TIME_GAP, Diagnosis, Explanation, Finding, number, some

WIDE = 3.0  # where lines come every few steps, a distance that many times the usual one is a gap
LONG, LEAST_S = 20.0, 5.0  # a pause is that many times a usual step's time, and that many seconds, at least
FIRST_STEPS = 3  # of a bucket or of a process, which compile
STEADY = 0.95  # share of the distances between lines that are usual


def gap_rows(facts: Facts) -> list[int]:
    """The rows before which steps are absent."""
    apart = np.diff(facts.log.steps)
    if not len(apart):
        return []
    usual = float(np.quantile(apart, STEADY))
    widest = 1.0 if facts.stride == 1.0 and usual <= 1.0 else max(WIDE * usual, usual + 1)
    return [int(row) + 1 for row in np.flatnonzero(apart > widest)]


def seconds(facts: Facts) -> np.ndarray:
    """[N] seconds from the line before to each line: of the process's clock, or else the step's own time."""
    passed = np.full(len(facts.log), np.nan)
    elapsed = facts.log.column("elapsed_s")
    passed[1:] = np.where(np.diff(facts.processes) == 0, np.diff(elapsed), np.nan)
    return np.where(np.isfinite(passed), passed, facts.log.column("step_s"))


def read_step_gaps(facts: Facts) -> Diagnosis:
    """Every gap in the steps."""
    steps, passed, findings = facts.log.steps, seconds(facts), []
    rows = gap_rows(facts)
    each = passed[1:] / np.diff(steps)
    typical = float(np.nanmedian(each)) if np.isfinite(each).any() else math.nan
    for row in rows:
        before, after = int(steps[row - 1]), int(steps[row])
        absent = after - before - 1
        usual = "every step has a line" if facts.stride == 1.0 else f"a line comes every {facts.stride:g} steps"
        evidence = [f"no line between steps {before} and {after}; elsewhere {usual}"]
        if np.isfinite(passed[row]):
            excess = passed[row] - (after - before) * typical
            more = f"{number(excess)} s more than" if excess > LEAST_S else "no more than"
            evidence.append(f"{number(passed[row])} s between the two lines, {more} so many steps usually take")
        findings.append(
            Finding(
                STEP_GAP,
                before,
                after,
                f"{absent} steps are absent, {before + 1} to {after - 1}",
                evidence,
                [_saved(facts, [int(steps[r - 1]) for r in rows], before, after), _restart(facts, row)],
            )
        )
    notes = [f"{facts.log.repeated} steps have more than one line; the last counts"] if facts.log.repeated else []
    if facts.log.unread:
        notes.append(f"{facts.log.unread} lines are not JSON objects with a step")
    return Diagnosis(findings, notes)


def read_time_gaps(facts: Facts) -> Diagnosis:
    """Pauses that neither compilation nor an evaluation explains; where no evaluations are known, those at saves
    or at a regular interval may be some."""
    log, passed = facts.log, seconds(facts)
    if not np.isfinite(passed).any():
        return Diagnosis(unknown=["time gaps: no elapsed_s or step_s in the log"])
    each = passed / np.concatenate([[1], np.diff(log.steps)])
    typical = np.full(len(log), np.nan)
    for group in np.unique(facts.groups):
        mine = facts.groups == group
        if np.isfinite(each[mine]).any():
            typical[mine] = np.nanmedian(each[mine])
    typical = np.maximum(np.fmax(typical, np.nanquantile(each, 0.75)), 1e-3)
    long = (each > LONG * typical) & (passed > LEAST_S) & ~_compiles(facts)
    rows = [int(row) for row in np.flatnonzero(long)]
    at = {row: int(log.steps[row - 1]) for row in rows if row}
    # Where evaluations are known, nothing else may pause: saves run beside the steps.
    expected = log.evaluations or set(facts.saves or ()) | _regular([*at.values()])
    regular = {row for row in at if at[row] in expected}
    findings = []
    for row in (row for row in rows if row not in regular):
        before = at.get(row, int(log.steps[row]))
        explanations = [_saved(facts, list(at.values()), before, before + 1), _restart(facts, row)]
        if log.has("data_wait_s", "feature_wait_s"):
            explanations.append(_waiting(facts, row, passed[row]))
        evidence = [
            f"{number(passed[row])} s before step {log.steps[row]}; usual: {number(typical[row])} s a step"
        ]
        findings.append(
            Finding(
                TIME_GAP,
                before,
                int(log.steps[row]),
                f"{number(passed[row])} s passed before step {log.steps[row]}, "
                f"{each[row] / typical[row]:.0f} x the usual",
                evidence,
                explanations,
            )
        )
    notes = []
    if regular:
        total, whole = passed[sorted(regular)].sum(), np.nansum(passed)
        notes.append(
            f"pauses after steps {some(at[row] for row in sorted(regular))}, evaluations or a regular interval: "
            f"{number(total)} s, {total / whole:.1%} of the time"
        )
    return Diagnosis(findings, notes)


def _regular(steps: list[int]) -> set[int]:
    """Those of the steps that are multiples of an interval, most of which are among them."""
    best: set[int] = set()
    for interval in {*ROUND, *(apart for apart in (*steps, *np.diff(steps)) if apart > ROUND[0])}:
        found = {step for step in steps if step % interval == 0}
        expected = (max(found) - min(found)) / interval + 1 if found else 0
        by_chance = len(steps) / interval ** len(found)
        if 2 * len(found) >= expected and by_chance < CHANCE and len(found) > len(best):
            best = found if len(found) > 1 or interval in ROUND else best
    return best


def _compiles(facts: Facts) -> np.ndarray:
    """[N] bool: the first steps of each process, and of each bucket in it."""
    first = np.zeros(len(facts.log), bool)
    for process in np.unique(facts.processes):
        mine = np.flatnonzero(facts.processes == process)
        first[mine[:FIRST_STEPS]] = True
        for group in np.unique(facts.groups[mine]):
            first[mine[facts.groups[mine] == group][:FIRST_STEPS]] = True
    return first


def _saved(facts: Facts, starts: list[int], before: int, after: int) -> Explanation:
    """Whether steps stop at a save. starts: the steps after which they stop, which may show an interval."""
    slack = max(1, int(facts.stride))
    if facts.saves is not None:
        nearest = min(facts.saves, key=lambda save: abs(save - before), default=None)
        if nearest is None:
            return Explanation("checkpoint", "refuted", "nothing was saved")
        away = f"nearest save {abs(nearest - before)} steps from {before}, at {nearest}"
        hit = before - slack <= nearest <= after
        return Explanation("checkpoint", "supported" if hit else "refuted", away)
    interval = shared_interval(starts, slack=slack)
    if interval is None:
        return Explanation(
            "checkpoint", "undecidable", "the log does not say when it saved, and no interval shows"
        )
    nearest = round(before / interval) * interval
    why = f"all begin at multiples of {interval}, to within {slack}: {before} at {nearest}"
    return Explanation("checkpoint", "supported", why)


def _restart(facts: Facts, row: int) -> Explanation:
    if not facts.log.has("elapsed_s"):
        return Explanation("restart", "undecidable", "no elapsed_s in the log")
    if row and facts.processes[row] != facts.processes[row - 1]:
        return Explanation("restart", "supported", "elapsed_s begins anew")
    return Explanation("restart", "refuted", "elapsed_s goes on")


def _waiting(facts: Facts, row: int, passed: float) -> Explanation:
    found = [(name, facts.log.column(name)[row]) for name in ("data_wait_s", "feature_wait_s")]
    name, waited = max(found, key=lambda item: np.nan_to_num(item[1]))
    verdict = "supported" if waited > 0.5 * passed else "refuted"
    return Explanation("waiting for data", verdict, f"{name} {number(waited)} of {number(passed)} s")
