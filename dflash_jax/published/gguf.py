"""A GGUF model file read as if it were a Hugging Face folder: its configuration and its float32 weights.

w[out, in] = dequantise(blocks of w)          q and k of a llama: rows back from interleaved pairs to two halves
"""

import functools
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_jax.errors import UserError
from dflash_jax.published.stored import Index, Stored

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

# GGUF tensor name -> Hugging Face name; {} stands for the number of a layer.
PLAIN = {
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
BIASES = {f"blk.{{}}.attn_{x}.bias": f"model.layers.{{}}.self_attn.{x}_proj.bias" for x in "qkv"}
NAMES = {"llama": PLAIN, "qwen2": PLAIN | BIASES}  # by general.architecture


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
    tensor that a plain model of the architecture does not have (a bias, an expert).
    """
    reader, architecture = _open_plain(path)
    return _config(reader, architecture, path)


def tensors(path: pathlib.Path) -> Iterator[tuple[str, Stored]]:
    """(Hugging Face name, float32 tensor) of every weight, in the order of the file.

    Matrices are [out, in] as in torch. Whatever part of a tensor is read, the whole is dequantised, but once for
    all parts that are read one after another. Raises UserError at the call with the errors of `read_config`, and
    for heads of another width or a quantisation that gguf cannot undo.
    """
    reader, architecture = _open_plain(path)
    config, names = _config(reader, architecture, path), _names(reader, architecture, path)
    heads = {}
    if architecture == "llama":
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    _check_quantisations(reader, path)
    held: dict[str, np.ndarray] = {}

    def read(tensor: "ReaderTensor", count: int | None, index: Index) -> np.ndarray:
        if tensor.name not in held:
            held.clear()
            held[tensor.name] = _dequantised(tensor, heads=count)
        return held[tensor.name][index]

    found = []
    for tensor in reader.tensors:
        name, shape = names[tensor.name], tuple(int(size) for size in reversed(tensor.shape))
        count = heads.get(name.split(".")[-2])
        if count and shape[0] != count * config["head_dim"]:
            raise UserError(
                f"{path}: {tensor.name} has {shape[0]} rows, not {count} heads of {config['head_dim']}; "
                "heads that are rotated in part are not supported"
            )
        found.append((name, Stored(shape, "F32", functools.partial(read, tensor, count))))
    return iter(found)


def _open_plain(path: pathlib.Path) -> tuple["GGUFReader", str]:
    """The file and its architecture, which is one of those in NAMES and has no parts but theirs."""
    reader = open_reader(path)
    architecture = metadata(reader, "general.architecture", path=path)
    if architecture not in NAMES:
        raise UserError(
            f"{path} has the architecture {architecture!r}, not one of {sorted(NAMES)}. "
            "Use the model's Hugging Face folder instead."
        )
    scaling = [key for key in reader.fields if key.startswith(f"{architecture}.rope.scal")]
    scaling += [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_freqs")]
    if scaling:
        raise UserError(
            f"{path} scales its rotary positions ({scaling[0]}), which is not supported in GGUF. "
            "Use the model's Hugging Face folder instead."
        )
    names = _names(reader, architecture, path)
    if unmapped := [tensor.name for tensor in reader.tensors if tensor.name not in names]:
        raise UserError(
            f"{path}: tensor {unmapped[0]!r} has no place in a plain {architecture}. "
            "Use the model's Hugging Face folder instead."
        )
    return reader, architecture


def _config(reader: "GGUFReader", architecture: str, path: pathlib.Path) -> dict[str, Any]:
    def value(key: str) -> Any:
        return metadata(reader, key, path=path)

    def value_or_null(key: str) -> Any:
        return value(key) if key in reader.fields else None

    def of_model(key: str) -> Any:
        return value(f"{architecture}.{key}")

    width, heads, layers = (of_model(key) for key in ("embedding_length", "attention.head_count", "block_count"))
    common = {
        "model_type": architecture,
        "hidden_act": "silu",  # the only activation of either architecture
        "hidden_size": width,
        "intermediate_size": of_model("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": of_model("attention.head_count_kv"),
        "rms_norm_eps": of_model("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": of_model("rope.freq_base")},
        "max_position_embeddings": of_model("context_length"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "bos_token_id": value_or_null("tokenizer.ggml.bos_token_id"),
        "pad_token_id": value_or_null("tokenizer.ggml.padding_token_id"),
    }
    if architecture == "llama":
        head_dim = of_model("rope.dimension_count")
        own = {
            "vocab_size": of_model("vocab_size"),
            "head_dim": head_dim,
            # Not metadata: a bias would be a tensor without a name in NAMES.
            "attention_bias": False,
            "mlp_bias": False,
        }
    else:
        head_dim = width // heads
        own = {
            "vocab_size": _rows_of_embedding(reader, path),  # metadata has it for few files
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * layers,
        }
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        if value_or_null(f"{architecture}.{key}") not in (None, head_dim):
            raise UserError(
                f"{path}: {architecture}.{key} is {of_model(key)}, but its heads are {head_dim} wide; "
                "heads that are rotated in part are not supported"
            )
    return common | own


def _rows_of_embedding(reader: "GGUFReader", path: pathlib.Path) -> int:
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            return int(tensor.shape[-1])
    raise UserError(f"{path} has no tensor 'token_embd.weight'; convert the model again")


def _check_quantisations(reader: "GGUFReader", path: pathlib.Path) -> None:
    for kind, tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.items():
        try:
            _dequantised(tensor, heads=None, rows=1)
        except NotImplementedError as error:
            raise UserError(
                f"{path}: {tensor.name} is quantised as {kind.name}, which gguf cannot undo; "
                "use a file in another quantisation"
            ) from error


def _dequantised(tensor: "ReaderTensor", *, heads: int | None, rows: int | None = None) -> np.ndarray:
    """The tensor or its first rows; heads: how many have their rotary pairs interleaved, None for none."""
    from gguf.quants import dequantize

    weight = dequantize(tensor.data[:rows], tensor.tensor_type)
    if heads is not None:
        weight = _halves(weight, heads)
    # Own memory: a float32 tensor would otherwise be a read-only window on the file.
    return np.require(weight, np.float32, ["C", "W", "E"])


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """[heads * head_dim, in] with each head's rotary pairs interleaved -> the same rows, in halves."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _names(reader: "GGUFReader", architecture: str, path: pathlib.Path) -> dict[str, str]:
    layers = range(metadata(reader, f"{architecture}.block_count", path=path))
    return {
        stored.format(layer): published.format(layer)
        for layer in layers
        for stored, published in NAMES[architecture].items()
    }
