"""A tensor that still lies in its file: its shape and dtype, and a way to read any rectangle of it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Self

import ml_dtypes
import numpy as np

Index = tuple[int | slice, ...]  # one entry per leading dimension, slices in steps of 1

# The dtypes of weights, as safetensors files spell them; any other dtype is some quantised form.
FLOATS: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """dtype: as safetensors files spell it; read: the array of an index, which is the whole tensor for ()."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Index], np.ndarray]

    @classmethod
    def of(cls, array: np.ndarray) -> Self:
        """An array that is in memory already, in one of the dtypes in FLOATS."""
        dtype = next(spelt for spelt, dtype in FLOATS.items() if dtype == array.dtype)
        return cls(array.shape, dtype, array.__getitem__)

    @property
    def size_bytes(self) -> int:
        """What reading the whole takes; 0 for a dtype that is never read."""
        return math.prod(self.shape) * FLOATS[self.dtype].itemsize if self.dtype in FLOATS else 0
