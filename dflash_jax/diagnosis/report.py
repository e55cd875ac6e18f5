"""A diagnosis as text for a terminal: curves, findings with evidence and verdicts, notes."""

from collections.abc import Iterable, Iterator, Sequence

from dflash_jax.diagnosis.comparison import Comparison
from dflash_jax.diagnosis.curve import draw, thinned
from dflash_jax.diagnosis.findings import Diagnosis, Finding, number
from dflash_jax.diagnosis.reading import Log

CURVES = ("loss", "accept_len", "acc")
MOST = 6  # findings of a kind that are shown in full
DRAWN = 20_000  # values of a curve


def describe_log(log: Log) -> str:
    """One line: which steps there are."""
    return f"{log.name}: {len(log)} steps, {log.steps[0]} to {log.steps[-1]}"


def text(log: Log, diagnosis: Diagnosis) -> str:
    """The report of one run."""
    lines = [describe_log(log), ""]
    shown = [name for name in CURVES if log.has(name)][:2]
    for name in shown:
        values = log.column(name)
        rows = thinned(values, DRAWN)
        lines += [*draw(log.steps[rows], values[rows], title=name), ""]
    lines += _findings(diagnosis.findings)
    for heading, notes in (("notes", diagnosis.notes), ("not known", diagnosis.unknown)):
        if notes:
            lines += [f"{heading}:", *(f"  {note}" for note in notes), ""]
    lines.append(count_text(diagnosis.findings))
    return "\n".join(lines)


def count_text(findings: Sequence[Finding]) -> str:
    """ "3 findings: loss jump 2, step gap 1", or "no findings"."""
    if not findings:
        return "no findings"
    kinds = {finding.kind: sum(other.kind == finding.kind for other in findings) for finding in findings}
    counted = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    return f"{len(findings)} finding{'s' if len(findings) > 1 else ''}: {counted}"


def by_kind(findings: Iterable[Finding]) -> Iterator[tuple[list[Finding], list[Finding]]]:
    """For each kind: (findings to show in full, those to mention)."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, []).append(finding)
    for found in kinds.values():
        yield found[:MOST], found[MOST:]


def comparison_text(first: Log, second: Log, comparison: Comparison) -> str:
    """The table of two runs at equal tokens and its verdict."""
    lines = [f"A: {describe_log(first)}", f"B: {describe_log(second)}", ""]
    names = list(comparison.levels)
    rows = [["tokens", *(f"{name} {run}" for name in names for run in "AB")]]
    for place, tokens in enumerate(comparison.tokens):
        pairs = [comparison.levels[name][place] for name in names]
        rows.append([f"{tokens:,.0f}", *(number(level.mean) for pair in pairs for level in pair)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, "", *comparison.verdict])


def _findings(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for shown, mentioned in by_kind(findings):
        for finding in shown:
            lines.append(f"{finding.kind.upper()}  {finding.summary}")
            lines += [f"    {line}" for line in finding.evidence]
            width = max((len(cause.cause) for cause in finding.explanations), default=0)
            lines += [f"    {e.cause:<{width}}  {e.verdict:<11}  {e.why}" for e in finding.explanations]
            lines.append("")
        if mentioned:
            where = ", ".join(str(finding.first) for finding in mentioned[:20])
            dots = ", ..." if len(mentioned) > 20 else ""
            lines += [f"... and {len(mentioned)} more {shown[0].kind} after steps {where}{dots}", ""]
    return lines
