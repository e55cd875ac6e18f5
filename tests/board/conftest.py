"""A board on a fresh folder, and what it has warned of."""

import contextlib

import pytest

from dflash_jax.monitor.board import Board


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "tensorboard"


@pytest.fixture
def said():
    return []


@pytest.fixture
def opened(folder, said):
    with contextlib.closing(Board(folder, resumed_at=0, warn=said.append)) as opened:
        yield opened
