"""Which turns of a conversation want an answer, and the conversation with answers put in.

A turn wants one where a user's message, or the last result of a tool, has no assistant's message behind it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dflash_jax.sources.messages import REASONING

Message = dict[str, Any]
ASKING = ("user", "tool")


def _asking(messages: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    roles = [message["role"] for message in messages]
    following = [*roles[1:], "user"]
    for index, (role, after) in enumerate(zip(roles, following, strict=True)):
        if role in ASKING and after == "user":
            yield index


def open_turn(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """The index of the first message that wants an answer; None where all have one."""
    return next(_asking(messages), None)


def open_turns(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many messages want an answer; none where the conversation ends before them."""
    return sum(1 for _ in _asking(messages))


def ends(answer: Mapping[str, Any]) -> bool:
    """Whether nobody can go on from an answer: it was cut, or calls a tool."""
    return bool(answer.get("truncated") or answer.get("tool_calls"))


def compact(message: Message) -> Message:
    """The message with its reasoning under one key of those that templates read, as it is stored."""
    spare = REASONING[1:] if REASONING[0] in message else ()
    return {name: value for name, value in message.items() if name not in spare}


def expanded(message: Message) -> Message:
    """The message with its reasoning under every key that a template may read."""
    thought = message.get(REASONING[0])
    return message | dict.fromkeys(REASONING, thought) if thought else message


def with_answers(messages: Sequence[Message], answers: Iterable[Message]) -> list[Message]:
    """The conversation with each answer behind the first message that wants one; it ends with one that `ends`."""
    dialogue = list(messages)
    for answer in answers:
        turn = open_turn(dialogue)
        assert turn is not None, "more answers than turns that want one"
        rest = [] if ends(answer) else dialogue[turn + 1 :]
        dialogue = [*dialogue[: turn + 1], answer, *rest]
    return dialogue
