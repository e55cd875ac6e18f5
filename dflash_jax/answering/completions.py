"""What a chat completion request says, and the message that its response is.

A request spells out every way of sampling, or servers would fill in what the model's generation_config.json says:
a repetition penalty even where the answer is to be greedy.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.answering.dialogue import Message, compact
from dflash_jax.answering.generation import Generation
from dflash_jax.sources.messages import read_message
from dflash_jax.sources.unused import UnusedRow

# Values that say "off", which a server that does not know the key may be spared.
OFF = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
# Keys of a message that a request carries.
SENT = ("role", "content", "name", "tool_call_id", "reasoning_content", "reasoning")


class Refused(Exception):
    """The server does not answer this request, and would not if it were repeated. status: of HTTP, if not 200."""

    def __init__(self, said: str, *, status: int | None = None):
        super().__init__(said)
        self.status = status


@dataclass(frozen=True)
class Reply:
    """message: the assistant's; tokens, prompt_tokens: of the answer and before it, as the server counts them."""

    message: Message
    tokens: int | None
    prompt_tokens: int | None


def request_body(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    model: str,
    generation: Generation,
    seed: int,
) -> dict[str, Any]:
    """A request for the next answer. seed: of this answer."""
    body = {
        "model": model,
        "messages": [_sent(message) for message in messages],
        "max_tokens": generation.max_new_tokens,
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        **OFF,
    }
    if generation.top_k:
        body["top_k"] = generation.top_k
    if generation.temperature:
        body["seed"] = seed
    if tools:
        body["tools"] = list(tools)
    if generation.template:
        body["chat_template_kwargs"] = generation.template
    return body


def reply_of(response: Mapping[str, Any]) -> Reply:
    """The message of a chat completion. Raises Refused for one that is none or ended in another way."""
    try:
        choice = response["choices"][0]
        given, ending = choice["message"], choice["finish_reason"]
        message = compact(read_message({**given, "role": "assistant"}, where="message"))
        usage = response.get("usage") or {}
        json.dumps(message, ensure_ascii=False).encode()
    except (KeyError, IndexError, TypeError):
        raise Refused(f"the server's answer is no chat completion: {json.dumps(response):.300}") from None
    except UnusedRow as fault:
        raise Refused(f"the server's answer cannot be used: {fault}") from None
    except UnicodeEncodeError:
        raise Refused("the server's answer holds half of a surrogate pair") from None
    if ending == "length":
        message["truncated"] = True
    elif ending not in ("stop", "tool_calls"):
        raise Refused(f"the answer ended with finish_reason {ending!r}")
    return Reply(message, usage.get("completion_tokens"), usage.get("prompt_tokens"))


def _sent(message: Message) -> Message:
    """A message as the API wants it: arguments of calls as JSON text, and nothing that only this package knows."""
    sent = {name: message[name] for name in SENT if name in message}
    calls = message.get("tool_calls")
    return sent | ({"tool_calls": [_called(call) for call in calls]} if calls else {})


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": function}
