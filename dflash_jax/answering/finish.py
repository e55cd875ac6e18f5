"""From a journal to the files that remain: the output in the order of the prompts, its settings, what failed."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from dflash_jax.answering.dialogue import compact, open_turn, with_answers
from dflash_jax.answering.journal import Journal
from dflash_jax.errors import UserError
from dflash_jax.sources.conversations import Conversation


def beside(output: pathlib.Path, ending: str) -> pathlib.Path:
    """The file OUTPUT.ending."""
    return output.with_name(f"{output.name}.{ending}")


def write_output(
    output: pathlib.Path,
    conversations: Sequence[Conversation],
    journal: Journal,
    *,
    failed: Mapping[int, str],
    settings: Mapping[str, Any],
) -> dict[str, int]:
    """Write OUTPUT, OUTPUT.settings.json and, if anything failed, OUTPUT.failed.jsonl; returns the counts.

    A line of the last is a conversation, with the answers that it got, to which the command can be given again.
    Every file appears whole or not at all, and OUTPUT after the others. Raises UserError if nothing was answered.
    """
    names = ("conversations", "answers", "truncated", "answer_tokens", "other_prompts", "failed")
    counts: dict[str, int] = dict.fromkeys(names, 0)
    if failed and not len(journal):
        index, reason = min(failed.items())
        raise UserError(f"nothing could be answered; the first, conversation {index + 1}: {reason}")
    with _whole(output) as answered:
        with _whole(beside(output, "failed.jsonl")) as left:
            for index, conversation in enumerate(conversations):
                recorded = list(journal.recorded(index))
                messages = with_answers(conversation.messages, [answer.message for answer in recorded])
                line = {"set": conversation.set, "messages": [compact(message) for message in messages]}
                line |= {"tools": list(conversation.tools)} if conversation.tools else {}
                if open_turn(messages) is None:
                    _write(answered, line)
                    counts["conversations"] += 1
                else:
                    _write(left, {"index": index, "reason": failed[index], **line})
                    counts["failed"] += 1
                counts["answers"] += len(recorded)
                counts["truncated"] += sum("truncated" in answer.message for answer in recorded)
                counts["answer_tokens"] += sum(answer.tokens or 0 for answer in recorded)
                counts["other_prompts"] += sum(answer.other_prompt for answer in recorded)
        if not counts["failed"]:
            beside(output, "failed.jsonl").unlink()
        with _whole(beside(output, "settings.json")) as described:
            described.write(json.dumps({**settings, "counts": counts}, indent=2, ensure_ascii=False) + "\n")
    return counts


@contextlib.contextmanager
def _whole(file: pathlib.Path) -> Iterator[IO[str]]:
    """A file that takes its name when it is complete and on disk."""
    unfinished = beside(file, "unfinished")
    with unfinished.open("w", encoding="utf-8") as opened:
        yield opened
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(unfinished, file)


def _write(file: IO[str], line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line, ensure_ascii=False) + "\n")
