"""The message that a target's tokens are, and only as much of it as becomes the same tokens again."""

from collections.abc import Collection
from typing import Any

import numpy as np

from dflash_jax.answering.dialogue import Message

PLAIN = {"add_special_tokens": False}
LONGEST_TOKEN = 16  # tokens within which a text that is cut can change how its end is spelled


def as_message(tokenizer: Any, tokens: np.ndarray, *, stop: Collection[int]) -> Message:
    """An assistant message whose text becomes exactly these tokens again when it is tokenised.

    tokens: [n] int32; stop: tokens that end an answer, which are no part of its text. Where the target spelled a
    text in other tokens than its tokenizer would, the answer ends just before; such an answer, and one without a
    stop token, is marked "truncated". Thinking and calls of tools stay in the text as the target wrote them.
    """
    ended = bool(len(tokens)) and int(tokens[-1]) in stop
    said = tokens[:-1] if ended else tokens
    kept = len(said)
    while kept:
        again = np.asarray(tokenizer.encode(tokenizer.decode(said[:kept]), **PLAIN))
        if np.array_equal(again, said[:kept]):
            break
        shared = min(len(again), kept)
        apart = np.flatnonzero(again[:shared] != said[:shared])
        # Far behind the first token that is spelled otherwise no end can be right.
        kept = min(kept - 1, (int(apart[0]) if len(apart) else shared) + LONGEST_TOKEN)
    message = {"role": "assistant", "content": tokenizer.decode(said[:kept])}
    return message | ({} if ended and kept == len(said) else {"truncated": True})
