"""Append-only files of one JSON object a line, each with its "step", that stay valid after a kill.

A run that resumes at step R continues the file right after step R: what an interrupted run wrote beyond R
is moved to NAME.after-step-R.jsonl beside it, never deleted, and so are lines that a kill left torn.

What the disk refuses waits in memory and is written once the disk takes it.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import IO


def read_lines(file: pathlib.Path) -> Iterator[dict]:
    """The objects of a file in order; a torn last line is left out, and a missing file has none."""
    if not file.exists():
        return
    with file.open("rb") as lines:
        for line in lines:
            parsed = _parse(line)
            if parsed is not None:
                yield parsed


class JsonLines:
    """A file of JSON lines, opened to continue after step `resumed_at` (0: from the start).

    warn: told when the disk begins to refuse lines, and when it takes them again.
    """

    def __init__(self, file: pathlib.Path, *, resumed_at: int, warn: Callable[[str], object]):
        _set_aside(file, resumed_at)
        self._path, self._warn = file, warn
        # Unbuffered: a line is one write, so a kill between two lines cannot tear either.
        self._file: IO[bytes] | None = file.open("ab", buffering=0)
        self._waiting = b""

    def append(self, line: dict) -> None:
        """Write one line; every number in it must be finite."""
        refused = bool(self._waiting)
        self._waiting += json.dumps(line, allow_nan=False).encode() + b"\n"
        try:
            self._write()
        except OSError as fault:
            self._drop_file()
            if not refused:
                self._warn(
                    f"{self._path} takes no more lines ({fault}); they wait in memory, and training goes on"
                )
        else:
            if refused:
                self._warn(f"{self._path} takes lines again; none is missing")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._write()
        if self._file is not None:
            self._file.close()
        if self._waiting:
            lines = self._waiting.count(b"\n")
            self._warn(f"{lines} lines of {self._path} could not be written and are lost")

    def _write(self) -> None:
        """Write what waits; what a full disk has taken of it is not written again."""
        # A folder that was removed or moved takes what is written to its files with it, and says nothing.
        if self._file is not None and not self._in_place(self._file):
            self._drop_file()
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def _in_place(self, file: IO[bytes]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def _drop_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None


def _parse(line: bytes) -> dict | None:
    """The object of a complete line with a step; None of anything else."""
    if not line.endswith(b"\n"):
        return None
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and isinstance(parsed.get("step"), int) else None


def _set_aside(file: pathlib.Path, resumed_at: int) -> None:
    """Leave in `file` exactly the bytes of the lines that the resumed run builds on."""
    if not file.exists():
        return
    kept, moved = [], []
    for line in file.read_bytes().splitlines(keepends=True):
        parsed = _parse(line)
        belongs = resumed_at > 0 and parsed is not None and parsed["step"] <= resumed_at
        (kept if belongs else moved).append(line)
    if not moved:
        return
    # In this order a kill at any point loses no line.
    with file.with_name(f"{file.stem}.after-step-{resumed_at}{file.suffix}").open("ab") as aside:
        aside.writelines(line.rstrip(b"\r\n") + b"\n" for line in moved)
        _to_disk(aside)
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("wb") as rewritten:
        rewritten.writelines(kept)
        _to_disk(rewritten)
    os.replace(partial, file)


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
