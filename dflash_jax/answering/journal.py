"""The answers of a run that is not finished: a file that grows by a line with each answer, in order of completion.

    {"settings": {...}}                                              what all answers were made with
    {"index": 3, "turn": 0, "message": {...}, "tokens": 57, ..}      the first answer in the fourth conversation

A run that starts over finds here what it need not ask again. A line that a kill left torn is cut off.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from dflash_jax.answering.dialogue import Message, expanded
from dflash_jax.errors import UserError

SYNC_EVERY_S = 1.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """index: its conversation; turn: the answers that were put into that one before; message: the assistant's;
    tokens: how many were generated, None if unknown; other_prompt: the server's prompt had another length than
    the target's own template gives."""

    index: int
    turn: int
    message: Message
    tokens: int | None = None
    other_prompt: bool = False


class Journal:
    """Context manager. Holds in memory only where each answer is in the file.

    Entering it begins the file, or continues one that was begun with the same settings. Raises UserError for other
    settings, a damaged file, and one that another process writes to.
    """

    def __init__(self, file: pathlib.Path, *, settings: Mapping[str, Any]):
        self._path, self._settings = file, json.loads(json.dumps(settings))
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        self._synced_s = time.monotonic()
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(self._path.open("ab"))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"output: another process is writing to {self._path}; wait for it") from None
            self._lines = stack.enter_context(self._path.open("rb"))
            self._continue()
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file.fileno())
        self._opened.close()

    def __len__(self) -> int:
        """How many answers there are."""
        return sum(map(len, self._places.values()))

    def recorded(self, index: int) -> Iterator[Answer]:
        """The answers of a conversation, in order."""
        for place in self._places.get(index, ()):
            self._lines.seek(place)
            yield Answer(**json.loads(self._lines.readline()))

    def messages(self, index: int) -> list[Message]:
        """The messages of `recorded`, as a chat template reads them."""
        return [expanded(answer.message) for answer in self.recorded(index)]

    def add(self, answers: Sequence[Answer]) -> None:
        """Append answers, which survive a kill from here on, and within a second a power failure."""
        place = self._file.seek(0, os.SEEK_END)
        for answer in answers:
            assert answer.turn == len(self._places[answer.index])
            self._places[answer.index].append(place)
            place += self._file.write(_line(dataclasses.asdict(answer)))
        self._file.flush()
        if time.monotonic() - self._synced_s > SYNC_EVERY_S:
            os.fsync(self._file.fileno())
            self._synced_s = time.monotonic()

    def remove(self) -> None:
        """Delete the file, once its answers are safe elsewhere."""
        self._path.unlink()

    def _continue(self) -> None:
        place = 0
        for number, line in enumerate(self._lines, start=1):
            if not line.endswith(b"\n"):
                self._file.truncate(place)
                break
            try:
                self._take(json.loads(line), place)
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"output: {self._path}, line {number}, is damaged; delete the file from there on to continue "
                    "with what is before it"
                ) from None
            place += len(line)
        if not place:
            self._file.write(_line({"settings": self._settings}))
            self._file.flush()
            os.fsync(self._file.fileno())

    def _take(self, line: dict[str, Any], place: int) -> None:
        if place == 0:
            before, now = line["settings"], self._settings
            changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
            if changed:
                found = ", ".join(f"{name}={before.get(name)}, now {now.get(name)}" for name in changed)
                raise UserError(
                    f"output: {self._path} was begun with {found}; repeat the command with what it was begun "
                    "with, or delete the file to begin again"
                )
            return
        if line["turn"] != len(self._places[line["index"]]):
            raise ValueError
        self._places[line["index"]].append(place)


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"
