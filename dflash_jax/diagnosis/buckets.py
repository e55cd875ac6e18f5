"""Losses that gather at several values, whether buckets explain them, and buckets that come in long runs."""

import math

import numpy as np

from dflash_jax.diagnosis.facts import Facts
from dflash_jax.diagnosis.findings import BUCKET_RUNS, MODES, Diagnosis, Explanation, Finding, number, some
from dflash_jax.diagnosis.modes import borders

FEWEST = 60
SPARE, TIMES = 2, 2  # a run may be that many times what shares require, and that many steps longer
EXPLAINED = 0.5  # share of variance


def read_modes(facts: Facts) -> Diagnosis:
    """Whether the loss, its trend taken away, has several modes that are not those of the buckets."""
    known = np.isfinite(facts.away)
    if known.sum() < FEWEST:
        return Diagnosis(unknown=[f"several losses: {known.sum()} steps after warm-up, {FEWEST} needed"])
    overall, own = borders(facts.away[known]), borders(facts.own_away[known])
    share = _explained(facts, known)
    loss = facts.log.column("loss")
    if not len(own):
        if not len(overall):
            return Diagnosis()
        by = facts.grouped_by
        return Diagnosis(
            notes=[
                f"losses at {_bands(loss, facts.away, overall, known)}: {by} explains {share:.0%} of the variance"
            ]
        )
    if facts.grouped_by is None:
        explanation = Explanation("bucket", "undecidable", "neither bucket nor seq_len in the log")
    else:
        text = f"{facts.grouped_by} explains {share:.0%} of the variance; within each, several losses remain"
        explanation = Explanation("bucket", "refuted", text)
    steps = facts.log.steps[known]
    turns = int((np.diff(np.digitize(facts.own_away[known], own)) != 0).sum())
    finding = Finding(
        MODES,
        int(steps[0]),
        int(steps[-1]),
        f"the loss has {len(own) + 1} usual values at a time: {_bands(loss, facts.own_away, own, known)}",
        [f"the loss goes from one to another {turns} times in {len(steps)} steps"],
        [explanation, _sources(facts, known, own)],
    )
    return Diagnosis([finding])


def read_runs(facts: Facts) -> Diagnosis:
    """Buckets that follow themselves for longer than their share of the steps requires."""
    if facts.grouped_by is None:
        return Diagnosis(unknown=["bucket runs: neither bucket nor seq_len in the log"])
    if facts.stride != 1.0:
        return Diagnosis(unknown=["bucket runs: not every step is logged"])
    groups, steps = facts.groups, facts.log.steps
    ends = np.flatnonzero(np.append((groups[1:] != groups[:-1]) | (np.diff(steps) > 1), True))
    lengths = np.diff(ends, prepend=-1)
    values, findings = facts.log.column(facts.grouped_by), []
    for group in np.unique(groups):
        mine = groups[ends] == group
        share = float((groups == group).mean())
        if share == 1.0:
            continue
        count = int((groups == group).sum())
        needed = math.ceil(count / (len(groups) - count + 1))
        allowed = TIMES * needed + SPARE
        long = np.flatnonzero(mine & (lengths > allowed))
        if not len(long):
            continue
        longest = int(long[np.argmax(lengths[long])])
        last = int(ends[longest])
        first = last - int(lengths[longest]) + 1
        name = f"{facts.grouped_by} {number(float(values[last]))}"
        # Drawn at random, the longest of so many runs is about this long.
        by_chance = math.log(max(count * (1.0 - share), 2.0)) / -math.log(share)
        random_order = lengths[longest] <= 1.5 * by_chance + 1
        findings.append(
            Finding(
                BUCKET_RUNS,
                int(steps[first]),
                int(steps[last]),
                f"{name} comes {lengths[longest]} steps in a row, where its share needs {needed}",
                [
                    f"{name} has {share:.1%} of the steps; {len(long)} runs of it are longer than {allowed}",
                    f"the longest: steps {steps[first]} to {steps[last]}; all begin at steps "
                    f"{some(int(steps[ends[run] - lengths[run] + 1]) for run in long)}",
                ],
                [
                    Explanation(
                        "random order",
                        "supported" if random_order else "refuted",
                        f"a random order would have a longest run of about {by_chance:.0f}",
                    ),
                    Explanation(
                        "loss resets",
                        "refuted",
                        "bands of loss that come and go with such runs are the bucket's usual losses",
                    ),
                ],
            )
        )
    return Diagnosis(findings)


def _explained(facts: Facts, known: np.ndarray) -> float:
    """Share of the variance of the loss around its trend that lies between the groups."""
    low, high = np.quantile(facts.away[known], [0.01, 0.99])
    values, groups = np.clip(facts.away[known], low, high), facts.groups[known]
    within = sum(values[groups == group].var() * (groups == group).sum() for group in np.unique(groups))
    return 1.0 - float(within / max(values.var() * len(values), 1e-12))


def _bands(loss: np.ndarray, away: np.ndarray, at: np.ndarray, known: np.ndarray) -> str:
    """The median loss of each mode in the last third of the steps, and its share of all: 0.55 (59%), 1.1 (20%)."""
    rows = np.flatnonzero(known)
    modes, late = np.digitize(away[rows], at), rows >= rows[-(len(rows) // 3)]
    bands = []
    for mode in range(len(at) + 1):
        chosen = rows[(modes == mode) & late]
        level = float(np.median(loss[chosen])) if len(chosen) else math.nan
        bands.append(f"{number(level)} ({(modes == mode).mean():.0%})")
    return ", ".join(bands)


def _sources(facts: Facts, known: np.ndarray, at: np.ndarray) -> Explanation:
    """Whether the modes go with the number of blocks in a step."""
    blocks = facts.log.column("blocks", "rows", "tokens")[known]
    if not np.isfinite(blocks).all() or blocks.std() == 0:
        return Explanation("size of the batch", "undecidable", "no blocks, rows or tokens that vary in the log")
    modes = np.digitize(facts.own_away[known], at)
    together = abs(float(np.corrcoef(modes, blocks)[0, 1])) if modes.std() > 0 else 0.0
    verdict = "supported" if together > np.sqrt(EXPLAINED) else "refuted"
    return Explanation("size of the batch", verdict, f"correlation {together:.2f}")
