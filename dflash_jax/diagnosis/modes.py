"""How many usual values a scattered quantity has: the peaks of its density that are told apart by real valleys.

Two peaks count as two only if the density between them falls below VALLEY of the lower one, each has SHARE of all
values at least, and the valley is deeper than chance makes it.
"""

import itertools

import numpy as np

FEWEST = 60  # values below which nothing is said
VALLEY = 0.6
SHARE = 0.1
CHANCE = 4.0  # standard deviations between the counts at the lower peak and in the valley
TURNS = 8  # times that the values must go from one peak to another; a lasting change goes once
GRID = 256
DEGREE = 3


def away_from_trend(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[N] values [N] less a cubic in the logarithm of the steps [N], or less their median if they are few."""
    if len(values) < 10 * DEGREE:
        return values - np.median(values) if len(values) else values
    at = np.log(steps - steps[0] + 0.1 * (steps[-1] - steps[0]) + 1.0)
    at = 2.0 * (at - at[0]) / max(at[-1] - at[0], 1e-9) - 1.0
    powers = at[:, None] ** np.arange(DEGREE + 1)
    weights = np.ones(len(values))
    residual = values
    for _ in range(3):  # again with less weight for what lies far off
        weighed = powers * weights[:, None]
        residual = values - powers @ np.linalg.lstsq(weighed.T @ powers, weighed.T @ values, rcond=None)[0]
        far = np.abs(residual) / max(float(np.median(np.abs(residual))) * 3.0, 1e-12)
        weights = 1.0 / np.maximum(far, 1.0)
    return residual


def borders(values: np.ndarray) -> np.ndarray:
    """The values that separate the modes of `values` [N], finite and in the order of time; none for one mode."""
    low, high = np.quantile(values, [0.005, 0.995]) if len(values) >= FEWEST else (0.0, 0.0)
    if high - low <= 1e-9:
        return np.zeros(0)
    quarter, three_quarters = np.quantile(values, [0.25, 0.75])
    inner = values[(values >= low) & (values <= high)]
    spread = min(float(inner.std()), float(three_quarters - quarter) / 1.349)
    width = max(0.9 * spread * len(values) ** -0.2, (high - low) / GRID)
    counts, edges = np.histogram(inner, bins=GRID, range=(low - 3 * width, high + 3 * width))
    bin_width = edges[1] - edges[0]
    reach = np.arange(-int(4 * width / bin_width) - 1, int(4 * width / bin_width) + 2) * bin_width / width
    kernel = np.exp(-0.5 * reach**2)
    density = np.convolve(counts, kernel / kernel.sum(), mode="same")
    found = _valleys(density, per_width=2 * width / bin_width, total=len(inner))
    at = (edges[:-1] + edges[1:])[found] / 2
    turns = int((np.diff(np.digitize(values, at)) != 0).sum())
    return at if turns >= TURNS else np.zeros(0)


def _valleys(density: np.ndarray, *, per_width: float, total: int) -> list[int]:
    """Places of the valleys that count. density: values in each bin; per_width: bins in two kernel widths."""
    rising = np.diff(np.concatenate([[0.0], density, [0.0]])) > 0
    peaks = list(np.flatnonzero(rising[:-1] & ~rising[1:]))
    valleys = [int(a + np.argmin(density[a : b + 1])) for a, b in itertools.pairwise(peaks)]
    while valleys:
        bounds = [0, *valleys, len(density)]
        shares = [density[a:b].sum() / total for a, b in itertools.pairwise(bounds)]
        depths = []
        for place, valley in enumerate(valleys):
            lower = min(density[peaks[place]], density[peaks[place + 1]])
            at_peak, at_valley = lower * per_width, density[valley] * per_width
            clear = (at_peak - at_valley) / np.sqrt(at_peak + at_valley + 1e-9)
            good = density[valley] < VALLEY * lower and clear > CHANCE
            good = good and min(shares[place], shares[place + 1]) >= SHARE
            depths.append(density[valley] / lower + (0.0 if good else 1.0))
        worst = int(np.argmax(depths))
        if depths[worst] < 1.0:
            break
        lost = worst if density[peaks[worst]] <= density[peaks[worst + 1]] else worst + 1
        del valleys[worst], peaks[lost]
    return valleys
