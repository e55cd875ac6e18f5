"""Written safetensors files against those of the safetensors package."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax.published import tensor_file
from dflash_jax.published.stored import Stored
from dflash_jax.published.tensor_file import METADATA, pieces, write_tensors

SPELLINGS = {"int64": "I64", "float32": "F32", "bfloat16": "BF16", "bool": "BOOL"}


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(2)
    return {
        "b.weight": random.standard_normal((7, 5)).astype(ml_dtypes.bfloat16),
        "a.weight": random.standard_normal((3, 2)).astype(np.float32),
        "layers.10.x": random.standard_normal(9).astype(ml_dtypes.bfloat16),
        "layers.2.x": random.standard_normal(9).astype(ml_dtypes.bfloat16),
        "t2d": random.random(11) < 0.5,
        "d2t": random.integers(0, 9, 4),
    }


@pytest.mark.parametrize("piece_bytes", [1, 30, 2**20])
def test_bytes_are_those_of_the_package(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", piece_bytes)
    stored = {
        name: Stored(array.shape, SPELLINGS[array.dtype.name], array.__getitem__)
        for name, array in arrays().items()
    }
    write_tensors(tmp_path / "ours", stored)
    save_file(arrays(), tmp_path / "theirs", METADATA)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_no_piece_is_larger_than_it_may_be(monkeypatch):
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 24)
    array = np.arange(35, dtype=np.float32).reshape(7, 5)
    found = list(pieces(Stored.of(array)))
    assert [piece.shape for piece in found] == [(1, 5)] * 7
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 45)
    assert [piece.shape for piece in pieces(Stored.of(array))] == [(2, 5)] * 3 + [(1, 5)]
