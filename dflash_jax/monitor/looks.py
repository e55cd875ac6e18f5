"""What the pictures have in common: size, colours, axes."""

from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's palette: told apart with any colour vision, and in grey.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
INK = "#333333"
INCHES, DOTS_PER_INCH = (8.0, 2.5), 200  # 1600 x 500 pixels


def figure(title: str) -> Figure:
    """An empty picture with its title."""
    drawn = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    drawn.suptitle(title, fontsize=9, fontweight="bold", color=INK)
    return drawn


def frame(axes: Axes, title: str, *, across: str, up: str) -> None:
    """Title, labels and a grid of horizontal lines."""
    axes.set_title(title, fontsize=8, color=INK)
    axes.set_xlabel(across, fontsize=7.5, color=INK)
    axes.set_ylabel(up, fontsize=7.5, color=INK)
    axes.tick_params(labelsize=7, colors=INK, length=2)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")


def legend(axes: Axes, corner: Literal["upper left", "upper right"]) -> None:
    """The legend, in a corner."""
    axes.legend(loc=corner, fontsize=7, labelcolor=INK, frameon=False)


def say(axes: Axes, text: str) -> None:
    """Words where there is nothing to draw."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=8, color="#777777")
