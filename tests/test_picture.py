"""The report's picture has its size and content for any length of run."""

import math
import struct

import numpy as np
import pytest
from matplotlib.figure import Figure

from dflash_jax.monitor.picture import draw_report, smooth

LINES = [{"step": step, "loss": 9 / step, "accept_len": 1 + step / 50, "blocks": 40} for step in range(1, 41)]
EVALUATIONS = [
    {"step": 0, "accept_len": 1.0, "survival_by_position": [0.0, 0.0, 0.0]},
    {"step": 40, "accept_len": 1.75, "survival_by_position": [0.5, 0.25, 0.125]},
]


def pixels(file):
    """Width and height from a PNG's header chunk."""
    content = file.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (figures.append(figure), save(figure, *a, **k)))
    return figures


@pytest.mark.parametrize(
    ("lines", "evaluations"),
    [
        (LINES, EVALUATIONS),
        (LINES, []),
        (LINES[:1], EVALUATIONS[:1]),
        ([], EVALUATIONS[:1]),
        ([], []),
        ([{"step": 1, "loss": "nan", "accept_len": "nan", "blocks": 0}], []),
    ],
    ids=["whole", "no evaluation", "one of each", "not trained", "empty", "only a bad step"],
)
def test_the_picture_has_its_size(tmp_path, lines, evaluations):
    draw_report(lines, evaluations, tmp_path / "report.png", title="a run")
    assert pixels(tmp_path / "report.png") == (1600, 500)


def test_the_panels_hold_the_numbers(tmp_path, drawn):
    draw_report(LINES, EVALUATIONS, tmp_path / "report.png", title="a run")
    (figure,) = drawn
    loss, accept, survival = figure.axes
    assert figure.get_suptitle() == "a run"
    assert loss.lines[0].get_xydata().tolist() == [[step, 9 / step] for step in range(1, 41)]
    assert accept.lines[1].get_xydata().tolist() == [[0, 1.0], [40, 1.75]]
    assert accept.get_ylim()[0] == 1.0
    assert [(bar.get_center()[0], bar.get_height()) for bar in survival.patches] == [
        (1, 0.5),
        (2, 0.25),
        (3, 0.125),
    ]
    assert survival.texts[0].get_text().startswith("accept length 1.88")
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)


def test_an_evaluation_that_decoded_only_is_no_point_of_the_curve(tmp_path, drawn):
    decoded = {"step": 44, "decode_accept_len": 1.5}
    draw_report(LINES, [*EVALUATIONS, decoded], tmp_path / "report.png", title="a run")
    curve = drawn[0].axes[1].lines[1]
    assert curve.get_xydata().tolist() == [[0, 1.0], [40, 1.75]]
    assert curve.get_label() == "held-out, last 1.75"
    assert [bar.get_height() for bar in drawn[0].axes[2].patches] == [0.5, 0.25, 0.125]


def test_smoothing_pools_the_neighbours_by_weight():
    values, weights = np.array([1.0, 4.0, math.nan, 2.0]), np.array([1.0, 3.0, 5.0, 2.0])
    # (1 + 12) / 4, the same again as the NaN weighs nothing, (12 + 4) / 5, 4 / 2
    assert smooth(values, weights, reach=1).tolist() == [3.25, 3.25, 3.2, 2.0]
    assert smooth(values, weights, reach=0)[[0, 1, 3]].tolist() == [1.0, 4.0, 2.0]
    assert math.isnan(smooth(values, weights, reach=0)[2])
