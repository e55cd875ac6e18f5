"""Two runs at equal numbers of tokens: loss, accuracy and accept length at the same places, and speed."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dflash_jax.diagnosis.evidence import cumulative
from dflash_jax.diagnosis.facts import Facts, gather
from dflash_jax.diagnosis.findings import number
from dflash_jax.diagnosis.gaps import seconds
from dflash_jax.diagnosis.reading import Log
from dflash_jax.errors import UserError

PLACES = 6  # numbers of tokens at which the runs are compared
FEWEST, REACH = 5, 20  # lines that a mean takes at least, and what share of a run's lines (1 / REACH)
METRICS = {"loss": -1.0, "acc": 1.0, "accept_len": 1.0}  # the sign of what is better
SURE = 3.0  # standard errors
FASTER, UNLIKE = 1.05, 2.0  # ratios of rates, and of learning rates, that are worth a line


@dataclasses.dataclass(frozen=True)
class Level:
    """The mean of a metric around a number of tokens, and its standard error."""

    mean: float
    error: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """tokens: P numbers of tokens. levels: a metric -> P pairs of the two runs. rates: tokens per second of both,
    NaN where they are unknown. verdict: lines."""

    tokens: Sequence[float]
    levels: dict[str, list[tuple[Level, Level]]]
    rates: tuple[float, float]
    verdict: Sequence[str]


def running_tokens(log: Log) -> np.ndarray:
    """[N] tokens seen up to each line; steps without a line count as much as a usual one.

    Raises UserError if the log has no tokens.
    """
    tokens = log.column("tokens")
    if not np.isfinite(tokens).any():
        raise UserError(f"{log.name}: no tokens in the log, and runs are compared at equal numbers of tokens")
    if cumulative(tokens):
        return tokens
    usual = float(np.nanmedian(tokens))
    each = np.where(np.isfinite(tokens), tokens, usual)
    absent = np.diff(log.steps, prepend=log.steps[0] - 1) - 1
    return np.cumsum(each + absent * usual)


def compare(first: Log, second: Log) -> Comparison:
    """The two runs at PLACES numbers of tokens that both have seen, and what follows."""
    seen = [running_tokens(log) for log in (first, second)]
    start, end = max(np.nanmin(tokens) for tokens in seen), min(np.nanmax(tokens) for tokens in seen)
    if end <= start:
        raise UserError(f"{first.name} and {second.name} have no number of tokens in common; compare longer logs")
    places = [float(start + (end - start) * (place + 1) / PLACES) for place in range(PLACES)]
    facts = gather(first), gather(second)
    names = [name for name in METRICS if first.has(name) and second.has(name)]
    levels = {
        name: [
            (_level(facts[0], seen[0], name, place), _level(facts[1], seen[1], name, place)) for place in places
        ]
        for name in names
    }
    rates = _rate(facts[0], seen[0]), _rate(facts[1], seen[1])
    verdict = [_metric_verdict(name, levels[name], places) for name in names]
    schedules = [_level(facts[run], seen[run], "lr", places[-1]).mean for run in (0, 1)]
    return Comparison(places, levels, rates, [*verdict, *_schedule_verdict(*schedules), _speed_verdict(rates)])


def _level(facts: Facts, tokens: np.ndarray, name: str, place: float) -> Level:
    values = facts.log.column(name)
    known = np.flatnonzero(np.isfinite(values) & np.isfinite(tokens))
    if not len(known):
        return Level(np.nan, np.nan)
    here = int(np.searchsorted(tokens[known], place, side="right"))
    count = max(FEWEST, len(values) // REACH)
    near = known[max(here - count, 0) : max(here, 1)]
    even = values[near].copy()  # buckets take turns: their differences are no noise
    for group in np.unique(facts.groups[near]):
        mine = facts.groups[near] == group
        even[mine] -= even[mine].mean()
    return Level(float(values[near].mean()), float(even.std()) / max(len(near) - 1, 1) ** 0.5)


def _rate(facts: Facts, tokens: np.ndarray) -> float:
    """Tokens per second over all logged lines of a known duration; their first lines, which compile, left out."""
    passed = seconds(facts)
    each = np.diff(tokens, prepend=0.0)
    usable = np.isfinite(passed) & (passed > 0) & np.isfinite(each)
    usable[: max(FEWEST, len(tokens) // REACH)] = False
    return float(each[usable].sum() / passed[usable].sum()) if usable.any() else float("nan")


def _metric_verdict(name: str, pairs: Sequence[tuple[Level, Level]], places: Sequence[float]) -> str:
    first, second = pairs[-1]
    difference, error = second.mean - first.mean, float(np.hypot(first.error, second.error))
    at = f"at {number(places[-1])} tokens: {number(first.mean)} and {number(second.mean)}"
    if not abs(difference) > SURE * error:
        return f"{name} does not differ beyond its noise {at}"
    better = "second" if difference * METRICS[name] > 0 else "first"
    leads = sum((b.mean - a.mean) * difference > 0 for a, b in pairs)
    share = f"{difference / (abs(first.mean) or 1.0):+.1%}; so at {leads} of {len(pairs)} places"
    return f"{name} is better in the {better} run {at} ({share})"


def _schedule_verdict(first: float, second: float) -> list[str]:
    """A line if the learning rates at the last place differ much: a decayed rate alone lowers the loss."""
    if not (first > 0 and second > 0) or max(first, second) < UNLIKE * min(first, second):
        return []
    return [f"the learning rate there is {number(first)} and {number(second)}: the schedules explain a part of it"]


def _speed_verdict(rates: tuple[float, float]) -> str:
    if not np.isfinite(rates).all() or min(rates) <= 0:
        return "speed is unknown: no elapsed_s or step_s in the log"
    ratio = rates[1] / rates[0]
    both = f"{number(rates[0])} and {number(rates[1])} tokens/s"
    if 1 / FASTER < ratio < FASTER:
        return f"both are as fast: {both}"
    return f"the {'second' if ratio > 1 else 'first'} run is faster: {both} ({max(ratio, 1 / ratio):.2f}x)"
