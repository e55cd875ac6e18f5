"""Charts of a log as SVG text to stand inside a page."""

import io

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from dflash_jax.diagnosis.curve import thinned
from dflash_jax.diagnosis.findings import Diagnosis
from dflash_jax.diagnosis.reading import Log
from dflash_jax.monitor.looks import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, frame
from dflash_jax.monitor.picture import smooth

CHARTS = {
    "loss": "loss (nats)",
    "accept_len": "tokens per verify step",
    "acc": "accuracy",
    "lr": "learning rate",
    "noise_std": "standard deviation of the noise",
    "grad_norm": "gradient norm",
    "drafter_tok_s": "drafter tokens per second",
    "tokens_s": "tokens per second",
    "prefetch_queue": "prefetch queue",
    "feature_queue": "feature queue",
}
GREY = "#999999"
LOGARITHMIC, SCHEDULES = ("loss", "grad_norm"), ("lr", "noise_std")
BUCKETS = (BLUE, GREEN, ORANGE, PURPLE, SKY, GREY)  # more buckets take the colours again
MOST = 2000  # points of a chart
INCHES = (8.0, 3.0)


def chart_names(log: Log) -> list[str]:
    """The keys of a log that have a chart."""
    return [name for name in CHARTS if np.isfinite(log.column(name)).any()]


def draw_chart(log: Log, diagnosis: Diagnosis, name: str) -> str:
    """An <svg> element: every step by bucket, the smoothed value, and the spans of the findings."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False}):
        drawn = Figure(figsize=INCHES)
        axes = drawn.add_axes((0.1, 0.17, 0.88, 0.71))
        frame(axes, name, across="optimizer step", up=CHARTS[name])
        values = log.column(name)
        buckets = np.nan_to_num(log.column("bucket"), nan=-1)
        rows = thinned(values, MOST)
        for place, bucket in enumerate(np.unique(buckets[rows])):
            mine = rows[buckets[rows] == bucket]
            label = None if bucket < 0 else f"bucket {bucket:g}"
            colour = BUCKETS[place % len(BUCKETS)]
            axes.plot(log.steps[mine], values[mine], ".", markersize=2, alpha=0.5, color=colour, label=label)
        if name not in SCHEDULES:
            smoothed = smooth(values, np.ones(len(values)), reach=max(len(values) // 60, 1))
            axes.plot(log.steps[rows], smoothed[rows], color=INK, linewidth=1.2)
        for finding in diagnosis.findings:
            axes.axvspan(finding.first - 0.5, finding.last + 0.5, color=VERMILION, alpha=0.12, linewidth=0)
        if name in LOGARITHMIC and (values[np.isfinite(values)] > 0).all():
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        if (buckets >= 0).any() and len(np.unique(buckets)) > 1:
            axes.legend(fontsize=6, frameon=False, ncols=2)
        file = io.StringIO()
        drawn.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    return text[text.index("<svg") :]
