"""Lines of a log as evidence, and what the log says of the usual causes of a sudden change."""

from collections.abc import Sequence

import numpy as np

from dflash_jax.diagnosis.facts import Facts, shared_interval, usual
from dflash_jax.diagnosis.findings import Explanation, Verdict, number, some
from dflash_jax.diagnosis.gaps import gap_rows

SHOWN = ("loss", "acc", "accept_len", "streak", "bucket", "seq_len", "lr", "grad_norm", "skipped")
WINDOW = 5  # rows before and after a change in which its cause is looked for
STEEP = 1.5  # a learning rate that many times higher is a change
LARGE = 5.0  # a gradient norm that many times the usual one is an outlier


def row_text(facts: Facts, row: int, *, names: Sequence[str] = SHOWN) -> str:
    """ "step 2029  loss 13.0  bucket 2 ..." of a row, with the keys that it has."""
    log = facts.log
    found = [f"step {log.steps[row]}"]
    for name in names:
        if name in log.columns and (np.isfinite(log.columns[name][row]) or _broken(facts, name, row)):
            found.append(f"{name} {number(log.columns[name][row])}")
    if "records" in log.texts and log.texts["records"][row]:
        found.append(f"records {log.texts['records'][row]}")
    return "  ".join(found)


def rows_around(facts: Facts, row: int, *, before: int = 1, after: int = 1) -> list[str]:
    """The texts of a row and its neighbours."""
    return [row_text(facts, near) for near in range(max(row - before, 0), min(row + after + 1, len(facts.log)))]


def causes(facts: Facts, row: int) -> list[Explanation]:
    """The usual explanations of a change between row - 1 and row >= 1, each with a verdict."""
    return [
        _reset(facts, row),
        _not_finite(facts, row),
        _checkpoint(facts, row),
        _bucket(facts, row),
        _learning_rate(facts, row),
        _gradient(facts, row),
    ]


def save_steps(facts: Facts) -> tuple[list[int], str]:
    """Steps at which a checkpoint was saved, and how that is known: "" if it is not."""
    if facts.saves is not None:
        return list(facts.saves), "logged"
    rows = gap_rows(facts)
    interval = shared_interval([int(facts.log.steps[row - 1]) for row in rows], slack=max(1, int(facts.stride)))
    if interval is None:
        return [], ""
    last = int(facts.log.steps[-1])
    return list(range(interval, last + 1, interval)), f"inferred: the gaps in the log begin every {interval} steps"


def _broken(facts: Facts, name: str, row: int) -> bool:
    return name in facts.log.not_finite and bool(facts.log.not_finite[name][row])


def _reset(facts: Facts, row: int) -> Explanation:
    cause, going_on, back = "metrics reset", [], []
    tokens = facts.log.column("tokens")
    counters = ["elapsed_s", "epoch", *(["tokens"] if cumulative(tokens) else [])]
    for name in counters:
        before, now = facts.log.column(name)[[row - 1, row]]
        if np.isfinite(before) and np.isfinite(now):
            (going_on if now >= before else back).append(f"{name} {number(before)} -> {number(now)}")
    if back:
        return Explanation(cause, "supported", f"counters begin anew: {', '.join(back)}")
    if going_on:
        return Explanation(cause, "refuted", f"counters go on: {', '.join(going_on)}")
    return Explanation(cause, "undecidable", "no elapsed_s, epoch or running total of tokens in the log")


def cumulative(tokens: np.ndarray) -> bool:
    """Whether a column of tokens [N] is a running total rather than the tokens of each step."""
    known = tokens[np.isfinite(tokens)]
    return len(known) > 5 and bool((np.diff(known) > 0).mean() > 0.98)


def _not_finite(facts: Facts, row: int) -> Explanation:
    near = slice(max(row - WINDOW, 0), row + WINDOW + 1)
    steps = facts.log.steps[near]
    found = [
        f"{name} at {some(steps[broken[near]])}"
        for name, broken in facts.log.not_finite.items()
        if broken[near].any()
    ]
    if found:
        return Explanation("NaN", "supported", f"not finite: {', '.join(found)}")
    return Explanation("NaN", "refuted", f"every value is finite in steps {steps[0]} to {steps[-1]}")


def _checkpoint(facts: Facts, row: int) -> Explanation:
    saves, known = save_steps(facts)
    if not known:
        return Explanation("checkpoint", "undecidable", "the log does not say when it saved")
    before, step = int(facts.log.steps[row - 1]), int(facts.log.steps[row])
    nearest = min(saves, key=lambda save: abs(save - step), default=None)
    if nearest is None:
        return Explanation("checkpoint", "refuted", "nothing was saved")
    away = f"nearest save {abs(step - nearest)} steps away, at {nearest} ({known})"
    if before <= nearest <= step:
        return Explanation("checkpoint", "supported", f"{away}; no step was logged between the two")
    between = f"; step {before} between them was still as usual" if nearest < before else "; it came later"
    return Explanation("checkpoint", "refuted", away + between)


def _bucket(facts: Facts, row: int) -> Explanation:
    cause = "bucket change"
    if facts.grouped_by is None:
        return Explanation(cause, "undecidable", "neither bucket nor seq_len in the log")
    values = facts.log.column(facts.grouped_by)
    before, now = values[row - 1], values[row]
    level = usual(facts, facts.log.column("loss"))[row]
    if before == now:
        return Explanation(cause, "refuted", f"both steps are of {facts.grouped_by} {number(now)}")
    if not np.isfinite(level):
        return Explanation(cause, "undecidable", f"{facts.grouped_by} {number(now)} has too few other steps")
    why = f"step before is {facts.grouped_by} {number(before)}, this is {number(now)}, whose usual loss is"
    return Explanation(cause, "refuted", f"{why} {number(level)}")


def _learning_rate(facts: Facts, row: int) -> Explanation:
    rate = facts.log.column("lr")
    recent = rate[max(row - WINDOW, 0) : row]
    if not np.isfinite(rate[row]) or not np.isfinite(recent).any():
        return Explanation("learning rate", "undecidable", "no lr in the log")
    before = float(np.nanmin(recent))
    verdict: Verdict = "supported" if rate[row] > STEEP * before else "refuted"
    return Explanation("learning rate", verdict, f"{number(before)} -> {number(rate[row])}")


def _gradient(facts: Facts, row: int) -> Explanation:
    norm = facts.log.column("grad_norm")
    recent = norm[max(row - 20, 0) : row]
    near = norm[max(row - 1, 0) : row + 1]
    if not np.isfinite(near).any() or not np.isfinite(recent).any():
        return Explanation("gradient", "undecidable", "no grad_norm in the log")
    level, peak = float(np.nanmedian(recent)), float(np.nanmax(near))
    verdict: Verdict = "supported" if peak > LARGE * level else "refuted"
    return Explanation("gradient", verdict, f"norm {number(peak)} where {number(level)} was usual")
