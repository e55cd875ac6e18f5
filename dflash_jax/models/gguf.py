"""A GGUF model file read as if it were a Hugging Face folder: its configuration and its float32 weights.

w[out, in] = dequantise(blocks of w)          q and k: rows back from interleaved pairs to two halves
"""

import functools
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_jax.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCHITECTURES = frozenset({"llama"})

# GGUF tensor name -> Hugging Face name; {} stands for the number of a layer.
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}


def open_reader(path: pathlib.Path) -> "GGUFReader":
    """Map a GGUF file into memory; no weight is read until it is used.

    Asking again for a file that has not changed costs nothing. Raises UserError if the package gguf is absent,
    or if the file is no complete GGUF file.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file; give the path of a .gguf file")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise UserError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    stat = path.stat()
    return _mapped(path, stat.st_mtime_ns, stat.st_size)


# Configuration, tokenizer and weights each open the file, and parsing a long vocabulary takes seconds.
@functools.lru_cache(maxsize=1)
def _mapped(path: pathlib.Path, changed_ns: int, size: int) -> "GGUFReader":
    del changed_ns, size  # a changed file is mapped anew
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise UserError(f"{path} is a GGUF file, which needs the package gguf: pip install gguf") from error
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise UserError(f"{path} is damaged or incomplete ({error}); fetch it again") from error


def metadata(reader: "GGUFReader", key: str, *, path: pathlib.Path) -> Any:
    """The value of a metadata key: int, float, bool, str or a list. UserError names a key that is absent."""
    if key not in reader.fields:
        raise UserError(f"{path} has no metadata {key!r}; convert the model again with a current converter")
    return reader.fields[key].contents()


def read_config(path: pathlib.Path) -> dict[str, Any]:
    """The model's configuration with the keys of a transformers-5 config.json.

    Raises UserError for another architecture, absent metadata, scaled or partial rotary positions, or a
    tensor that a plain Llama does not have (a bias, an expert).
    """
    return _config(_open_llama(path), path)


def tensors(path: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every weight as (Hugging Face name, float32 array), one at a time in the order of the file.

    Matrices are [out, in] as in torch, every array C-contiguous and the caller's own. The file is checked at
    the call, with the errors of `read_config`; UserError also for a quantisation that gguf cannot undo.
    """
    reader = _open_llama(path)
    config = _config(reader, path)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return _dequantised(reader, path, heads=heads, head_dim=config["head_dim"])


def _open_llama(path: pathlib.Path) -> "GGUFReader":
    reader = open_reader(path)
    architecture = metadata(reader, "general.architecture", path=path)
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{path} has the architecture {architecture!r}, not one of {sorted(ARCHITECTURES)}. "
            "Use the model's Hugging Face folder instead."
        )
    scaling = [key for key in reader.fields if key.startswith(f"{architecture}.rope.scal")]
    scaling += [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_freqs")]
    if scaling:
        raise UserError(
            f"{path} scales its rotary positions ({scaling[0]}), which is not supported in GGUF. "
            "Use the model's Hugging Face folder instead."
        )
    names = _names(reader, path)
    if unmapped := [tensor.name for tensor in reader.tensors if tensor.name not in names]:
        raise UserError(
            f"{path}: tensor {unmapped[0]!r} has no place in a plain Llama. "
            "Use the model's Hugging Face folder instead."
        )
    return reader


def _config(reader: "GGUFReader", path: pathlib.Path) -> dict[str, Any]:
    def value(key: str) -> Any:
        return metadata(reader, key, path=path)

    def value_or_null(key: str) -> Any:
        return value(key) if key in reader.fields else None

    head_dim = value("llama.rope.dimension_count")
    for key in ("llama.attention.key_length", "llama.attention.value_length"):
        if key in reader.fields and value(key) != head_dim:
            raise UserError(
                f"{path}: {key} is {value(key)} but llama.rope.dimension_count is {head_dim}; "
                "heads that are rotated in part are not supported"
            )
    return {
        "model_type": "llama",
        "hidden_act": "silu",  # the only activation of GGUF's llama architecture
        "vocab_size": value("llama.vocab_size"),
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": head_dim,
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        "max_position_embeddings": value("llama.context_length"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        # Not metadata: a bias would be a tensor without a name in NAMES.
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "bos_token_id": value_or_null("tokenizer.ggml.bos_token_id"),
        "pad_token_id": value_or_null("tokenizer.ggml.padding_token_id"),
    }


def _dequantised(
    reader: "GGUFReader", path: pathlib.Path, *, heads: dict[str, int], head_dim: int
) -> Iterator[tuple[str, np.ndarray]]:
    from gguf.quants import dequantize

    names = _names(reader, path)
    for tensor in reader.tensors:
        name = names[tensor.name]
        try:
            weight = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(
                f"{path}: {tensor.name} is quantised as {tensor.tensor_type.name}, which gguf cannot undo; "
                "use a file in another quantisation"
            ) from error
        for projection, count in heads.items():
            if f".{projection}." in name:
                if weight.shape[0] != count * head_dim:
                    raise UserError(
                        f"{path}: {tensor.name} has {weight.shape[0]} rows, not {count} heads of {head_dim}; "
                        "heads that are rotated in part are not supported"
                    )
                weight = _halves(weight, count, head_dim)
        # Own memory: a float32 tensor would otherwise be a read-only window on the file.
        yield name, np.require(weight, np.float32, ["C", "W", "E"])


def _halves(weight: np.ndarray, heads: int, head_dim: int) -> np.ndarray:
    """[heads * head_dim, in] with each head's rotary pairs interleaved -> the same rows, in halves."""
    pairs = weight.reshape(heads, head_dim // 2, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _names(reader: "GGUFReader", path: pathlib.Path) -> dict[str, str]:
    layers = range(metadata(reader, "llama.block_count", path=path))
    return {
        stored.format(layer): published.format(layer) for layer in layers for stored, published in NAMES.items()
    }
