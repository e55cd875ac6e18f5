"""From tokens to a message whose text becomes the same tokens, with a tokenizer that merges."""

import numpy as np
import pytest

from dflash_jax.answering.spelling import as_message

WORDS = ("ab", "abc", "bc", "cd", "é")
END, OTHER_END = "<end>", "<stop>"


@pytest.fixture(scope="module")
def tokenizer():
    """A byte tokenizer with a few merges: "abc" is one token, "bcd" is "bc" "d", "é" is one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["ab", "abc", "bc", "cd", "Ã©"]
    vocab = {symbol: index for index, symbol in enumerate([*symbols, *merged])}
    merges = [("a", "b"), ("ab", "c"), ("b", "c"), ("c", "d"), ("Ã", "©")]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, additional_special_tokens=[OTHER_END, "<think>"]
    )


def message(tokenizer, *pieces, stop=(END,)):
    tokens = np.array(tokenizer.convert_tokens_to_ids(list(pieces)), np.int32)
    return as_message(tokenizer, tokens, stop=tokenizer.convert_tokens_to_ids(list(stop)))


def cut(text):
    return {"role": "assistant", "content": text, "truncated": True}


def test_a_finished_answer(tokenizer):
    assert message(tokenizer, "x", "abc", "Ã©", "y", END) == {"role": "assistant", "content": "xabcéy"}
    assert message(tokenizer, END) == {"role": "assistant", "content": ""}


def test_every_stop_token_ends_an_answer(tokenizer):
    both = (OTHER_END, END)
    whole = {"role": "assistant", "content": "xy"}
    assert (
        message(tokenizer, "x", "y", OTHER_END, stop=both) == whole == message(tokenizer, "x", "y", END, stop=both)
    )
    assert message(tokenizer, "x", OTHER_END) == cut(f"x{OTHER_END}")


def test_an_answer_without_an_end_is_cut(tokenizer):
    assert message(tokenizer, "x", "abc") == cut("xabc")
    assert message(tokenizer) == cut("")


def test_other_special_tokens_are_text(tokenizer):
    assert message(tokenizer, "<think>", "x", END) == {"role": "assistant", "content": "<think>x"}


@pytest.mark.parametrize(
    ("pieces", "kept"),
    [
        (("x", "a", "b", "y"), "xa"),  # the tokenizer says "ab"
        (("x", "ab", "cd", "y"), "xab"),  # it says "abc" "d", but "ab" alone is right
        (("x", "Ã", "©"), "x"),  # two halves of a letter
        (("x", "Ã"), "x"),  # half a letter
        (("a", "b"), "a"),
    ],
)
def test_an_answer_ends_before_a_spelling_that_is_not_the_tokenizers(tokenizer, pieces, kept):
    assert message(tokenizer, *pieces, END) == cut(kept)
    assert message(tokenizer, *pieces) == cut(kept)


def test_a_wrong_spelling_at_the_start_of_a_long_answer_takes_few_trials(tokenizer, monkeypatch):
    trials = []
    encode = type(tokenizer).encode
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, *a, **k: trials.append(0) or encode(self, *a, **k))
    assert message(tokenizer, "x", "a", "b", *["y"] * 2000, END) == cut("xa")
    assert len(trials) < 40
