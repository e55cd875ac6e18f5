"""A safetensors file written piece by piece, so that no tensor needs to be in memory as a whole.

    size of the header, 8 bytes | header: JSON, padded with blanks to a multiple of 8 | tensors, without gaps

Dtypes come in a fixed order and names in order within each, as the safetensors package writes them: equal tensors
make equal bytes.
"""

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dflash_jax.published.stored import FLOATS, Stored

# In the package's order.
DTYPES = {"I64": np.dtype(np.int64), "F32": FLOATS["F32"], "BF16": FLOATS["BF16"], "BOOL": np.dtype(bool)}
PIECE_BYTES = 2**26
METADATA = {"format": "pt"}  # transformers refuses a file without it


def write_tensors(file: pathlib.Path, tensors: Mapping[str, Stored]) -> None:
    """Write tensors, whose dtypes are among DTYPES. Raises OSError where the disk does not take them."""
    order = list(DTYPES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for name in names:
        stored = tensors[name]
        start, end = end, end + math.prod(stored.shape) * DTYPES[stored.dtype].itemsize
        header[name] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for piece in pieces(tensors[name]):
                out.write(piece.astype(DTYPES[tensors[name].dtype], copy=False).tobytes())


def pieces(stored: Stored) -> Iterator[np.ndarray]:
    """A tensor in rows of about PIECE_BYTES together, single rows where they are longer."""
    rows = stored.shape[0]
    row_bytes = math.prod(stored.shape[1:]) * DTYPES[stored.dtype].itemsize
    step = max(1, PIECE_BYTES // row_bytes)
    for start in range(0, rows, step):
        yield stored.read((slice(start, min(start + step, rows)),))
