"""A diagnosis as one HTML page that needs nothing else: findings, verdicts, notes and charts."""

import html
import pathlib
from collections.abc import Sequence

from dflash_jax.diagnosis.charts import chart_names, draw_chart
from dflash_jax.diagnosis.findings import Diagnosis, Finding
from dflash_jax.diagnosis.reading import Log
from dflash_jax.diagnosis.report import by_kind, count_text, describe_log
from dflash_jax.errors import UserError

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.15rem; margin-top: 2rem }
section { border-left: 4px solid #D55E00; padding: 0 0 0 1rem; margin: 1.2rem 0 }
h3 { font-size: 1rem; margin: 0 } h3 b { color: #D55E00; margin-right: .6rem }
pre { background: #f4f4f4; padding: .6rem; overflow-x: auto; font-size: 12px }
td { padding: .1rem 1rem .1rem 0; vertical-align: top }
.supported { color: #D55E00; font-weight: 600 } .refuted { color: #009E73 } .undecidable { color: #777 }
svg { max-width: 100%; height: auto }
"""


def write_page(runs: Sequence[tuple[Log, Diagnosis]], file: pathlib.Path, *, comparison: str | None) -> None:
    """Write the page of one run or of several. comparison: the text of how two compare.

    Raises UserError if the file cannot be written.
    """
    parts = [_run(log, diagnosis) for log, diagnosis in runs]
    if comparison is not None:
        parts.insert(0, f"<h2>At equal tokens</h2>\n<pre>{html.escape(comparison)}</pre>")
    title = html.escape(", ".join(log.name for log, _ in runs))
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>Diagnosis of a training</h1>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--html: {file} cannot be written ({error.strerror}); name a file in an existing folder"
        ) from None


def _run(log: Log, diagnosis: Diagnosis) -> str:
    parts = [f"<h2>{html.escape(describe_log(log))}</h2>", f"<p>{html.escape(count_text(diagnosis.findings))}</p>"]
    for shown, mentioned in by_kind(diagnosis.findings):
        parts += [_finding(finding) for finding in shown]
        if mentioned:
            summaries = "\n".join(html.escape(finding.summary) for finding in mentioned)
            parts.append(
                f"<details><summary>{len(mentioned)} more: {html.escape(shown[0].kind)}</summary>"
                f"<pre>{summaries}</pre></details>"
            )
    for heading, lines in (("Notes", diagnosis.notes), ("Not known", diagnosis.unknown)):
        if lines:
            parts.append(
                f"<h3>{heading}</h3><ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>"
            )
    return "\n".join([*parts, *(draw_chart(log, diagnosis, name) for name in chart_names(log))])


def _finding(finding: Finding) -> str:
    evidence = html.escape("\n".join(finding.evidence))
    rows = "".join(
        f'<tr><td>{html.escape(e.cause)}</td><td class="{e.verdict}">{e.verdict}</td>'
        f"<td>{html.escape(e.why)}</td></tr>"
        for e in finding.explanations
    )
    return (
        f"<section><h3><b>{html.escape(finding.kind)}</b>{html.escape(finding.summary)}</h3>\n"
        f"<pre>{evidence}</pre>\n<table>{rows}</table></section>"
    )
