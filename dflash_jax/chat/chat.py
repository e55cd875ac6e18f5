"""A conversation through the target's chat template: its tokens, and which of them the drafter learns.

    prompt_i = render(messages[:i] + generation prompt)     what the target saw before answer i
    upto_i   = render(messages[:i+1])                       the same and the answer
    trained  = upto_i[len(prompt_i) : first token that ends an answer]

Answer i shares a record with the next one if the text of that begins with upto_i. Otherwise the template rewrites
history (Qwen3 drops earlier reasoning), and the conversation becomes several records, each as the target saw it.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dflash_jax.chat.rendering import Messages, Template, Tokenizer, Tools, check_answer, notes_on
from dflash_jax.chat.tokenizer import load_tokenizer
from dflash_jax.chat.turns import TokenisedText, Turn, Vocabulary
from dflash_jax.sources.conversations import Conversation
from dflash_jax.sources.unused import UnusedRow


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """tokens: [n] int32; loss_mask: [n] bool, True on tokens that the target produced."""

    tokens: np.ndarray
    loss_mask: np.ndarray

    def has_anchor(self) -> bool:
        """Whether two trained tokens stand in a row: the least that a block can start from."""
        return bool((self.loss_mask[:-1] & self.loss_mask[1:]).any())


@dataclasses.dataclass(frozen=True, eq=False)
class Answers:
    """The records of one conversation.

    split: the template rewrites history, so that one record could not hold all answers.
    cut: an answer is missing because of max_length.
    notes: what a report counts about the answers; short fixed texts, each at most once.
    """

    records: tuple[Encoded, ...]
    split: bool
    cut: bool
    notes: tuple[str, ...]


@dataclasses.dataclass
class Draft:
    """A record before it has tokens: its text, and the answers in it, the last of which ends it."""

    text: str
    turns: list[Turn]


class Chat:
    """A target's tokenizer and chat template.

    stop_tokens: the tokens that end an answer; the tokenizer's eos_token is always one of them.
    arguments: of the chat template (enable_thinking=False, ...), given to it whenever it renders.
    Raises UserError if there is no chat template, or if an argument is none of a template.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop_tokens: Collection[int], arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._template = Template(tokenizer, arguments or {})
        # A tokenizer.json may ask for either of these; texts are tokenised as they are.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        ends = {tokenizer.eos_token_id, *stop_tokens} - {None}
        self._vocabulary = Vocabulary(tokenizer.backend_tokenizer, stop_tokens=ends)

    @classmethod
    def open(
        cls, path: pathlib.Path, *, stop_tokens: Collection[int], arguments: Mapping[str, Any] | None = None
    ) -> "Chat":
        """The chat of a target's folder or .gguf file."""
        return cls(load_tokenizer(path), stop_tokens=stop_tokens, arguments=arguments)

    @property
    def template_digest(self) -> str:
        """The sha256, in hex, of the chat template and its arguments."""
        return self._template.digest

    @functools.cached_property
    def tokenizer_digest(self) -> str:
        """The sha256, in hex, of everything that turns a text into tokens, and of the special tokens' names."""
        special = json.dumps(self.tokenizer.special_tokens_map, sort_keys=True, default=str)
        return hashlib.sha256((self.tokenizer.backend_tokenizer.to_str() + special).encode()).hexdigest()

    @property
    def vocab(self) -> int:
        """The number of the tokenizer's tokens."""
        return len(self.tokenizer)

    def prompt(self, messages: Messages, tools: Tools = None) -> np.ndarray:
        """[n] int32: the conversation so far, ending with the header that asks the target for an answer."""
        text = self._template.render(messages, tools, answer_follows=True)
        return np.array(self._vocabulary.ids(text), np.int32)

    def encode(
        self,
        conversation: Conversation,
        *,
        max_length: int | None = None,
        last_turn_only: bool = False,
        too_long: str = "cut",
    ) -> Answers:
        """The records of a conversation up to its last trained answer; what follows that teaches nothing.

        The mask covers each answer with the token that ends it; the header before it and what the template puts
        after it are not trained. An assistant message with "truncated": true leaves out the token that ends it:
        the target never wrote that. One with "weight": 0 is context only.
        last_turn_only: train the last answer alone.
        max_length: of a record, in tokens. too_long: "cut" keeps those answers of a longer record that end within
        the limit, "drop" leaves the record out.
        Raises UnusedRow if nothing is left, or if the mask of an answer cannot be verified.
        """
        trained = _trained(conversation)
        if last_turn_only:
            trained = trained[-1:]
        whole = self._template.render(conversation.messages[: trained[-1] + 1], conversation.tools)
        # No record that fits is as long as this: a monster need not be tokenised to its end.
        reach = None if max_length is None else (max_length + 1) * self._vocabulary.longest
        tokenised = TokenisedText(self._vocabulary, whole[:reach])
        beyond = None if max_length is None else tokenised.beginning(max_length + 1)
        drafts = self._drafts(conversation, trained, whole=whole, beyond=beyond)
        records, kept, notes = [], 0, set()
        for draft in drafts:
            known = whole.startswith(draft.text)
            part = tokenised if known else TokenisedText(self._vocabulary, draft.text[:reach])
            turns = _fitting(draft, part, max_length=max_length, too_long=too_long)
            for turn in turns:
                message, answer = conversation.messages[turn.message], draft.text[turn.begin : turn.end]
                check_answer(message, answer, index=turn.message)
                notes |= notes_on(message, answer)
            if turns:
                records.append(_encoded(part, turns))
                kept += len(turns)
        records = [record for record in records if record.has_anchor()]
        if records:
            return Answers(tuple(records), len(drafts) > 1, kept < len(trained), tuple(sorted(notes)))
        if kept == len(trained):
            raise UnusedRow("no anchor", "no two trained tokens stand in a row: the answers are empty")
        found = f"no answer of two tokens ends within {max_length} of {len(tokenised.tokens)} or more tokens"
        remedy = "raise max_length" if too_long == "cut" else "raise max_length, or cut what is too long"
        raise UnusedRow("too long", f"{found}; {remedy}")

    def _drafts(
        self, conversation: Conversation, trained: list[int], *, whole: str, beyond: str | None
    ) -> list[Draft]:
        """The records' texts, in order.

        beyond: a text that is too long. Where an answer's context begins with it, so will those of all later
        answers, which are not rendered any more.
        """
        drafts: list[Draft] = []
        for index in trained:
            messages = conversation.messages[: index + 1]
            known = whole if index == trained[-1] else None
            text, begin = self._template.answer(messages, conversation.tools, text=known)
            turn = Turn(index, begin, len(text), truncated=messages[-1].get("truncated", False))
            if drafts and text.startswith(drafts[-1].text):
                drafts[-1] = Draft(text, [*drafts[-1].turns, turn])
            else:
                drafts.append(Draft(text, [turn]))
            if beyond is not None and text.startswith(beyond):
                break
        return drafts


def _trained(conversation: Conversation) -> list[int]:
    """Which messages are answers to learn; there is at least one."""
    answers = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    trained = [index for index in answers if conversation.messages[index].get("weight", 1)]
    if not trained:
        raise UnusedRow("no answer", "no assistant message to learn; add one, or give one weight 1")
    return trained


def _fitting(draft: Draft, part: TokenisedText, *, max_length: int | None, too_long: str) -> list[Turn]:
    """The answers of a record that end within the limit; none of a record to be dropped."""
    if max_length is None or part.count(len(draft.text)) <= max_length:
        return draft.turns
    return [turn for turn in draft.turns if too_long == "cut" and part.count(turn.end) <= max_length]


def _encoded(part: TokenisedText, turns: list[Turn]) -> Encoded:
    """The tokens up to the end of the last of the answers, which are trained."""
    loss_mask = np.zeros(part.count(turns[-1].end), bool)
    for turn in turns:
        loss_mask[part.trained(turn)] = True
    return Encoded(part.tokens[: len(loss_mask)], loss_mask)
