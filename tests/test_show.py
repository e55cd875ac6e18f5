"""Records as text: marks stand where the mask changes, whatever the tokens are made of."""

import numpy as np
import pytest
import tiny_runs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_jax.chat.chat import Encoded
from dflash_jax.chat.show import show
from dflash_jax.chat.tokenizer import load_tokenizer

GREEN, PLAIN = "\x1b[30;42m", "\x1b[0m"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    tiny_runs.save_tokenizer(path)
    return load_tokenizer(path)


def shown(tokenizer, pieces, *, colour=False):
    """show() of (text or token ids, whether trained)."""
    tokens, mask = [], []
    for piece, is_trained in pieces:
        ids = tokenizer.encode(piece, add_special_tokens=False) if isinstance(piece, str) else piece
        tokens += ids
        mask += [is_trained] * len(ids)
    return show(tokenizer, Encoded(np.array(tokens, np.int32), np.array(mask, bool)), colour=colour)


def test_trained_stretches_stand_in_brackets_and_special_tokens_are_seen(tokenizer):
    pieces = [("<|im_start|>user\nhi<|im_end|>\n", False), ("yes\nno<|im_end|>", True), ("\n", False), ("a", True)]
    assert shown(tokenizer, pieces) == "<|im_start|>user\nhi<|im_end|>\n«yes\nno<|im_end|>»\n«a»"
    assert shown(tokenizer, [("hi", True)]) == "«hi»"
    assert shown(tokenizer, [("hi", False)]) == "hi"


def test_a_terminal_gets_a_background_that_ends_with_each_line(tokenizer):
    assert shown(tokenizer, [("a\n", False), ("b\n\nc", True), ("d", False)], colour=True) == (
        f"a\n{GREEN}b↵{PLAIN}\n{GREEN}↵{PLAIN}\n{GREEN}c{PLAIN}d"
    )


def test_letters_of_several_tokens_are_whole(tokenizer):
    assert shown(tokenizer, [("né ", False), ("日本", True)]) == "né «日本»"  # a token a byte


def test_a_letter_that_a_border_cuts_is_shown_as_cut_and_nothing_else_is_lost(tokenizer):
    first, *rest = tokenizer.encode("é", add_special_tokens=False)
    assert shown(tokenizer, [("a", False), ([first], False), (rest, True), ("b", True)]) == "a\ufffd«\ufffdb»"


def test_control_characters_are_escaped(tokenizer):
    assert shown(tokenizer, [("\x1b[31m\ta\x00\r\n", True)]) == "«\\x1b[31m\ta\\x00\\r\n»"


def test_a_space_that_a_decoder_takes_from_the_beginning_of_a_text_is_kept():
    words = {"▁one": 0, "▁two": 1, "▁three": 2}
    core = Tokenizer(models.WordLevel(words, unk_token="▁one"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    assert tokenizer.decode([1]) == "two"
    assert shown(tokenizer, [([0], False), ([1, 2], True), ([0], False)]) == "one« two three» one"
