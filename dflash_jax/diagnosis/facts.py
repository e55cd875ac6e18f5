"""What the readings of a log have in common: usual losses by bucket, where warm-up ends, restarts, saves."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dflash_jax.diagnosis.levels import past_median
from dflash_jax.diagnosis.modes import away_from_trend, borders
from dflash_jax.diagnosis.reading import Log

WARM_UP, LONGEST_WARM_UP, FEWEST_STEPS = 0.04, 0.2, 10
REACH = 7  # earlier steps of a bucket that tell its usual value
MANY = 32  # different lengths above which they are put together
ROUND = (10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 2500, 5000, 10_000)
CHANCE = 0.02  # that steps are multiples of an interval for no reason


@dataclasses.dataclass(frozen=True)
class Facts:
    """settled: [N] bool, after warm-up. grouped_by: "bucket", "seq_len" or None; groups: [N] int64, counting the
    buckets, 0 if none is known. kinds: [N] int64, the bucket and, where losses of one bucket have several modes,
    the mode. away: [N] logarithm of the loss less the trend of all steps, own_away: less the trend of its bucket;
    NaN outside of `settled`. processes: [N] int64, counting restarts. stride: usual distance of logged steps.
    saves: steps at which a checkpoint was saved, as the log says; None if it does not."""

    log: Log
    settled: np.ndarray
    grouped_by: str | None
    groups: np.ndarray
    kinds: np.ndarray
    away: np.ndarray
    own_away: np.ndarray
    processes: np.ndarray
    stride: float
    saves: Sequence[int] | None


def gather(log: Log) -> Facts:
    """The facts of a log."""
    settled = _settled(log)
    grouped_by, groups = _groups(log)
    loss = log.column("loss")
    usable = settled & (loss > 0)
    away, own_away = np.full(len(log), np.nan), np.full(len(log), np.nan)
    logs = np.log(np.where(usable, loss, 1.0))
    if usable.any():
        away[usable] = away_from_trend(log.steps[usable], logs[usable])
    for group in np.unique(groups):
        mine = usable & (groups == group)
        if mine.any():
            own_away[mine] = away_from_trend(log.steps[mine], logs[mine])
    kinds = groups * 8
    common = borders(own_away[usable])
    for group in np.unique(groups) if len(common) else ():
        mine = usable & (groups == group)
        own = borders(own_away[mine])
        kinds[mine] += np.minimum(np.digitize(own_away[mine], own if len(own) else common), 7)
    elapsed = log.column("elapsed_s")
    return Facts(
        log=log,
        settled=settled,
        grouped_by=grouped_by,
        groups=groups,
        kinds=kinds,
        away=away,
        own_away=own_away,
        processes=np.concatenate([[0], np.cumsum(np.diff(elapsed) < 0)]),
        stride=float(np.median(np.diff(log.steps))) if len(log) > 1 else 1.0,
        saves=_saves(log),
    )


def usual(facts: Facts, values: np.ndarray, *, reach: int = REACH) -> np.ndarray:
    """[N] medians of the `reach` values before each, of the same bucket and mode; of the first ones where under
    three are before, and NaN where under three are at all. Only settled rows count; values [N] may be NaN."""
    found = np.full(len(values), np.nan)
    for kind in np.unique(facts.kinds):
        mine = np.flatnonzero((facts.kinds == kind) & facts.settled)
        known = mine[np.isfinite(values[mine])]
        before = past_median(values[known], reach)
        before[:3] = np.median(values[known[:reach]]) if len(known) >= 3 else np.nan
        place = np.searchsorted(known, mine)  # a row without a value sees what the next one with a value sees
        found[mine] = np.concatenate([before, before[-1:] if len(before) else [np.nan]])[place]
    return found


def shared_interval(steps: Sequence[int], *, slack: int) -> int | None:
    """The largest interval of which all steps are multiples, to within `slack`; None if that may be chance."""
    if not steps:
        return None
    found = []
    for interval in {*ROUND, min(steps), *map(int, np.diff(sorted(steps)))}:
        off = max(min(step % interval, -step % interval) for step in steps) if interval > 1 else slack + 1
        chance = ((2 * slack + 1) / max(interval, 1)) ** len(steps)
        known = interval in ROUND or (off == 0 and len(steps) > 1)  # others fit their own few steps
        if off <= slack and chance < CHANCE and min(steps) >= interval - slack and (known or len(steps) > 1):
            found.append((known, interval))
    return max(found)[1] if found else None


def _settled(log: Log) -> np.ndarray:
    count = len(log)
    first = max(round(WARM_UP * count), FEWEST_STEPS)
    rate = log.column("lr")
    if np.isfinite(rate).any():
        risen = int(np.nanargmax(rate >= 0.99 * np.nanmax(rate)))
        first = max(first, min(risen + 1, round(LONGEST_WARM_UP * count)))
    return np.arange(count) >= first


def _groups(log: Log) -> tuple[str | None, np.ndarray]:
    for name in ("bucket", "seq_len"):
        values = log.column(name)
        if not np.isfinite(values).any():
            continue
        known = np.where(np.isfinite(values), values, -1.0)
        if len(np.unique(known)) > MANY:
            return name, np.digitize(known, np.quantile(known, np.linspace(0, 1, 9)[1:-1]))
        return name, np.unique(known, return_inverse=True)[1]
    return None, np.zeros(len(log), np.int64)


def _saves(log: Log) -> list[int] | None:
    """From `checkpoint`, the last step that is whole on disk, and `saving`, which is 1 from the step after."""
    if not log.has("checkpoint", "saving"):
        return None
    whole = log.column("checkpoint")
    found = {int(step) for step in whole[np.isfinite(whole)] if step > 0}
    saving = log.column("saving") > 0
    begun = np.flatnonzero(saving[1:] & ~saving[:-1])
    found |= {int(log.steps[row]) for row in begun if int(log.steps[row]) not in found}
    return sorted(found)
