"""The tokens that end an answer, as a target's files name them."""

import pathlib
from collections.abc import Iterator
from typing import Any

from dflash_jax.published import gguf, hub_folder

GGUF_KEYS = ("eos", "eot", "eom")  # end of text, of a turn, of a message


def end_tokens(path: pathlib.Path) -> set[int]:
    """Token ids of a target folder's config.json and generation_config.json, or of a GGUF file's metadata.

    The family need not be supported, and a folder may hold a tokenizer only. Llama 3.1 names three tokens.
    """
    if path.is_file():
        reader = gguf.open_reader(path)
        names = (f"tokenizer.ggml.{key}_token_id" for key in GGUF_KEYS)
        return {int(gguf.metadata(reader, name, path=path)) for name in names if name in reader.fields}
    return {token for place in _places(path) for token in _listed(place.get("eos_token_id"))}


def stop_tokens(path: pathlib.Path, tokenizer: Any) -> tuple[int, ...]:
    """`end_tokens` and the tokenizer's own, ascending: where every decoding and every mask ends an answer."""
    return tuple(sorted((end_tokens(path) | {tokenizer.eos_token_id}) - {None}))


def _places(directory: pathlib.Path) -> Iterator[dict[str, Any]]:
    if (directory / "config.json").exists():
        fields = hub_folder.read_config(directory)
        yield fields
        yield fields.get("text_config") or {}
    yield hub_folder.read_generation(directory)


def _listed(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
