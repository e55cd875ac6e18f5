"""A record as text for a person, with the tokens that are trained marked.

<|im_start|>user
Hello<|im_end|>
<|im_start|>assistant
«Hi.<|im_end|>»          on a terminal: a green background
"""

import itertools
import unicodedata
from typing import Any

import numpy as np

from dflash_jax.chat.chat import Encoded

GREEN, PLAIN = "\x1b[30;42m", "\x1b[0m"


def show(tokenizer: Any, encoded: Encoded, *, colour: bool) -> str:
    """The text of a record, special tokens and all; stretches that are trained in «» or, with `colour`, green.

    A control character is written as its escape, so that no text can play tricks on the terminal.
    """
    said = []
    for text, is_trained in _stretches(tokenizer, encoded):
        visible = "".join(map(_visible, text))
        if not is_trained:
            said.append(visible)
        elif colour:
            # A background would run on to the end of the screen's line, and a line end has none to show.
            lines = visible.replace("\n", "↵\n").split("\n")
            said.append("\n".join(f"{GREEN}{line}{PLAIN}" if line else line for line in lines))
        else:
            said.append(f"«{visible}»")
    return "".join(said)


def _stretches(tokenizer: Any, encoded: Encoded) -> list[tuple[str, bool]]:
    """(text, whether it is trained) of the longest stretches of one kind."""
    borders = (np.flatnonzero(np.diff(encoded.loss_mask)) + 1).tolist()
    stretches, before = [], ""
    for start, end in itertools.pairwise([0, *borders, len(encoded.tokens)]):
        # Some tokenizers take away the space at the beginning of what they decode, so all is decoded up to here.
        upto = _decode(tokenizer, encoded.tokens[:end])
        is_continued = upto.startswith(before)  # not where a border goes through the bytes of a character
        text = upto[len(before) :] if is_continued else _decode(tokenizer, encoded.tokens[start:end])
        stretches.append((text, bool(encoded.loss_mask[start])))
        before = upto
    return stretches


def _decode(tokenizer: Any, tokens: np.ndarray) -> str:
    return tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _visible(letter: str) -> str:
    is_control = unicodedata.category(letter) == "Cc" and letter not in "\n\t"
    return ascii(letter)[1:-1] if is_control else letter
