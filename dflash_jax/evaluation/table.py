"""The reports of an evaluation as text for a terminal."""

from collections.abc import Iterator, Sequence

from dflash_jax.evaluation.report import SetReport, WayReport

Cells = Sequence[str]


def main_table(reports: Sequence[SetReport], *, in_distribution: bool) -> str:
    """All ways side by side, set by set; the last report is left out where it is the only set again.

    in_distribution: ways that were not compared keep the text's distribution, as nothing more is to be expected.
    """
    simulated = any(report.simulated for report in reports[0].ways)
    titles = ["prompts", "n", "drafter", "decoding", "accept length", "by request"]
    titles += ["simulated", "walk"] if simulated else []
    titles += ["tok/s", "ratio", "lossless"]
    lines = []
    for report in _shown(reports):
        for number, way in enumerate(report.ways):
            head = [report.set, str(report.prompts)] if number == 0 else ["", ""]
            forced = [_number(getattr(way.simulated, name, None)) for name in ("accept_len", "walk_tau")]
            lines.append(
                [
                    *head,
                    way.way.drafter or "",
                    way.way.decoding,
                    _number(way.accept_len),
                    _number(way.accept_len_by_request),
                    *(forced if simulated else []),
                    f"{way.tokens_s:.1f}",
                    "-" if way.ratio is None else f"{way.ratio:.2f}x",
                    _lossless(way, in_distribution=in_distribution),
                ]
            )
    return aligned(titles, lines, left=("prompts", "drafter", "decoding", "lossless"))


def position_table(reports: Sequence[SetReport]) -> str:
    """Over all sets, what share of the rounds accepted at least k drafts, and what share gave k tokens."""
    ways = [way for way in reports[-1].ways if way.rounds]
    if not ways:
        return ""
    width = max(way.way.slots for way in ways)
    titles = ["of all rounds", *map(str, range(1, width + 1))]

    def lines(what: str, shares: Sequence[Sequence[float]]) -> list[list[str]]:
        rows = [
            [
                f"  {way.way.drafter} {way.way.decoding}",
                *(_percent(share) for share in row),
                *[""] * (width - len(row)),
            ]
            for way, row in zip(ways, shares, strict=True)
        ]
        return [[what, *[""] * width], *rows]

    accepted = lines("accepted at least so many drafts", [way.survival_by_position for way in ways])
    given = lines("gave so many tokens", [[count / way.rounds for count in way.rounds_by_tokens] for way in ways])
    return aligned(titles, [*accepted, *given], left=("of all rounds",))


def comparison_lines(reports: Sequence[SetReport]) -> Iterator[str]:
    """A line for each set and each drafter after the first: how its accept lengths compare with the first's."""
    for report in _shown(reports):
        found = {(way.way.drafter, way.way.decoding): way.accept_len for way in report.ways if way.accept_len}
        drafters = list(dict.fromkeys(drafter for drafter, _ in found))
        for other in drafters[1:]:
            pairs = [
                (decoding, length, found[drafters[0], decoding])
                for (drafter, decoding), length in found.items()
                if drafter == other and (drafters[0], decoding) in found
            ]
            said = (
                f"{decoding} {ours:.2f} / {first:.2f} = {ours / first:.2f}x" for decoding, ours, first in pairs
            )
            yield f"{report.set}: accept length of {other} against {drafters[0]}: {', '.join(said)}"


def aligned(titles: Cells, lines: Sequence[Cells], *, left: Sequence[str]) -> str:
    """Columns under their titles, numbers to the right; left: titles of the columns that are text."""
    widths = [max(len(row[column]) for row in [titles, *lines]) for column in range(len(titles))]

    def spaced(row: Cells) -> str:
        cells = (
            cell.ljust(width) if title in left else cell.rjust(width)
            for cell, width, title in zip(row, widths, titles, strict=True)
        )
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([spaced(titles), rule, *map(spaced, lines)])


def _shown(reports: Sequence[SetReport]) -> Sequence[SetReport]:
    """Without the report over all sets where there is one set."""
    return reports[:1] if len(reports) == 2 else reports


def _lossless(way: WayReport, *, in_distribution: bool) -> str:
    if not way.compared:
        return "in distribution" if in_distribution and way.rounds else "-"
    counts = [(way.ties, "tie" if way.ties == 1 else "ties"), (way.different, "DIFFERENT")]
    said = [f"{way.identical}/{way.compared}", *(f"{count} {word}" for count, word in counts if count)]
    return ", ".join(said)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
