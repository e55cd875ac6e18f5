"""A target as a folder that a server can load: config.json, safetensors, tokenizer, and what ends an answer."""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

from dflash_jax.chat.tokenizer import load_tokenizer
from dflash_jax.published.end_tokens import stop_tokens
from dflash_jax.published.stored import FLOATS
from dflash_jax.published.targets import TargetFiles

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}  # of the families that come as GGUF
SPELLINGS = {"float32": "F32", "bfloat16": "BF16"}


def hub_target(path: pathlib.Path, folder: pathlib.Path, *, dtype: str) -> pathlib.Path:
    """A hub-style folder of the target at `path`: itself if it is one, else `folder`, written from a GGUF file.

    dtype: float32 or bfloat16, of the weights that are written. They are all in memory at once.
    """
    if path.is_dir():
        return path
    files = TargetFiles.open(path)
    tokenizer = load_tokenizer(path)
    folder.mkdir(parents=True)
    given = {key: value for key, value in files.fields.items() if value is not None}
    fields = given | {"architectures": [ARCHITECTURES[given["model_type"]]], "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    ends = {"eos_token_id": list(stop_tokens(path, tokenizer))}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    kind = FLOATS[SPELLINGS[dtype]]
    weights = {name: np.ascontiguousarray(stored.read(()), dtype=kind) for name, stored in files.tensors()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
