"""Tapped layers against the lists that z-lab's code gives."""

import json

import pytest
from tiny_models import GOLDEN

from dflash_jax.errors import UserError
from dflash_jax.models.taps import checked_taps, most_taps, published_taps


def test_published_taps_of_real_models():
    assert published_taps(36, 5) == (1, 9, 17, 25, 33)
    assert published_taps(64, 5) == (1, 16, 31, 46, 61)
    assert published_taps(28, 5) == (1, 7, 13, 19, 25)
    assert published_taps(30, 5) == (1, 8, 14, 20, 27)  # 7.5 and 20.5 round to even


def test_published_taps_equal_z_labs():
    listed = json.loads((GOLDEN / "zlab_target_layer_ids.json").read_text())
    assert len(listed) > 20
    for sizes, expected in listed.items():
        layers, count = map(int, sizes.split(","))
        assert list(published_taps(layers, count)) == expected, sizes


def test_a_single_tap_is_in_the_middle():
    assert published_taps(36, 1) == (18,)


def test_rising_taps_below_the_last_layer_pass():
    assert checked_taps([0, 3, 34], 36) == (0, 3, 34)
    assert checked_taps((2,), 4) == (2,)


@pytest.mark.parametrize("taps", [[], [3, 3], [4, 2], [-1, 2], [1, 35], [40]])
def test_other_taps_are_refused_with_a_right_list(taps):
    with pytest.raises(UserError, match=r"drafter\.taps: found .* from 0 to 34 .*\[1, 9, 17, 25, 33\]") as error:
        checked_taps(taps, 36)
    assert str(taps) in str(error.value)


@pytest.mark.parametrize("layers", range(4, 41))
def test_one_tap_more_than_the_most_would_come_twice(layers):
    most = most_taps(layers)
    assert checked_taps(published_taps(layers, most), layers)
    with pytest.raises(UserError):
        checked_taps(published_taps(layers, most + 1), layers)


@pytest.mark.parametrize("layers", range(3, 41))
def test_the_suggested_list_would_pass(layers):
    with pytest.raises(UserError) as error:
        checked_taps([layers], layers)
    suggestion = json.loads(str(error.value).split("for example ")[1])
    assert checked_taps(suggestion, layers) == tuple(suggestion)
