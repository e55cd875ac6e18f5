"""What the reading of a log yields: findings with their evidence, and what speaks for and against their causes."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

Verdict = Literal["supported", "refuted", "undecidable"]

NOT_FINITE = "not finite"
LOSS_JUMP = "loss jump"
ACCURACY_FALL = "accuracy fall"
STEP_GAP = "step gap"
TIME_GAP = "time gap"
SPIKES = "spikes"
MODES = "several losses"
BUCKET_RUNS = "bucket runs"
QUEUE_DRIFT = "queue drift"
NO_WARM_UP = "no warm-up"
PLATEAU = "plateau"
SKIPPED = "skipped steps"
SLOWER = "slower"
KINDS = (
    NOT_FINITE,
    LOSS_JUMP,
    ACCURACY_FALL,
    STEP_GAP,
    TIME_GAP,
    SPIKES,
    MODES,
    BUCKET_RUNS,
    QUEUE_DRIFT,
    NO_WARM_UP,
    PLATEAU,
    SKIPPED,
    SLOWER,
)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A usual cause of what was found, and what the log says of it."""

    cause: str
    verdict: Verdict
    why: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something wrong with a run. first, last: the steps that it spans; evidence: figures from the log."""

    kind: str
    first: int
    last: int
    summary: str
    evidence: Sequence[str] = ()
    explanations: Sequence[Explanation] = ()


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """findings: by kind, then step. notes: worth knowing and no fault. unknown: what the log cannot tell."""

    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    unknown: Sequence[str] = ()


def together(parts: Iterable[Diagnosis]) -> Diagnosis:
    """One diagnosis of several."""
    parts = list(parts)
    findings = [finding for part in parts for finding in part.findings]
    return Diagnosis(
        findings=sorted(findings, key=lambda finding: (KINDS.index(finding.kind), finding.first)),
        notes=[note for part in parts for note in part.notes],
        unknown=[line for part in parts for line in part.unknown],
    )


def number(value: float) -> str:
    """A figure with five digits."""
    if abs(value) >= 1000 and abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.5g}"


def some(values: Iterable[object], *, most: int = 8) -> str:
    """ "1, 2, 3 and 5 more"."""
    texts = [str(value) for value in values]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
