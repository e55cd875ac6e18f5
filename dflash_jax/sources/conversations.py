"""What a row of the data says: a conversation, in any of the formats that others write, or token ids.

    messages         {"messages": [{"role": .., "content": ..}, ..]}
    conversations    {"conversations": [{"from": "human", "value": ..}, {"from": "gpt", "value": ..}]}
    prompt           {"prompt": .., "response": ..}, or "completion"; without an answer it is only asked
    input_ids        {"input_ids": [..], "loss_mask": [..]}, or "tokens" and "labels" (data/token_rows.py)

Any of them may have "set", the name of its source; conversations may have "system" and "tools".
"""

import dataclasses
import pathlib
from typing import Any

from dflash_jax.errors import UserError
from dflash_jax.sources.files import check_file, read_parts, row_word, rows_of
from dflash_jax.sources.messages import parsed, read_message
from dflash_jax.sources.token_rows import TokenRow, read_token_row
from dflash_jax.sources.unused import UnusedRow, shown

# The key that shows the format; a prompt may stand beside any of them.
FORMATS = ("messages", "conversations", "response", "completion", "input_ids", "tokens")
NEEDED = "a row needs messages, conversations, prompt with response or completion, or input_ids"


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One conversation. `set` names its source, "" if none; `tools` are definitions for the chat template.

    `messages` are dicts with "role", one of messages.ROLES, and "content", a string; read_message says what else
    they may hold. An assistant message may carry "truncated": true when its answer was cut by a token limit, and
    "weight": 0 when it is not to be learned (an example that somebody else wrote; the key of OpenAI's fine-tuning
    format). Calls of tools have their arguments as a dict.
    """

    messages: tuple[dict[str, Any], ...]
    set: str = ""
    tools: tuple[dict[str, Any], ...] | None = None


def parse_row(row: dict[str, Any]) -> Conversation | TokenRow:
    """What the row says; a key that is null counts as absent. Raises UnusedRow."""
    given = {key: value for key, value in row.items() if value is not None}
    found = [key for key in FORMATS if key in given and (key != "tokens" or isinstance(given[key], list))]
    if len(found) > 1:
        raise UnusedRow("unknown format", f"the row has {' and '.join(found)}; keep one, for each says it all")
    if not found and "prompt" not in given:
        raise UnusedRow("unknown format", f"{NEEDED}; found the keys {shown(sorted(row))}")
    source = given.get("set", "")
    if not isinstance(source, str):
        raise UnusedRow("unknown format", f'"set" must be a string; found {shown(source)}')
    key = found[0] if found else "prompt"
    if key in ("input_ids", "tokens"):
        return read_token_row(given, key=key, source=source)
    messages = _listed(given, key) if key in ("messages", "conversations") else _asked(given, key)
    if system := given.get("system"):
        if messages[0]["role"] in ("system", "developer"):
            raise UnusedRow(
                "bad message", "the row has a system prompt under system and in its messages; keep one"
            )
        messages.insert(0, read_message({"role": "system", "content": system}, where="system"))
    return Conversation(tuple(messages), source, _tools(given))


def read_conversations(path: str | pathlib.Path) -> list[Conversation]:
    """All conversations of a file, in order; blank lines are skipped.

    Raises UserError that names the file, the line or row and what was found there, at the first that is unusable.
    """
    path = pathlib.Path(path)
    check_file(path)
    conversations = []
    for part in read_parts([path]):
        for number, row in rows_of(part):
            try:
                if isinstance(row, UnusedRow):
                    raise row
                conversations.append(_conversation(row))
            except UnusedRow as fault:
                raise UserError(f"{path}, {row_word(path)} {number}: {fault}") from fault
    if not conversations:
        raise UserError(f'{path} holds no conversations; give one JSON object {{"messages": [...]}} a line.')
    return conversations


def _conversation(row: dict[str, Any]) -> Conversation:
    read = parse_row(row)
    if isinstance(read, TokenRow):
        raise UnusedRow("unknown format", "token ids, where the text of a conversation is needed")
    return read


def _listed(row: dict[str, Any], key: str) -> list[dict[str, Any]]:
    messages = parsed(row[key], reason="bad message", where=key)
    if not isinstance(messages, list):
        raise UnusedRow("bad message", f"{key} must be a list of messages; found {shown(messages)}")
    if not messages:
        raise UnusedRow("bad message", f"{key} is an empty list")
    return [read_message(message, where=f"{key}[{index}]") for index, message in enumerate(messages)]


def _asked(row: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The messages of a prompt and, under `key`, its answer; the prompt alone if `key` is "prompt"."""
    if "prompt" not in row:
        raise UnusedRow("unknown format", f"the row has {key} but no prompt; found the keys {shown(sorted(row))}")
    texts = {"user": "prompt"} | ({} if key == "prompt" else {"assistant": key})
    for name in texts.values():
        if not isinstance(row[name], str):
            raise UnusedRow("bad message", f"{name} must be a string; found {shown(row[name])}")
    return [{"role": role, "content": row[name]} for role, name in texts.items()]


def _tools(row: dict[str, Any]) -> tuple[dict[str, Any], ...] | None:
    tools = parsed(row.get("tools") or None, reason="bad tool call", where="tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnusedRow("bad tool call", f"tools must be a list of objects; found {shown(tools)}")
    return tuple(tools) or None
