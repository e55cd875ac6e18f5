"""A model folder as published on the hub: config.json and safetensors, one file or many with an index."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import safetensors

from dflash_jax.errors import UserError


def read_config(directory: pathlib.Path) -> dict[str, Any]:
    """The parsed config.json. Raises UserError if it is missing or not JSON."""
    file = directory / "config.json"
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"{directory}: no config.json; expected a model folder as published on the hub") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: not valid JSON ({error})") from None


def tensors(directory: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) one at a time, each in the dtype it is stored in (bfloat16 as ml_dtypes.bfloat16).

    Raises UserError if there is no weight file, or the index names a file that is not there.
    """
    for file in _weight_files(directory):
        try:
            with safetensors.safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    yield name, opened.get_tensor(name)
        except safetensors.SafetensorError as error:
            raise UserError(f"{file}: damaged or not a safetensors file ({error})") from None


def _weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    files = [directory / name for name in names]
    if missing := [file.name for file in files if not file.exists()]:
        raise UserError(f"{directory}: weight file {missing[0]} is missing ({len(missing)} in all)")
    return files
