"""A conversation through the target's chat template: its tokens, and which of them the drafter learns.

    full     = render(messages)
    prompt_i = render(messages[:i] + generation prompt)      what the target saw before answer i
    upto_i   = render(messages[:i+1])
    trained  = full[len(prompt_i) : first end-of-turn at or before len(upto_i)], for each assistant turn i

Both shorter renders must be prefixes of the full one: otherwise the template rewrites earlier turns, and the
drafter would learn to continue texts that the target never sees.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from dflash_jax.errors import UserError

Tokenizer = Any  # a transformers PreTrainedTokenizerBase; transformers itself is not needed here


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """tokens: [n] int32; loss_mask: [n] bool, True on tokens that the target produced."""

    tokens: np.ndarray
    loss_mask: np.ndarray


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> Encoded:
    """Tokens of the whole conversation; the mask covers each answer with its end-of-turn token.

    The role header before an answer and what the template puts after its end-of-turn token are not trained.
    An assistant message with "truncated": true leaves out the end-of-turn token: the target never wrote it.
    One with "weight": 0 is context only.
    Raises UserError when the template fails, rewrites earlier turns, or closes an answer without eos_token.
    """
    full = _render(tokenizer, messages)
    loss_mask = np.zeros(len(full), bool)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or not message.get("weight", 1):
            continue
        if turn == 0:
            raise UserError("The conversation begins with an assistant message; put the user's turn before it.")
        prompt = _render(tokenizer, messages[:turn], answer_follows=True)
        upto = full if turn + 1 == len(messages) else _render(tokenizer, messages[: turn + 1])
        for shorter in (prompt, upto):
            _check_prefix(tokenizer, shorter, full=full, turn=turn)
        if tokenizer.eos_token_id not in full[len(prompt) : len(upto)]:
            raise UserError(
                f"messages[{turn}]: the chat template closes an answer without eos_token "
                f"({tokenizer.eos_token!r}); set the tokenizer's eos_token to the template's own."
            )
        end = full.index(tokenizer.eos_token_id, len(prompt))
        loss_mask[len(prompt) : end if message.get("truncated") else end + 1] = True
    return Encoded(np.array(full, np.int32), loss_mask)


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """[n] int32: the conversation so far, ending with the header that asks the target for an answer."""
    return np.array(_render(tokenizer, messages, answer_follows=True), np.int32)


def _render(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, answer_follows: bool = False
) -> list[int]:
    if tokenizer.chat_template is None:
        raise UserError(f"The tokenizer {tokenizer.name_or_path!r} has no chat template; use an instruct model's.")
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=False, add_generation_prompt=answer_follows
        )
    except jinja2.TemplateError as fault:
        roles = [message["role"] for message in messages]
        raise UserError(f"The chat template refuses a conversation with roles {roles}: {fault}") from fault


def _check_prefix(tokenizer: Tokenizer, shorter: list[int], *, full: list[int], turn: int) -> None:
    if full[: len(shorter)] == shorter:
        return
    pairs = enumerate(zip(shorter, full, strict=False))
    at = next((index for index, (a, b) in pairs if a != b), min(len(shorter), len(full)))
    alone, whole = (tokenizer.decode(tokens[at : at + 8]) for tokens in (shorter, full))
    raise UserError(
        f"messages[{turn}] (assistant): the chat template rewrites history. Rendered up to this turn, "
        f"the text from token {at} is {alone!r}; in the whole conversation it is {whole!r}. "
        "End the conversation with this turn, or use a chat template that keeps earlier turns as they are."
    )
