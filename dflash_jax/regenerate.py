"""Let the target answer prompts: ``python -m dflash_jax.regenerate target=PATH prompts=FILE output=FILE``.

A drafter must learn what its target says, so training data carries the target's own answers. Greedy, on one
device; each answer that was cut by max_new_tokens is marked, so that its end is not learned as an end.
"""

import functools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax import resolve
from dflash_jax.arguments import build, describe, parse_assignments, run_entry_point
from dflash_jax.config import RegenerateConfig
from dflash_jax.data.chat import encode_prompt
from dflash_jax.data.conversations import Conversation, read_conversations
from dflash_jax.data.tokenizer import load_tokenizer
from dflash_jax.decode.generate import Sequences, generate
from dflash_jax.errors import UserError
from dflash_jax.monitor.progress import Loading
from dflash_jax.published.targets import TargetFiles

PLAIN = {"add_special_tokens": False}

USAGE = """\
usage: python -m dflash_jax.regenerate target=PATH prompts=FILE output=FILE [debug=true] [key=value ...]

keys, with type, default and meaning:
"""


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(USAGE + describe(RegenerateConfig))
        return 0
    config = build(RegenerateConfig, [("command line", parse_assignments(arguments))])
    output = pathlib.Path(config.output)
    if output.exists():
        raise UserError(f"output: {output} exists; delete it or name another file")
    conversations = read_conversations(config.prompts)
    for number, conversation in enumerate(conversations, start=1):
        if unanswered(conversation.messages) is None:
            raise UserError(f"prompts: conversation {number} of {config.prompts} is answered already")
    dialogues = answer(conversations, config)
    lines = (
        json.dumps({"set": asked.set, "messages": dialogue}, ensure_ascii=False) + "\n"
        for asked, dialogue in zip(conversations, dialogues, strict=True)
    )
    output.write_text("".join(lines))
    cut = sum("truncated" in dialogue[-1] for dialogue in dialogues)
    print(f"written: {output}, {len(dialogues)} conversations, {cut} cut")
    return 0


def unanswered(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """The index of the first user's turn that no assistant's turn follows."""
    roles = [message["role"] for message in messages]
    pairs = zip(roles, [*roles[1:], "user"], strict=True)
    return next((turn for turn, pair in enumerate(pairs) if pair == ("user", "user")), None)


def answer(conversations: list[Conversation], config: RegenerateConfig) -> list[list[dict[str, Any]]]:
    """The messages of each conversation with the target's greedy answers put in, one turn after another.

    A later answer sees the earlier ones. A conversation ends at an answer that was cut.
    """
    path = resolve.target_path(config.target)
    files = TargetFiles.open(path)
    tokenizer: Any = load_tokenizer(path)
    graph, abstract = files.abstract(jnp.dtype(config.dtype))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Loading(files.name, files.weight_bytes) as loading:
        state = files.load(abstract, jax.tree.map(lambda _: device, abstract), on_bytes=loading.add)
    target = nnx.merge(graph, state)
    run = jax.jit(
        functools.partial(generate, stop=(tokenizer.eos_token_id,), max_new_tokens=config.max_new_tokens)
    )
    dialogues = [list(item.messages) for item in conversations]
    while waiting := [(turn, item) for item in dialogues if (turn := unanswered(item)) is not None]:
        prompts = [encode_prompt(tokenizer, item[: turn + 1]) for turn, item in waiting]
        answers = decode(functools.partial(run, target), prompts, batch_size=config.batch_size)
        for (turn, item), tokens in zip(waiting, answers, strict=True):
            said = as_message(tokenizer, tokens)
            item[turn + 1 :] = [said] if "truncated" in said else [said, *item[turn + 1 :]]
    return dialogues


def decode(run: Callable[..., Sequences], prompts: list[np.ndarray], *, batch_size: int) -> Iterator[np.ndarray]:
    """What `run(tokens, lengths)` adds to each prompt, in order; all batches have one shape."""
    room = max(map(len, prompts))
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        tokens = np.zeros((batch_size, room), np.int32)
        lengths = np.ones(batch_size, np.int32)  # rows without a prompt decode one padding token
        for row, prompt in enumerate(batch):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        rows = jax.device_get(run(tokens, lengths))
        for row in range(len(batch)):
            yield rows.tokens[row, lengths[row] : rows.lengths[row]]
        print(f"\ranswered {first + len(batch)}/{len(prompts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def as_message(tokenizer: Any, tokens: np.ndarray) -> dict[str, Any]:
    """An assistant message whose text becomes exactly these tokens again when it is tokenised.

    tokens: [n] int32. Where the target spelled a text in other tokens than its tokenizer would, the answer ends
    just before; such an answer, and one without an end-of-turn token, is marked "truncated".
    """
    ended = bool(len(tokens)) and tokens[-1] == tokenizer.eos_token_id
    said = tokens[:-1] if ended else tokens
    kept = len(said)
    while kept and not np.array_equal(tokenizer.encode(tokenizer.decode(said[:kept]), **PLAIN), said[:kept]):
        kept -= 1
    message = {"role": "assistant", "content": tokenizer.decode(said[:kept])}
    return message | ({} if ended and kept == len(said) else {"truncated": True})


if __name__ == "__main__":
    run_entry_point(main)
