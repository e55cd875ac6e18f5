"""A model folder as published on the hub: config.json and safetensors, one file or many with an index."""

import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import safetensors

from dflash_jax.errors import UserError
from dflash_jax.published.stored import Index, Stored

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
SHOWN = 40  # characters of a wrong value in a message


def read_config(directory: pathlib.Path) -> dict[str, Any]:
    """The parsed config.json. Raises UserError if it is missing or not a JSON object."""
    file = directory / "config.json"
    if not file.exists():
        raise UserError(f"{directory}: no config.json; expected a model folder as published on the hub")
    return _read_json(file)


def read_generation(directory: pathlib.Path) -> dict[str, Any]:
    """The parsed generation_config.json, empty where there is none. Raises UserError if it is no JSON object."""
    file = directory / "generation_config.json"
    return _read_json(file) if file.exists() else {}


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: expected a JSON object, found {json.dumps(found)[:SHOWN]}; fetch it again")
    return found


def weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The files that hold the folder's weights. Raises UserError where one of them or their index is missing."""
    places = _read_index(directory)
    if places is None and not (directory / SINGLE).exists():
        if shards := sorted(directory.glob("model-*-of-*.safetensors")):
            raise UserError(f"{directory}: {INDEX} is missing, which lists {shards[0].name} and the others")
        if pickled := sorted(directory.glob("*.bin")):
            raise UserError(
                f"{directory}: weights are read from safetensors files, and there is only {pickled[0].name}; "
                "save the model again with transformers, which writes safetensors"
            )
    files = [directory / name for name in sorted({SINGLE} if places is None else set(places.values()))]
    if missing := [file.name for file in files if not file.exists()]:
        raise UserError(f"{directory}: weight file {missing[0]} is missing ({len(missing)} in all)")
    return files


def tensors(directory: pathlib.Path) -> Iterator[tuple[str, Stored]]:
    """(name, tensor) of every tensor, file after file; only headers are read until a tensor is.

    Bfloat16 comes as ml_dtypes.bfloat16. Raises UserError at the call with the errors of `weight_files`, or if a
    file is damaged or lacks a tensor that the index says it holds.
    """

    # A file is mapped into memory, and what was read of it stays there until it is closed: one file at a time.
    @functools.lru_cache(maxsize=1)
    def opened(file: pathlib.Path) -> Any:
        try:
            return safetensors.safe_open(file, framework="numpy")
        except safetensors.SafetensorError as error:
            raise UserError(f"{file}: damaged or not a safetensors file ({error}); fetch it again") from None

    found: list[tuple[str, Stored]] = []
    lacking = set((_read_index(directory) or {}).items())
    for file in weight_files(directory):
        for name in opened(file).offset_keys():
            header = opened(file).get_slice(name)
            read = functools.partial(_read, opened, file, name)
            found.append((name, Stored(tuple(header.get_shape()), header.get_dtype(), read)))
            lacking.discard((name, file.name))
    if lacking:
        name, file_name = min(lacking)
        raise UserError(
            f"{directory / INDEX}: {name} is not in {file_name} ({len(lacking)} such tensors in all); "
            "index and files are of different models, fetch the folder again"
        )
    return iter(found)


def _read(opened: Callable[[pathlib.Path], Any], file: pathlib.Path, name: str, index: Index) -> np.ndarray:
    return np.asarray(opened(file).get_slice(name)[index])


def _read_index(directory: pathlib.Path) -> dict[str, str] | None:
    """The file that holds each tensor, by the folder's index; None where there is no index."""
    file = directory / INDEX
    if not file.exists():
        return None
    try:
        return dict(json.loads(file.read_text())["weight_map"])
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: not the index of a model ({error!r}); fetch it again") from None
