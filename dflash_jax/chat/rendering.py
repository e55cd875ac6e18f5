"""The text that a chat template makes of a conversation, and where in it an answer begins.

prompt = render(messages[:-1] + generation prompt)      what the target saw before it wrote the last message
text   = render(messages)                               the prompt and the answer, as one text
"""

import bisect
import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from dflash_jax.errors import UserError
from dflash_jax.sources.unused import UnusedRow, shown

Tokenizer = Any  # a transformers PreTrainedTokenizerFast; transformers itself is not needed here
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None

# What a template raises on messages that it was not written for: its own complaint, or Python's.
FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
OWN_KEYS = ("truncated", "weight")  # of a message; no server shows them to a template
REASONING_MODE = (
    "give the template arguments of the reasoning mode that the answers were written in "
    "(such as template.enable_thinking=false)"
)

REASONING_LEFT_OUT = "reasoning left out"
EMPTY_REASONING = "empty reasoning trained"
EMPTY_BLOCK = re.compile(r"\s*<think>\s*</think>")


class Template:
    """A tokenizer's chat template with the arguments that it is always given.

    Raises UserError if the tokenizer has none, or if an argument is none of a template.
    """

    def __init__(self, tokenizer: Tokenizer, arguments: Mapping[str, Any]) -> None:
        try:
            tokenizer.get_chat_template()
        except ValueError as fault:
            raise UserError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template; use an instruct model's."
            ) from fault
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        if taken := sorted(arguments.keys() & parameters.keys()):
            raise UserError(f"template.{taken[0]} is not an argument of a chat template; leave it out")
        self._tokenizer = tokenizer
        self._arguments = dict(arguments)

    @property
    def digest(self) -> str:
        """The sha256, in hex, of the template and its arguments."""
        content = json.dumps([self._tokenizer.chat_template, self._arguments], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def render(self, messages: Messages, tools: Tools = None, *, answer_follows: bool = False) -> str:
        """The messages as one text; with answer_follows, also the header that asks the target for an answer.

        Raises UnusedRow("template") if the template refuses the messages or fails on them.
        """
        plain = [{key: value for key, value in message.items() if key not in OWN_KEYS} for message in messages]
        try:
            return self._tokenizer.apply_chat_template(
                plain,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=answer_follows,
                **self._arguments,
            )
        except FAULTS as fault:
            roles, said = shown([message["role"] for message in messages]), " ".join(str(fault).split())
            raise UnusedRow(
                "template", f"the chat template refuses a conversation with roles {roles}: {said}"
            ) from fault

    def answer(self, messages: Messages, tools: Tools = None, *, text: str | None = None) -> tuple[str, int]:
        """The prompt and the last message as one text, and the character at which the answer begins.

        text: render(messages, tools), where it is known.
        Raises UnusedRow("unverified") if the template renders another prompt with the answer than without it.
        """
        if len(messages) == 1:
            raise UnusedRow(
                "template", "the conversation begins with an assistant message; put the user's turn before it"
            )
        prompt = self.render(messages[:-1], tools, answer_follows=True)
        if text is None:
            text = self.render(messages, tools)
        if text.startswith(prompt):
            return text, len(prompt)
        # Once the answer is there, gpt-oss drops the reasoning before earlier tool calls, which the target saw.
        # The answer is what follows the turn before it, if there is no doubt where that is.
        before = self._rendered_or_empty(messages[:-2], tools)
        turn = prompt[_agreement(before, prompt) :]
        if turn and prompt.count(turn) == text.count(turn) == 1:
            return prompt + text[text.index(turn) + len(turn) :], len(prompt)
        at = _agreement(prompt, text)
        raise UnusedRow(
            "unverified",
            f"messages[{len(messages) - 1}]: its prompt goes on with {prompt[at : at + 40]!r}, where the chat "
            f"template renders {text[at : at + 40]!r} once the answer is there; {REASONING_MODE}",
        )

    def _rendered_or_empty(self, messages: Messages, tools: Tools) -> str:
        try:
            return self.render(messages, tools) if messages else ""
        except UnusedRow:
            return ""


def _agreement(one: str, other: str) -> int:
    """The number of characters that both texts begin with."""
    shorter = min(len(one), len(other))
    return bisect.bisect_left(range(1, shorter + 1), True, key=lambda size: one[:size] != other[:size])


def check_answer(message: Mapping[str, Any], answer: str, *, index: int) -> None:
    """Raise UnusedRow("unverified") if the rendered answer lacks what the message says.

    White space does not count: templates trim it, and set reasoning apart with their own.
    """
    content = message["content"].strip()
    if content not in answer and "".join(content.split()) not in "".join(answer.split()):
        left_out = "the answer's text"
    elif any(call["function"]["name"] not in answer for call in message.get("tool_calls") or ()):
        left_out = "the answer's tool calls"
    else:
        return
    raise UnusedRow(
        "unverified",
        f"messages[{index}]: the template leaves out {left_out}, or a part of it; use the target's own template, "
        "and keep reasoning under reasoning_content",
    )


def notes_on(message: Mapping[str, Any], answer: str) -> set[str]:
    """What a report counts about a rendered answer: REASONING_LEFT_OUT, EMPTY_REASONING."""
    reasoning = message.get("reasoning_content") or ""
    if reasoning:
        return set() if reasoning.strip() in answer else {REASONING_LEFT_OUT}
    if EMPTY_BLOCK.match(answer) and not EMPTY_BLOCK.match(message["content"]):
        return {EMPTY_REASONING}
    return set()
