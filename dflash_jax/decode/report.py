"""Comparisons of plain and speculative decoding, summed up by prompt set, as numbers and as a table."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dflash_jax.decode.measure import Comparison


@dataclasses.dataclass(frozen=True)
class SetReport:
    """One prompt set. accept_len: tokens per verify round, pooled over the set's rounds; accept_len_by_request:
    mean over prompts of each one's own; tokens_s: answer tokens a second with prefill; ratio: chain to plain."""

    set: str
    prompts: int
    tokens: int
    accept_len: float
    accept_len_by_request: float
    plain_tokens_s: float
    chain_tokens_s: float
    ratio: float
    identical: int
    survival_by_position: list[float]
    differences: list[dict[str, float]]


def summarise(name: str, found: Sequence[Comparison]) -> SetReport:
    """The report of one set's comparisons."""
    rounds = np.array([item.rounds for item in found])
    emitted = rounds @ np.arange(1, rounds.shape[1] + 1)
    total = rounds.sum(axis=0)
    # A round that emits n tokens accepted n - 1 drafts; survival[k] is the share that accepted more than k.
    survival = total[::-1].cumsum()[::-1][1:] / max(total.sum(), 1)
    asked = rounds.sum(axis=1) > 0
    plain_s, chain_s = (sum(times) for times in zip(*((c.plain_s, c.chain_s) for c in found), strict=True))
    plain_rate = sum(len(item.plain) for item in found) / plain_s
    chain_rate = sum(len(item.chain) for item in found) / chain_s
    return SetReport(
        set=name,
        prompts=len(found),
        tokens=sum(len(item.chain) for item in found),
        accept_len=float(emitted.sum() / max(total.sum(), 1)),
        accept_len_by_request=float((emitted[asked] / rounds.sum(axis=1)[asked]).mean()) if asked.any() else 0.0,
        plain_tokens_s=plain_rate,
        chain_tokens_s=chain_rate,
        ratio=chain_rate / plain_rate,
        identical=sum(item.difference is None for item in found),
        survival_by_position=[float(value) for value in survival],
        differences=[dataclasses.asdict(item.difference) for item in found if item.difference],
    )


def by_set(found: Sequence[Comparison]) -> list[SetReport]:
    """One report per prompt set, in order of appearance, and one over all of them."""
    names = list(dict.fromkeys(item.prompt.set for item in found))
    reports = [summarise(name, [item for item in found if item.prompt.set == name]) for name in names]
    return [*reports, summarise("all", found)]


def table(reports: Sequence[SetReport]) -> str:
    """A table for a terminal."""
    titles = ("prompts", "n", "tokens/verify", "per request", "plain tok/s", "chain tok/s", "ratio", "identical")
    lines = [
        (
            report.set or "-",
            str(report.prompts),
            f"{report.accept_len:.2f}",
            f"{report.accept_len_by_request:.2f}",
            f"{report.plain_tokens_s:.1f}",
            f"{report.chain_tokens_s:.1f}",
            f"{report.ratio:.2f}x",
            f"{report.identical}/{report.prompts}",
        )
        for report in reports
    ]
    widths = [max(len(row[column]) for row in [titles, *lines]) for column in range(len(titles))]

    def spaced(row: tuple[str, ...]) -> str:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join([row[0].ljust(widths[0]), *numbers])

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([spaced(titles), rule, *map(spaced, lines)])
