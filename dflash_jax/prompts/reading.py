"""From what prompts= says to prompts: sets by name, files of conversations, and folders that `prepare` wrote."""

import collections
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np

from dflash_jax.chat.chat import Chat
from dflash_jax.data.origin import Preparation, check_origin
from dflash_jax.data.records import MANIFEST, Records
from dflash_jax.errors import UserError
from dflash_jax.prompts.packaged import PACKAGED, packaged_conversations
from dflash_jax.prompts.prompt import Prompt
from dflash_jax.sources.conversations import Conversation, read_conversations
from dflash_jax.sources.files import find_files
from dflash_jax.sources.unused import UnusedRow


def read_prompts(sources: str, *, preparation: Preparation, limit: int | None = None) -> list[Prompt]:
    """The prompts of all entries of a comma-separated list, at most `limit` of each set.

    A conversation's prompt is everything before its last answer; its set is the one that it names, or the name of
    its file. Raises UserError for an entry that means nothing, or whose prompts the target cannot be asked.
    """
    taken: collections.Counter[str] = collections.Counter()
    prompts = []
    for prompt in _all_prompts(sources, preparation, limit=limit):
        if limit is None or taken[prompt.set] < limit:
            taken[prompt.set] += 1
            prompts.append(prompt)
    return prompts


def record_prompts(records: Records, name: str) -> Iterator[Prompt]:
    """A prompt of each record, its tokens before the first that is supervised; `name` is their set."""
    for index in range(len(records)):
        record = records[index]
        start = int(np.argmax(record.loss_mask))
        if start:  # a record may be an answer from its first token on
            yield Prompt(name, record.tokens[:start])


def _all_prompts(sources: str, preparation: Preparation, *, limit: int | None) -> Iterator[Prompt]:
    chat = preparation.chat()
    for entry in map(str.strip, sources.split(",")):
        if entry and (pathlib.Path(entry) / MANIFEST).is_file():
            records = Records.open(entry)
            check_origin(records, preparation)
            yield from _first(limit, record_prompts(records, pathlib.Path(entry).resolve().name))
        else:
            yield from _asked(chat, _conversations(entry))


def _first(limit: int | None, prompts: Iterator[Prompt]) -> Iterator[Prompt]:
    """All or so many of them; records are read one by one, so that a large folder costs no more than that."""
    return (prompt for _, prompt in zip(range(limit), prompts, strict=False)) if limit else prompts


def _conversations(entry: str) -> Iterator[tuple[str, Conversation]]:
    """(where it stands, conversation) of each conversation of an entry; all have a set."""
    if entry in PACKAGED:
        for number, conversation in enumerate(packaged_conversations(entry), start=1):
            yield f"prompt {number} of {entry}", conversation
        return
    if not entry or (not pathlib.Path(entry).exists() and not set(entry) & set("/.*?[")):
        raise UserError(
            f"prompts: found {entry!r}; known by name: {', '.join(PACKAGED)}; anything else must be a file of "
            "conversations, or a folder of them or of records that `prepare` wrote"
        )
    try:
        files = find_files(entry)
    except UserError as fault:
        raise UserError(f"prompts: {fault}") from None
    for file in files:
        for number, conversation in enumerate(read_conversations(file), start=1):
            named = conversation.set or file.name.partition(".")[0]
            yield (
                f"conversation {number} of {file}",
                Conversation(conversation.messages, named, conversation.tools),
            )


def _asked(chat: Chat, conversations: Iterable[tuple[str, Conversation]]) -> Iterator[Prompt]:
    for where, conversation in conversations:
        messages = conversation.messages
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        try:
            yield Prompt(conversation.set, chat.prompt(messages, conversation.tools))
        except UnusedRow as fault:
            raise UserError(f"prompts: {where} cannot be asked: {fault}") from fault
