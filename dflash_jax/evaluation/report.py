"""What was measured, summed up by prompt set and way to decode."""

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.decode.simulate import Simulated
from dflash_jax.decode.ways import PLAIN, Way
from dflash_jax.evaluation.difference import Difference
from dflash_jax.evaluation.measure import Answer, Measured

ALL = "all"


@dataclasses.dataclass(frozen=True)
class Forced:
    """Tokens of a verify round, teacher-forced on plain decoding's text. accept_len: mean over all positions where
    a block may start; walk_tau: over those that decoding comes to."""

    accept_len: float
    walk_tau: float


@dataclasses.dataclass(frozen=True)
class WayReport:
    """One way in one set.

    accept_len: tokens of a verify round, pooled over all rounds; accept_len_by_request: mean over the prompts of
    each one's own. Both count what a round gave, its accepted drafts and the target's own token, cut behind a stop
    token and at the limit. drafts_accepted: mean of a round, before that cut. survival_by_position: share of all
    rounds that accepted at least k drafts, k from 1; rounds_by_tokens: rounds that gave 1, 2, .. tokens.
    tokens_s: of answers, prefill included; ratio: of that to plain decoding's, None without it.
    identical, ties: answers that are plain decoding's, and those that part from it at a tie, of `compared`.
    simulated: the same as seen on plain decoding's text, None where that was not asked for.
    """

    way: Way
    tokens: int
    rounds: int
    accept_len: float | None
    accept_len_by_request: float | None
    drafts_accepted: float | None
    survival_by_position: list[float]
    rounds_by_tokens: list[int]
    seconds: float
    tokens_s: float
    ratio: float | None
    compared: int
    identical: int
    ties: int
    simulated: Forced | None

    @property
    def different(self) -> int:
        """Answers that part from plain decoding's where the target was not in doubt."""
        return self.compared - self.identical - self.ties


@dataclasses.dataclass(frozen=True)
class SetReport:
    """One prompt set, or ALL of them; ways: in the order in which they were asked for."""

    set: str
    prompts: int
    ways: list[WayReport]

    def of(self, way: Way) -> WayReport:
        """The report of one way."""
        return next(report for report in self.ways if report.way == way)


def by_set(
    measured: Sequence[Measured],
    ways: Sequence[Way],
    *,
    compared: Sequence[Way],
    simulated: Mapping[str, Mapping[str, Simulated]],
) -> list[SetReport]:
    """One report per prompt set, in the order of the prompts, and one over all of them.

    compared: the ways whose text was held against plain decoding's; simulated: by set and drafter, may be empty.
    """
    ordered = sorted(measured, key=lambda item: item.index)
    sets = collections.defaultdict(list)
    for item in ordered:
        sets[item.prompt.set].append(item)
    everywhere = _added(list(simulated.values()))
    parts = [(name, items, simulated.get(name, {})) for name, items in sets.items()]
    return [
        SetReport(
            name,
            len(items),
            [summarise(way, items, compared=way in compared, simulated=sums) for way in ways],
        )
        for name, items, sums in [*parts, (ALL, ordered, everywhere)]
    ]


def summarise(
    way: Way, measured: Sequence[Measured], *, compared: bool, simulated: Mapping[str, Simulated]
) -> WayReport:
    """The report of one way over some prompts."""
    answers = [item.answers[way] for item in measured]
    emitted, accepted = (
        np.concatenate([getattr(answer, name) for answer in answers]) for name in ("emitted", "accepted")
    )
    own = [answer.emitted.mean() for answer in answers if len(answer.emitted)]
    rate = _rate(answers)
    with_plain = Way(PLAIN) in measured[0].answers
    differences = [answer.difference for answer in answers if answer.difference]
    return WayReport(
        way=way,
        tokens=sum(len(answer.tokens) for answer in answers),
        rounds=len(emitted),
        accept_len=float(emitted.mean()) if own else None,
        accept_len_by_request=float(np.mean(own)) if own else None,
        drafts_accepted=float(accepted.mean()) if own else None,
        survival_by_position=[float((accepted >= k).mean()) for k in range(1, way.slots)] if own else [],
        rounds_by_tokens=np.bincount(emitted, minlength=way.slots + 1)[1:].tolist() if own else [],
        seconds=sum(answer.seconds for answer in answers),
        tokens_s=rate,
        ratio=rate / _rate([item.answers[Way(PLAIN)] for item in measured]) if with_plain else None,
        compared=len(answers) if compared else 0,
        identical=len(answers) - len(differences) if compared else 0,
        ties=sum(difference.tie for difference in differences),
        simulated=_forced(way, simulated),
    )


def entries(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One JSON entry per prompt, in the order of the prompts: what every way answered, and how it got there."""

    def one(way: Way, answer: Answer) -> dict[str, Any]:
        return {
            "drafter": way.drafter,
            "decoding": way.decoding,
            "tokens": len(answer.tokens),
            "seconds": answer.seconds,
            "accept_len": float(answer.emitted.mean()) if len(answer.emitted) else None,
            "accepted": answer.accepted.tolist(),
            "difference": answer.difference and _difference(answer.difference),
        } | ({"token_ids": answer.tokens.tolist()} if way.kind == PLAIN or answer.difference else {})

    return [
        {
            "prompt": item.index,
            "set": item.prompt.set,
            "prompt_tokens": len(item.prompt.tokens),
            "answers": [one(way, answer) for way, answer in item.answers.items()],
        }
        for item in sorted(measured, key=lambda item: item.index)
    ]


def _difference(difference: Difference) -> dict[str, Any]:
    """As JSON has it, which knows no infinite gap."""
    gap = difference.logit_gap
    return dataclasses.asdict(difference) | {"logit_gap": gap if math.isfinite(gap) else None}


def _rate(answers: Sequence[Answer]) -> float:
    return sum(len(answer.tokens) for answer in answers) / sum(answer.seconds for answer in answers)


def _added(parts: Sequence[Mapping[str, Simulated]]) -> dict[str, Simulated]:
    names = parts[0] if parts else ()
    return {name: functools.reduce(operator.add, (part[name] for part in parts)) for name in names}


def _forced(way: Way, simulated: Mapping[str, Simulated]) -> Forced | None:
    if way.drafter is None or way.drafter not in simulated:
        return None
    found = simulated[way.drafter].measures()
    names = ("sim_accept_len", "walk_tau")
    if way.budget is not None:
        names = (f"tree{way.budget}_accept_len", f"tree{way.budget}_walk_tau")
    return Forced(*(float(found[name]) for name in names))
