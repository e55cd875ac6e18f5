"""The target's tokenizer, from its Hugging Face folder or rebuilt from the metadata of its GGUF file.

A GGUF file holds the vocabulary and the merges, but names what comes before the merges with one word:
PRE_TOKENIZERS spells out what that word stands for.
"""

import dataclasses
import os
import pathlib
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from dflash_jax.errors import UserError
from dflash_jax.published.gguf import metadata, open_reader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True)
class Rules:
    """How a text becomes pieces, and how a piece becomes tokens.

    normalizer: changes the text before it is cut. cut: text -> pieces; merges never cross their borders.
    whole_pieces: a piece that the vocabulary has is one token, even if the merges would spell it otherwise.
    add_bos: whether a text begins with bos in a file that does not say so itself.
    """

    cut: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    whole_pieces: bool = False
    add_bos: bool = False


def _cut(numbers: str) -> pre_tokenizers.PreTokenizer:
    """Contractions, words, numbers (a regex), punctuation, line ends and spaces apart, then bytes."""
    regex = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# By tokenizer.ggml.pre.
PRE_TOKENIZERS = {
    # Many files of Llama 3 leave out add_bos_token: the word alone asks for bos.
    "llama-bpe": Rules(_cut(r"\p{N}{1,3}"), whole_pieces=True, add_bos=True),
    "qwen2": Rules(_cut(r"\p{N}"), normalizer=normalizers.NFC()),
    "smollm": Rules(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
    ),
}

# Values of tokenizer.ggml.token_type.
CONTROL = 3
USER_DEFINED = 4


def load_tokenizer(path: pathlib.Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a Hugging Face folder or of a .gguf file, with its chat template.

    Nothing is fetched. Raises UserError if the path is neither, if the folder holds no fast tokenizer, or if
    the file's kind of tokenizer is not supported.
    """
    # Without torch transformers says so on every import; a tokenizer does not need it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if path.is_dir():
        return _from_folder(path)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    raise UserError(f"{path} is neither a folder nor a .gguf file; give the target's folder or GGUF file")


def _from_folder(path: pathlib.Path) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} holds no tokenizer that transformers can load ({str(error).splitlines()[0]}); "
            "copy the target's tokenizer.json and tokenizer_config.json into it"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"{path} holds a {type(tokenizer).__name__}, which has no tokenizer.json; "
            "save the tokenizer as a fast one first"
        )
    return tokenizer


def _from_gguf(path: pathlib.Path) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    reader = open_reader(path)

    def value(key: str) -> Any:
        return metadata(reader, f"tokenizer.{key}", path=path)

    def value_or_none(key: str) -> Any:
        return value(key) if f"tokenizer.{key}" in reader.fields else None

    if (kind := value("ggml.model")) != "gpt2":
        raise UserError(
            f"{path} has a tokenizer of kind {kind!r}; only 'gpt2' (byte-level BPE) is read from GGUF. "
            "Use the model's Hugging Face folder instead."
        )
    if (pre := value("ggml.pre")) not in PRE_TOKENIZERS:
        raise UserError(
            f"{path} has the pre-tokenizer {pre!r}; supported in GGUF: {sorted(PRE_TOKENIZERS)}. "
            "Use the model's Hugging Face folder instead."
        )
    rules = PRE_TOKENIZERS[pre]
    pieces = value("ggml.tokens")
    types = value("ggml.token_type")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: token for token, piece in enumerate(pieces)},
            merges=[tuple(merge.split(" ")) for merge in value("ggml.merges")],
            ignore_merges=rules.whole_pieces,
        )
    )
    if rules.normalizer is not None:
        tokenizer.normalizer = rules.normalizer
    tokenizer.pre_tokenizer = rules.cut
    tokenizer.decoder = decoders.ByteLevel()
    control = [piece for piece, type in zip(pieces, types, strict=True) if type == CONTROL]
    user_defined = [piece for piece, type in zip(pieces, types, strict=True) if type == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=True) for piece in control])
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in user_defined])

    def special(key: str) -> str | None:
        token = value_or_none(f"ggml.{key}_token_id")
        return None if token is None else pieces[token]

    said = value_or_none("ggml.add_bos_token")
    add_bos = rules.add_bos if said is None else bool(said)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=pieces[value("ggml.bos_token_id")] if add_bos else special("bos"),
        eos_token=pieces[value("ggml.eos_token_id")],
        unk_token=special("unknown"),
        pad_token=special("padding"),
        extra_special_tokens=control,
        # These two decide what is added around a plain text; a chat template writes its own.
        add_bos_token=add_bos,
        add_eos_token=bool(value_or_none("ggml.add_eos_token")),
        chat_template=value_or_none("chat_template"),
        clean_up_tokenization_spaces=False,
    )
