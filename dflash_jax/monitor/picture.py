"""A run in one picture: training loss, accept length while training and held-out, acceptance by position."""

import math
import pathlib
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

# Okabe and Ito's palette: told apart with any colour vision, and in grey.
TRAINING, HELD_OUT, INK = "#0072B2", "#D55E00", "#333333"
INCHES, DOTS_PER_INCH = (8.0, 2.5), 200  # 1600 x 500 pixels


def smooth(values: np.ndarray, weights: np.ndarray, *, reach: int) -> np.ndarray:
    """[N] weighted means of values [N] over each point and its neighbours up to `reach` away.

    Values that are not finite weigh nothing; where nothing weighs, the mean is NaN.
    """
    weights = np.where(np.isfinite(values), weights, 0.0)
    weighted = np.where(weights > 0, values, 0.0) * weights
    totals, weight_totals = (np.concatenate([[0.0], np.cumsum(x)]) for x in (weighted, weights))
    middle = np.arange(len(values))
    first, end = np.maximum(middle - reach, 0), np.minimum(middle + reach + 1, len(values))
    weight = weight_totals[end] - weight_totals[first]
    unknown = np.full(len(values), np.nan)
    return np.divide(totals[end] - totals[first], weight, out=unknown, where=weight > 0)


def draw_report(
    train_lines: list[dict],
    evaluations: list[dict],
    heldout_by_position: list[float] | None,
    file: pathlib.Path,
    *,
    title: str,
) -> None:
    """Write the picture, 1600 x 500 pixels, to a PNG file.

    train_lines: of train_log.jsonl, with step, loss, accept_len and, to weigh the smoothing, blocks.
    evaluations: of eval_log.jsonl, with step and accept_len.
    heldout_by_position: share of held-out blocks drafted right from position 1 to each of 1, 2, .. W - 1.
    """
    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=9, fontweight="bold", color=INK)
    loss, accept_length, survival = figure.subplots(1, 3)
    _draw_loss(loss, train_lines)
    _draw_accept_length(accept_length, train_lines, evaluations)
    _draw_survival(survival, heldout_by_position or [])
    figure.savefig(file, format="png")


def _draw_loss(axes: Axes, lines: list[dict]) -> None:
    _frame(axes, "Training loss", across="optimizer step", up="loss (nats)")
    if not lines:
        return _say(axes, "no steps")
    steps, losses = _column(lines, "step"), _column(lines, "loss")
    axes.plot(steps, losses, color=TRAINING, alpha=0.3, linewidth=0.6, label="each step")
    axes.plot(steps, _smoothed(lines, "loss"), **_line(lines), label="smoothed")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1.02 * steps[-1])
    _legend(axes, "upper right")


def _draw_accept_length(axes: Axes, lines: list[dict], evaluations: list[dict]) -> None:
    _frame(axes, "Accept length", across="optimizer step", up="tokens per verify step")
    if not lines and not evaluations:
        return _say(axes, "no steps")
    smoothed = _smoothed(lines, "accept_len")
    steps, heldout = _column(evaluations, "step"), _column(evaluations, "accept_len")
    if lines:
        axes.plot(_column(lines, "step"), smoothed, **_line(lines), label="training, smoothed")
    if evaluations:
        label = f"held-out, last {heldout[-1]:.2f}"
        axes.plot(steps, heldout, "o--", color=HELD_OUT, linewidth=1, markersize=3.5, clip_on=False, label=label)
    # A verify step without any accepted draft still yields 1 token.
    highest = np.nanmax([1.5, *smoothed, *heldout])
    axes.set_ylim(1.0, 1.0 + 1.3 * (highest - 1.0))
    axes.set_xlim(0, 1.02 * max([1, *(line["step"] for line in [*lines, *evaluations])]))
    _legend(axes, "upper left")


def _draw_survival(axes: Axes, shares: list[float]) -> None:
    _frame(
        axes,
        "Held-out acceptance by position",
        across="position in the block",
        up="blocks accepted up to here",
    )
    if not shares:
        return _say(axes, "no held-out evaluation")
    positions = np.arange(1, len(shares) + 1)
    axes.bar(positions, shares, color=HELD_OUT, width=0.75)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_xlim(0.4, len(shares) + 0.6)
    axes.set_xticks(positions[::2])
    # Each accepted position adds one token to the one that is always there.
    text = f"accept length {1 + sum(shares):.2f}\n= 1 + sum of bars"
    axes.text(0.97, 0.95, text, transform=axes.transAxes, ha="right", va="top", fontsize=7, color=INK)


def _column(lines: list[dict], name: str) -> np.ndarray:
    """[N] values by line; NaN where a line lacks it. The log writes non-finite numbers as text."""
    return np.array([float(line.get(name, math.nan)) for line in lines])


def _smoothed(lines: list[dict], name: str) -> np.ndarray:
    weights = np.array([float(line.get("blocks", 1)) for line in lines])
    return smooth(_column(lines, name), weights, reach=math.ceil(len(lines) / 60))


def _line(lines: list[dict]) -> dict:
    """A training line's looks; a single step needs a marker to be seen."""
    return {
        "color": TRAINING,
        "linewidth": 1.5,
        "marker": "o" if len(lines) == 1 else None,
        "markersize": 3.5,
    }


def _frame(axes: Axes, title: str, *, across: str, up: str) -> None:
    axes.set_title(title, fontsize=8, color=INK)
    axes.set_xlabel(across, fontsize=7.5, color=INK)
    axes.set_ylabel(up, fontsize=7.5, color=INK)
    axes.tick_params(labelsize=7, colors=INK, length=2)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")


def _legend(axes: Axes, corner: Literal["upper left", "upper right"]) -> None:
    axes.legend(loc=corner, fontsize=7, labelcolor=INK, frameon=False)


def _say(axes: Axes, text: str) -> None:
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=8, color="#777777")
