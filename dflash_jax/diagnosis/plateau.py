"""A loss and an accept length that stand still while the learning rate is still high."""

import dataclasses

import numpy as np

from dflash_jax.diagnosis.facts import Facts
from dflash_jax.diagnosis.findings import PLATEAU, Diagnosis, Explanation, Finding, number

HIGH = 0.2  # share of the peak learning rate
WITHOUT_RATE = 0.65  # share of the steps that are looked at if the log has no learning rate
WINDOWS = (0.6, 0.5, 0.4)  # last shares of the steps with a high rate, at which no progress may be seen
FEWEST = 90  # steps in a window
SEEN, RULED_OUT = 3.0, 2.0  # standard errors that make a gain sure, and that a greater one must be away
LIMITS = {"loss": (0.005, 0.05), "streak": (0.01, 0.09)}  # relative: no progress; what must be ruled out
AS_GOOD_AS_DONE = 0.9  # accuracy with nothing left to gain


@dataclasses.dataclass(frozen=True)
class Progress:
    """Relative improvement of a value over a window, and its error. first, last: its means in the outer thirds."""

    gain: float
    error: float
    first: float
    last: float

    def none(self, limits: tuple[float, float]) -> bool:
        """Whether there surely is next to none."""
        unseen = self.gain < limits[0] or self.gain < SEEN * self.error
        return unseen and self.gain + RULED_OUT * self.error < limits[1]


def read_plateau(facts: Facts) -> Diagnosis:
    """The longest of the WINDOWS over which neither loss nor accept length got better."""
    log, rows = facts.log, _with_high_rate(facts)
    if WINDOWS[0] * len(rows) < FEWEST:
        few = f"plateau: {len(rows)} steps after warm-up with a high learning rate"
        return Diagnosis(unknown=[f"{few}, {FEWEST / WINDOWS[0]:.0f} needed"])
    streak = log.column("streak", "accept_len")
    if log.has("accept_len") and not log.has("streak"):
        streak = streak - 1.0
    if not np.isfinite(streak[rows]).any():
        streak = log.column("acc")
    for share in WINDOWS:
        window = rows[len(rows) - round(share * len(rows)) :]
        found = {
            "loss": _progress(facts, log.column("loss"), window, better=-1.0),
            "streak": _progress(facts, streak, window, better=1.0),
        }
        known = {name: progress for name, progress in found.items() if progress is not None}
        if "loss" not in known or len(window) < FEWEST:
            continue
        if all(progress.none(LIMITS[name]) for name, progress in known.items()) and not _done(facts, window):
            return Diagnosis([_finding(facts, window, known)])
    return Diagnosis()


def _with_high_rate(facts: Facts) -> np.ndarray:
    """Rows after warm-up and before the learning rate's decay."""
    rows = np.flatnonzero(facts.settled)
    rate = facts.log.column("lr")[rows]
    if not np.isfinite(rate).any():
        return rows[: round(WITHOUT_RATE * len(facts.log)) - (len(facts.log) - len(rows))]
    return rows[rate >= HIGH * np.nanmax(rate)]


def _progress(facts: Facts, values: np.ndarray, window: np.ndarray, *, better: float) -> Progress | None:
    """From the first third of a window to its last. better: 1 if a gain is a rise of the values, -1 if a fall."""
    rows = window[np.isfinite(values[window])]
    if len(rows) < FEWEST:
        return None
    even = values[rows].copy()
    for group in np.unique(facts.groups[rows]):
        mine = facts.groups[rows] == group
        even[mine] -= np.median(even[mine]) - np.median(values[rows])
    low, high = np.quantile(even, [0.01, 0.99])
    first, _, last = np.array_split(np.clip(even, low, high), 3)
    level = abs(float(first.mean()))
    if level < 1e-9:
        return None
    error = float(np.sqrt(first.var() / len(first) + last.var() / len(last))) / level
    gain = better * float(last.mean() - first.mean()) / level
    return Progress(gain, error, float(first.mean()), float(last.mean()))


def _done(facts: Facts, window: np.ndarray) -> bool:
    accuracy = facts.log.column("acc")[window]
    return bool(np.isfinite(accuracy).any() and np.nanmedian(accuracy) > AS_GOOD_AS_DONE)


def _finding(facts: Facts, window: np.ndarray, found: dict[str, Progress]) -> Finding:
    log, steps = facts.log, facts.log.steps[window]
    rate = log.column("lr")
    levels = [
        f"{name} {number(float(np.nanmedian(log.column(name)[window])))}"
        for name in ("loss", "acc", "streak", "accept_len")
        if np.isfinite(log.column(name)[window]).any()
    ]
    evidence = [
        f"{name}: {number(progress.first)} in the first third, {number(progress.last)} in the last; "
        f"{progress.gain:+.2%} +- {progress.error:.2%} better"
        for name, progress in found.items()
    ]
    if np.isfinite(rate[window]).any():
        low, peak = float(np.nanmin(rate[window])), float(np.nanmax(rate))
        decay = Explanation(
            "end of the schedule", "refuted", f"lr is {number(low)} or more, {low / peak:.0%} of its peak"
        )
    else:
        decay = Explanation("end of the schedule", "undecidable", "no lr in the log")
    skipped = np.nan_to_num(log.column("skipped")[window])
    return Finding(
        PLATEAU,
        int(steps[0]),
        int(steps[-1]),
        f"no progress in steps {steps[0]} to {steps[-1]}: {', '.join(levels)}",
        evidence,
        [
            decay,
            Explanation(
                "skipped steps",
                "supported" if skipped.mean() > 0.2 else "refuted",
                f"{skipped.mean():.0%} of these steps were skipped",
            ),
            _updates(facts, window),
        ],
    )


def _updates(facts: Facts, window: np.ndarray) -> Explanation:
    ratio = facts.log.column("update_ratio")[window]
    if not np.isfinite(ratio).any():
        return Explanation("no updates", "undecidable", "no update_ratio in the log")
    median = float(np.nanmedian(ratio))
    return Explanation(
        "no updates", "supported" if median < 1e-7 else "refuted", f"median update ratio {number(median)}"
    )
