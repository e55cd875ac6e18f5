"""The picture of an evaluation has its size and content for any number of drafters, ways and sets."""

import struct

import pytest
from matplotlib.figure import Figure

from dflash_jax.monitor.decoding_picture import Shown, draw_decoding

OURS = Shown("ours", "chain", [2.0, None, 2.5], [1.25, None, 1.5], [0.75, 0.5])
TREE = Shown("ours", "tree 15", [3.0, None, 3.5], [0.75, 1.0, 1.25], [1.0, 0.75])
THEIRS = Shown("theirs", "chain", [4.0, 3.0, 3.75], [2.0, 1.5, 1.75], [1.0, 1.0, 0.5])
UNKNOWN = Shown("ours", "chain", [None], [None], [])


def pixels(file):
    """Width and height from a PNG's header chunk."""
    return struct.unpack(">II", file.read_bytes()[16:24])


@pytest.mark.parametrize(
    ("sets", "ways"),
    [
        (["code", "talk", "all"], [OURS, TREE, THEIRS]),
        (["code"], [UNKNOWN]),
        (["code"], []),
        (["code"], [Shown(f"drafter {n}", "chain", [1.0], [1.0], [0.0]) for n in range(8)]),
    ],
    ids=["whole", "not played", "plain only", "more drafters than colours"],
)
def test_the_picture_has_its_size(tmp_path, sets, ways):
    draw_decoding(sets, ways, tmp_path / "decoding.png", title="a target")
    assert pixels(tmp_path / "decoding.png") == (1600, 500)


def test_the_panels_hold_the_numbers(tmp_path, monkeypatch):
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (figures.append(figure), save(figure, *a, **k)))
    draw_decoding(["code", "talk", "all"], [OURS, TREE, THEIRS], tmp_path / "decoding.png", title="a target")
    (figure,) = figures
    accept_length, survival, speed = figure.axes
    assert figure.get_suptitle() == "a target"
    # A bar reaches from the accept length of a round that accepts nothing.
    tops = [[bar.get_y() + bar.get_height() for bar in group] for group in accept_length.containers]
    assert [group[0] for group in tops] == [2.0, 3.0, 4.0]
    assert accept_length.get_ylim()[0] == 1.0
    assert [line.get_ydata().tolist() for line in survival.lines] == [[0.75, 0.5], [1.0, 0.75], [1.0, 1.0, 0.5]]
    assert [group[2].get_height() for group in speed.containers] == [1.5, 1.25, 1.75]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ours chain", "ours tree 15", "theirs chain"]
    colours = [line.get_color() for line in survival.lines]
    assert colours[0] == colours[1] != colours[2]
    assert survival.lines[1].get_alpha() < survival.lines[0].get_alpha()
