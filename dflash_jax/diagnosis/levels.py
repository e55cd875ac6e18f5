"""Usual values and their scatter, by medians, so that the odd ones do not count among the usual."""

import numpy as np

AS_SIGMA = 1.4826  # a normal distribution's standard deviation in units of its median absolute deviation
AT_ONCE = 200_000  # values that a rolling median sorts at a time


def scatter(values: np.ndarray) -> float:
    """Standard deviation of the finite values, as their median absolute deviation tells it; 0 for none."""
    values = values[np.isfinite(values)]
    return float(AS_SIGMA * np.median(np.abs(values - np.median(values)))) if len(values) else 0.0


def step_scatter(values: np.ndarray) -> float:
    """Standard deviation around a slow trend: that of the differences between neighbours, less their excess."""
    return scatter(np.diff(values[np.isfinite(values)])) / np.sqrt(2.0)


def rolling_median(values: np.ndarray, width: int) -> np.ndarray:
    """[N] medians of values [N], all finite, over `width` neighbours, itself in the middle; fewer at both ends."""
    half = width // 2
    padded = np.concatenate([np.full(half, np.nan), values, np.full(half, np.nan)])
    return _medians(padded, 2 * half + 1)


def past_median(values: np.ndarray, reach: int) -> np.ndarray:
    """[N] medians of the `reach` values before each of [N], all finite; fewer at the start, NaN for the first."""
    padded = np.concatenate([np.full(reach, np.nan), values[:-1]])
    return _medians(padded, reach)[: len(values)] if len(values) else values


def _medians(padded: np.ndarray, width: int) -> np.ndarray:
    if len(padded) < width:
        return np.zeros(0)
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    found = np.full(len(windows), np.nan)
    rows = max(AT_ONCE // width, 1)
    for start in range(0, len(windows), rows):
        part = np.sort(windows[start : start + rows], axis=1)  # NaN sorts last
        count = np.isfinite(part).sum(axis=1)
        middle = np.take_along_axis(part, np.stack([(count - 1) // 2, count // 2], axis=1).clip(0), axis=1)
        found[start : start + rows] = np.where(count > 0, middle.mean(axis=1), np.nan)
    return found


def past_means(values: np.ndarray, width: int) -> np.ndarray:
    """[N] means of each value and the width - 1 before it; NaN for the first width - 1."""
    means = np.full(len(values), np.nan)
    if len(values) >= width:
        totals = np.concatenate([[0.0], np.cumsum(values)])
        means[width - 1 :] = (totals[width:] - totals[:-width]) / width
    return means
