"""Curves in a terminal: dots of Braille characters, two across and four up in each."""

import math
from collections.abc import Sequence

import numpy as np

BLANK = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row from the top, then column


def draw(steps: np.ndarray, values: np.ndarray, *, title: str, width: int = 64, height: int = 8) -> Sequence[str]:
    """Lines of a plot of values [N] over steps [N]; the scale leaves out the highest and lowest hundredth."""
    known = np.isfinite(values)
    if not known.any():
        return [f"{title}: no finite value"]
    steps, values = steps[known], values[known]
    low, high = (float(bound) for bound in np.quantile(values, [0.01, 0.99]))
    if high <= low:
        low, high = low - 0.5 * max(abs(low), 1e-9), high + 0.5 * max(abs(high), 1e-9)
    across = (steps - steps[0]) / max(steps[-1] - steps[0], 1) * (2 * width - 1)
    up = (np.clip(values, low, high) - low) / (high - low) * (4 * height - 1)
    cells = np.full((height, width), BLANK)
    for x, y in zip(np.rint(across).astype(int), np.rint(4 * height - 1 - up).astype(int), strict=True):
        cells[y // 4, x // 2] |= DOTS[y % 4][x % 2]
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    margin = max(map(len, labels.values()))
    rows = [f"{labels.get(row, ''):>{margin}} |{''.join(map(chr, cells[row]))}" for row in range(height)]
    first, last = str(steps[0]), str(steps[-1])
    axis = " " * (margin + 2) + first + last.rjust(width - len(first))
    return [" " * (margin + 2) + title, *(row.rstrip(chr(BLANK)) for row in rows), axis]


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Rows of at most about `most` of values [N] that keep the lowest and the highest of each stretch."""
    if len(values) <= most:
        return np.arange(len(values))
    kept = []
    for part in np.array_split(np.arange(len(values)), math.ceil(most / 2)):
        known = part[np.isfinite(values[part])]
        if len(known):
            kept += [known[np.argmin(values[known])], known[np.argmax(values[known])]]
    return np.unique(kept).astype(int)
