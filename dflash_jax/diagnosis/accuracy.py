"""Falls of accuracy below what is usual in a bucket, sudden or over several steps, and how long they last."""

import numpy as np

from dflash_jax.diagnosis.evidence import causes, row_text
from dflash_jax.diagnosis.facts import Facts
from dflash_jax.diagnosis.findings import ACCURACY_FALL, Diagnosis, Explanation, Finding, number
from dflash_jax.diagnosis.levels import past_means, past_median, rolling_median, step_scatter

FALL = 0.05  # absolute
FAR = 7.0  # standard deviations of the noise of the mean
WIDTHS = (1, 2, 4, 8, 16, 32)  # steps over which a fall is averaged
PAST = 40  # steps before, whose median is the usual accuracy
FEWEST = 10
AROUND = 200  # steps whose scatter is the noise


def read_accuracy(facts: Facts) -> Diagnosis:
    """Falls of more than FALL, each with the lines around its start, its depth and its recovery."""
    accuracy = facts.log.column("acc")
    if not np.isfinite(accuracy).any():
        return Diagnosis(unknown=["accuracy falls: no acc in the log"])
    rows = np.flatnonzero(np.isfinite(accuracy))
    even, trust = _without_buckets(facts, accuracy, rows), _trust(facts, rows)
    noise = _noise(even)
    findings, row = [], 0
    fallen = _fallen(even, trust, noise, facts.settled[rows])
    while row < len(rows):
        if fallen[row] == 0:
            row += 1
            continue
        start, end, level = _extent(even, noise, at=row, width=int(fallen[row]))
        findings.append(_finding(facts, accuracy, rows, start, end, level))
        row = max(end, row + 1)
        while row < len(rows) and fallen[row]:  # echoes of the same fall in wider windows
            row += 1
    return Diagnosis(findings)


def _without_buckets(facts: Facts, accuracy: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Accuracies of the rows, less what their bucket usually has over all, where that is known."""
    even = accuracy[rows].copy()
    smooth = rolling_median(even, 2 * PAST + 1)
    for group in np.unique(facts.groups[rows]):
        mine = facts.groups[rows] == group
        if mine.sum() >= FEWEST:
            even[mine] -= np.median((accuracy[rows] - smooth)[mine])
    return even


def _trust(facts: Facts, rows: np.ndarray) -> np.ndarray:
    """How many times the usual noise a row may have: more where it has fewer blocks."""
    blocks = facts.log.column("blocks", "rows")[rows]
    if not np.isfinite(blocks).any():
        return np.ones(len(rows))
    share = np.nan_to_num(blocks, nan=1.0) / max(float(np.nanmedian(blocks)), 1e-9)
    return 1.0 / np.sqrt(np.clip(share, 0.02, 1.0))


def _noise(even: np.ndarray) -> np.ndarray:
    """[N] standard deviation of single steps, from blocks of AROUND steps."""
    blocks = [even[start : start + AROUND] for start in range(0, len(even), AROUND // 2)]
    by_block = [max(step_scatter(block), 1e-6) for block in blocks if len(block) > FEWEST]
    if not by_block:
        return np.full(len(even), np.inf)
    centres = [min(start + AROUND / 2, len(even)) for start in range(0, len(even), AROUND // 2)][: len(by_block)]
    return np.interp(np.arange(len(even)), centres, by_block)


def _fallen(even: np.ndarray, trust: np.ndarray, noise: np.ndarray, settled: np.ndarray) -> np.ndarray:
    """[N] the width of the narrowest window ending at each row whose mean is a fall; 0 for none."""
    found = np.zeros(len(even), np.int64)
    for width in (width for width in reversed(WIDTHS) if width <= len(even)):
        past = past_median(even, max(PAST, 3 * width))
        mean, doubt = past_means(even, width), past_means(trust**2, width)
        before = np.full(len(even), np.nan)
        before[width - 1 :] = past[: len(even) - width + 1]
        ahead = np.arange(len(even)) - width + 1  # rows before the window
        error = noise * np.sqrt(doubt / width + 1.6 / np.clip(ahead, 1, PAST))
        deep = (before - mean > np.maximum(FALL, FAR * error)) & (ahead >= FEWEST)
        inside = np.full(len(even), False)
        inside[width - 1 :] = settled[: len(even) - width + 1]
        found[deep & inside] = width
    return found


def _extent(even: np.ndarray, noise: np.ndarray, *, at: int, width: int) -> tuple[int, int, float]:
    """(first row below, first row that is usual again, usual accuracy) of a fall in the window ending at `at`."""
    begin = at - width + 1
    level = float(np.median(even[max(begin - max(PAST, 3 * width), 0) : begin]))
    margin = max(0.4 * FALL, 3.0 * noise[at])
    low = even < level - margin
    start = begin + int(np.argmax(low[begin : at + 1]))
    while start > 0 and low[start - 1]:
        start -= 1
    if width == 1:
        usual = ~low[start:]
    else:  # a noisy fall is over where its mean is
        usual = past_means(even, min(width, 8))[start:] > level - max(0.5 * FALL, noise[at])
    over = np.flatnonzero(usual & (np.arange(len(usual)) > at - start))
    return start, start + int(over[0]) if len(over) else len(even), level


def _finding(facts: Facts, accuracy: np.ndarray, rows: np.ndarray, start: int, end: int, level: float) -> Finding:
    steps = facts.log.steps[rows]
    lowest = start + int(np.argmin(accuracy[rows[start:end]]))
    before = max(start - 1, 0)
    recovered = end < len(rows)
    recovery = f"usual again at step {steps[end]}" if recovered else "not usual again by the last step"
    shown = sorted({max(before - 1, 0), before, *range(start, min(lowest, start + 3) + 1), lowest})
    shown += [row for row in range(end, min(end + 2, len(rows)))] if end > lowest else []
    lasts = Explanation(
        "one odd batch",
        "supported" if end - start == 1 and recovered else "refuted",
        f"it lasts {_count(end - start)}: {recovery}",
    )
    return Finding(
        ACCURACY_FALL,
        int(steps[before]),
        int(steps[end - 1]),
        f"accuracy {number(float(accuracy[rows[before]]))} at step {steps[before]} -> "
        f"{number(float(accuracy[rows[lowest]]))} at step {steps[lowest]}, "
        f"lasting {_count(end - start)}; {recovery}",
        [*(row_text(facts, int(rows[row])) for row in shown), f"usual accuracy before {number(level)}"],
        [*causes(facts, int(rows[max(start, 1)])), lasts],
    )


def _count(logged: int) -> str:
    return "1 logged step" if logged == 1 else f"{logged} logged steps"
