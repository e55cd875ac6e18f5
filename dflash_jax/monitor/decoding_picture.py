"""Ways to decode and drafters in one picture: accept length by prompt set, acceptance by position, speed."""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from dflash_jax.monitor.looks import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, figure, frame, say

COLOURS = (
    BLUE,
    VERMILION,
    GREEN,
    PURPLE,
    ORANGE,
    SKY,
)  # one for each drafter, again from the first if they run out
MOST_LETTERS = 30  # of all names of sets together that stand beside each other


@dataclasses.dataclass(frozen=True)
class Shown:
    """A way to decode. accept_lens: tokens of a round by prompt set, None where there was no round; ratios: speed
    to plain decoding's by set, None where that is not known; survival: share of rounds that accepted at least k
    drafts, k from 1."""

    drafter: str
    decoding: str
    accept_lens: Sequence[float | None]
    ratios: Sequence[float | None]
    survival: Sequence[float]


def draw_decoding(sets: Sequence[str], ways: Sequence[Shown], file: pathlib.Path, *, title: str) -> None:
    """Write the picture, 1600 x 500 pixels, to a PNG file. sets: names; ways: speculative ones, of one or more
    drafters; a drafter keeps its colour, and its ways get paler in their order."""
    drawn = figure(title)
    accept_length, survival, speed = drawn.subplots(1, 3)
    frame(accept_length, "Accept length", across="", up="tokens per verify round")
    _bars(accept_length, sets, ways, [way.accept_lens for way in ways], floor=1.0)
    frame(survival, "Acceptance by position", across="drafts accepted, at least", up="share of all rounds")
    _curves(survival, ways)
    frame(speed, "Speed", across="", up="speed, plain = 1")
    _bars(speed, sets, ways, [way.ratios for way in ways], floor=0.0)
    if ways:
        speed.axhline(1.0, color=INK, linewidth=0.6, linestyle="--")
        bars = accept_length.containers or speed.containers
        columns = len(ways) if len(ways) <= 5 else 4
        drawn.legend(
            handles=list(bars),
            loc="outside lower center",
            ncols=columns,
            fontsize=7,
            labelcolor=INK,
            frameon=False,
        )
    drawn.savefig(file, format="png")


def _bars(
    axes: Axes,
    sets: Sequence[str],
    ways: Sequence[Shown],
    values: Sequence[Sequence[float | None]],
    *,
    floor: float,
) -> None:
    """A group of bars for each set, a bar for each way."""
    known = [value for row in values for value in row if value is not None]
    if not known:
        return say(axes, "nothing to compare")
    places, width = np.arange(len(sets)), 0.8 / len(ways)
    for number, (way, row) in enumerate(zip(ways, values, strict=True)):
        left = places - 0.4 + (number + 0.5) * width
        heights = [0.0 if value is None else value - floor for value in row]
        axes.bar(left, heights, 0.92 * width, floor, **_looks(ways, way), label=_label(ways, way))
    axes.set_ylim(floor, floor + 1.1 * max(max(known) - floor, 0.2))
    axes.set_xlim(-0.55, len(sets) - 0.45)
    crowded = sum(map(len, sets)) > MOST_LETTERS
    slanted = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    axes.set_xticks(places, sets, **slanted)


def _curves(axes: Axes, ways: Sequence[Shown]) -> None:
    played = [way for way in ways if len(way.survival)]
    if not played:
        return say(axes, "no verify rounds")
    for way in played:
        steps = np.arange(1, len(way.survival) + 1)
        axes.plot(steps, way.survival, "o-", markersize=2.5, linewidth=1.2, **_looks(ways, way))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.set_xlim(0.6, max(len(way.survival) for way in played) + 0.4)


def _looks(ways: Sequence[Shown], way: Shown) -> dict:
    drafters = list(dict.fromkeys(other.drafter for other in ways))
    own = [other.decoding for other in ways if other.drafter == way.drafter]
    faded = own.index(way.decoding) / max(len(own), 1)
    return {"color": COLOURS[drafters.index(way.drafter) % len(COLOURS)], "alpha": 1 - 0.75 * faded}


def _label(ways: Sequence[Shown], way: Shown) -> str:
    alone = len({other.drafter for other in ways}) == 1
    return way.decoding if alone else f"{way.drafter} {way.decoding}"
