"""One message of a conversation, as others write it, in the one spelling that chat templates read."""

from typing import Any

from dflash_jax.sources.json_texts import parse_json
from dflash_jax.sources.unused import UnusedRow, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
REASONING = ("reasoning_content", "reasoning", "thinking")  # templates read one or another
NULLABLE = ("assistant", "tool")  # whose content may be null: tool calls alone, a tool that returned nothing


def read_message(message: Any, *, where: str) -> dict[str, Any]:
    """The message with role, content (a string) and, where given, name, tool_call_id, tool_calls, the reasoning
    under each key of REASONING, truncated and weight. Other keys are left out.

    where: the message's place in the row, for errors. Raises UnusedRow.
    """
    if not isinstance(message, dict):
        raise _bad(where, f"must be an object with role and content; found {shown(message)}")
    if "from" in message and "role" not in message:
        message = _with_role(message, where=where)
    role = message.get("role")
    if role not in ROLES:
        raise _bad(where, f"has role {shown(role)}; use one of {', '.join(ROLES)}")
    read: dict[str, Any] = {"role": role, "content": _text(message.get("content"), role=role, where=where)}
    for key in ("name", "tool_call_id"):
        if (value := message.get(key)) is not None:
            if not isinstance(value, str):
                raise _bad(where, f'has "{key}": {shown(value)}; it must be a string')
            read[key] = value
    if calls := message.get("tool_calls"):
        if role != "assistant":
            raise UnusedRow(
                "bad tool call", f"{where} has tool_calls and role {role}; only an assistant calls tools"
            )
        read["tool_calls"] = tool_calls(calls, where=f"{where}.tool_calls")
    if role == "assistant" and (reasoning := _reasoning(message, where=where)):
        read |= dict.fromkeys(REASONING, reasoning)
    if (truncated := message.get("truncated")) is not None:
        if not isinstance(truncated, bool):
            raise _bad(where, f'has "truncated": {shown(truncated)}; it must be true or false')
        read["truncated"] = truncated
    if (weight := message.get("weight")) is not None:
        if weight not in (0, 1):
            raise _bad(where, f'has "weight": {shown(weight)}; it must be 0 (not learned) or 1')
        read["weight"] = int(weight)
    return read


def tool_calls(calls: Any, *, where: str) -> list[dict[str, Any]]:
    """The calls as {"type": "function", "function": {"name": .., "arguments": {..}}}, with "id" where given.

    calls: a list of such objects, or of their "function" alone, or the JSON text of a list. Arguments may be JSON
    text as well. Raises UnusedRow.
    """
    calls = parsed(calls, reason="bad tool call", where=where)
    if not isinstance(calls, list):
        raise UnusedRow("bad tool call", f"{where} must be a list of calls; found {shown(calls)}")
    return [_tool_call(call, where=f"{where}[{index}]") for index, call in enumerate(calls)]


def parsed(value: Any, *, reason: str, where: str) -> Any:
    """The value, or what it says if it is JSON text; UnusedRow of that reason if it is other text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except UnusedRow as fault:
        raise UnusedRow(
            reason, f"{where} is the text {shown(value)}, which is {fault.reason}: {fault.detail}"
        ) from fault


def _with_role(message: dict[str, Any], *, where: str) -> dict[str, Any]:
    speaker, value = message["from"], message.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise _bad(where, f"is from {shown(speaker)}; use one of {', '.join(SPEAKERS)}")
    if not isinstance(value, str):
        raise _bad(where, f'(from {speaker}) has "value": {shown(value)}; it must be a string')
    said: dict[str, Any] = {"content": value}
    if speaker == "function_call":
        calls = parsed(value, reason="bad tool call", where=f"{where}.value")
        said = {"content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}
    return message | said | {"role": SPEAKERS[speaker]}


def _text(content: Any, *, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role in NULLABLE:
        return ""
    if not isinstance(content, list):
        raise _bad(where, f"({role}) has content {shown(content)}; it must be a string or a list of text parts")
    return "".join(_part_text(part, where=f"{where}.content[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, *, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    found = f"a part of type {shown(part['type'])}" if isinstance(part, dict) and "type" in part else shown(part)
    raise _bad(where, f'must be {{"type": "text", "text": ".."}}, for only text is learned; found {found}')


def _tool_call(call: Any, *, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise UnusedRow("bad tool call", f"{where} must name the function it calls; found {shown(call)}")
    given = function.get("arguments")
    arguments = {} if given in (None, "") else parsed(given, reason="bad tool call", where=f"{where} arguments")
    if not isinstance(arguments, dict):
        raise UnusedRow(
            "bad tool call", f"{where} ({name}) needs an object as arguments; found {shown(arguments)}"
        )
    read = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return read if call.get("id") is None else {"id": call["id"], **read}


def _reasoning(message: dict[str, Any], *, where: str) -> str:
    given = [message[key] for key in REASONING if message.get(key)]
    for text in given:
        if not isinstance(text, str):
            raise _bad(where, f"has reasoning {shown(text)}; it must be a string")
        if text != given[0]:
            raise _bad(where, f"has two reasonings, {shown(given[0])} and {shown(text)}; keep one")
    return given[0] if given else ""


def _bad(where: str, what: str) -> UnusedRow:
    return UnusedRow("bad message", f"{where} {what}")
