"""A run in one picture: training loss, accept length while training and held-out, acceptance by position."""

import math
import pathlib

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from dflash_jax.monitor.looks import BLUE, INK, VERMILION, figure, frame, legend, say

TRAINING, HELD_OUT = BLUE, VERMILION


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
    file: pathlib.Path,
    *,
    title: str,
) -> None:
    """Write the picture, 1600 x 500 pixels, to a PNG file.

    train_lines: of train_log.jsonl, with step, loss, accept_len and, to weigh the smoothing, blocks.
    evaluations: of eval_log.jsonl, with step, accept_len and survival_by_position, the share of held-out blocks
    drafted right from position 1 to each of 1, 2, .. W - 1; those that decoded only have none and are left out.
    """
    drawn = figure(title)
    loss, accept_length, survival = drawn.subplots(1, 3)
    _draw_loss(loss, train_lines)
    forced = [line for line in evaluations if "accept_len" in line]
    _draw_accept_length(accept_length, train_lines, forced)
    _draw_survival(survival, forced[-1]["survival_by_position"] if forced else [])
    drawn.savefig(file, format="png")


def _draw_loss(axes: Axes, lines: list[dict]) -> None:
    frame(axes, "Training loss", across="optimizer step", up="loss (nats)")
    if not lines:
        return say(axes, "no steps")
    steps, losses = _column(lines, "step"), _column(lines, "loss")
    axes.plot(steps, losses, color=TRAINING, alpha=0.3, linewidth=0.6, label="each step")
    axes.plot(steps, _smoothed(lines, "loss"), **_line(lines), label="smoothed")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1.02 * steps[-1])
    legend(axes, "upper right")


def _draw_accept_length(axes: Axes, lines: list[dict], evaluations: list[dict]) -> None:
    frame(axes, "Accept length", across="optimizer step", up="tokens per verify step")
    if not lines and not evaluations:
        return say(axes, "no steps")
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
    legend(axes, "upper left")


def _draw_survival(axes: Axes, shares: list[float]) -> None:
    frame(
        axes,
        "Held-out acceptance by position",
        across="position in the block",
        up="blocks accepted up to here",
    )
    if not shares:
        return say(axes, "no held-out evaluation")
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
