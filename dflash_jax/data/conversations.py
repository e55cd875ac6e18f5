"""Conversations from a JSON-lines file: one object a line with "messages" and, if wanted, "set"."""

import dataclasses
import hashlib
import io
import json
import pathlib
from typing import Any

from dflash_jax.errors import UserError

ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One conversation. `messages` are dicts with "role" and "content"; `set` names its source, "" if none.

    An assistant message may carry "truncated": true when its answer was cut by a token limit, and "weight": 0 when
    it is not to be learned (an example that somebody else wrote; the key of OpenAI's fine-tuning format).
    """

    messages: tuple[dict[str, Any], ...]
    set: str = ""


def read_conversations(path: str | pathlib.Path) -> list[Conversation]:
    """All conversations of a JSON-lines file, in order; blank lines are skipped.

    Raises UserError that names the file, the line and what was found there.
    """
    conversations = []
    with _opened(path) as lines:
        for number, raw in enumerate(lines, start=1):
            if not raw.strip():
                continue
            try:
                conversations.append(_parse(raw))
            except ValueError as fault:
                raise UserError(f"{path}, line {number}: {fault}.") from fault
    if not conversations:
        raise UserError(f'{path} holds no conversations; give one JSON object {{"messages": [...]}} a line.')
    return conversations


def content_digest(path: str | pathlib.Path) -> str:
    """The sha256 of the file's bytes, in hex."""
    with _opened(path) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _opened(path: str | pathlib.Path) -> io.BufferedReader:
    try:
        return pathlib.Path(path).open("rb")
    except OSError as fault:
        raise UserError(f"Cannot read conversations from {path}: {fault.strerror}.") from fault


def _parse(raw: bytes) -> Conversation:
    try:
        line = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as fault:
        raise ValueError(f"not UTF-8 text ({fault.reason} at byte {fault.start})") from fault
    except json.JSONDecodeError as fault:
        raise ValueError(f"not valid JSON ({fault.msg} at column {fault.colno})") from fault
    messages = line.get("messages") if isinstance(line, dict) else None
    if not isinstance(messages, list) or not messages:
        found = sorted(line) if isinstance(line, dict) else type(line).__name__
        raise ValueError(f'needs a non-empty list under "messages"; found {found}')
    for index, message in enumerate(messages):
        _check_message(message, where=f"messages[{index}]")
    source = line.get("set", "")
    if not isinstance(source, str):
        raise ValueError(f'"set" must be a string; found {source!r}')
    return Conversation(tuple(messages), source)


def _check_message(message: Any, *, where: str) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be an object with role and content; found {message!r:.80}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"{where} has role {role!r}; use one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"{where} has content of type {type(content).__name__}; it must be a string")
    if any("\ud800" <= letter <= "\udfff" for letter in content):
        raise ValueError(f"{where} holds half of a surrogate pair, which no tokenizer can encode; remove it")
    if not isinstance(message.get("truncated", False), bool):
        raise ValueError(f'{where} has "truncated": {message["truncated"]!r}; it must be true or false')
    if message.get("weight", 1) not in (0, 1):
        raise ValueError(f'{where} has "weight": {message["weight"]!r}; it must be 0 (not learned) or 1')
