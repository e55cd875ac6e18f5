"""TensorBoard's record of a run: a point for every figure of a step, and a page that groups what is read together.

A training must not stop or wait because of it. So every write happens at once, in the caller's thread and without
buffers: a fault is known where it can be dealt with, and no queue can fill up. While nothing can be written, the
latest entries are kept in memory; an event file holds whole entries only.
"""

import collections
import contextlib
import fnmatch
import functools
import itertools
import os
import pathlib
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tensorboardX import summary, writer
from tensorboardX.record_writer import masked_crc32c

from dflash_jax.errors import UserError

# TensorBoard's group of a value: that of the first pattern which its name matches.
GROUPS = {
    "lr": "optim",
    "noise_std": "optim",
    "grad_norm": "optim",
    "update_ratio": "optim",
    "skipped*": "optim",
    "epoch": "data",
    "epochs": "data",
    "tokens": "data",
    "blocks": "data",
    "rows": "data",
    "sequences": "data",
    "seq_len": "data",
    "bucket*": "data",
    "padding": "data",
    "recalled": "data",
    "*_queue": "data",
    "*_memory_gib": "memory",
    "*_mfu": "time",
    "checkpoint": "time",
    "saving": "time",
    "*_s": "time",
    "*": "train",  # loss and its terms, accuracies, streaks, accept length
}

# The page "Custom Scalars": category -> chart -> patterns of the tags whose curves it shows. TensorBoard matches
# a pattern from the start of a tag, not to its end.
CHARTS = {
    "Training": {
        "loss, with its terms": [r"train/loss"],
        "accept length": [r"train/accept_len$"],
        "accuracy by position": [r"train/acc_by_position/"],
    },
    "Held-out": {
        "loss, with its terms": [r"eval/loss"],
        "accept length: teacher-forced, on decoding's way, decoded": [
            r"eval/(accept_len|walk_tau|decode_accept_len)$"
        ],
        "accuracy by position": [r"eval/acc_by_position/"],
    },
    "Training beside held-out": {
        "loss": [r"(train|eval)/loss$"],
        "accept length": [r"(train|eval)/accept_len$"],
        "drafts accepted of 1, 4 and 8 candidates": [r"(train|eval)/(ddtree_)?streak"],
    },
    "Buckets": {
        "loss": [r"bucket_\d+/loss$"],
        "accept length": [r"bucket_\d+/accept_len$"],
    },
    "Optimizer": {
        "learning rate": [r"optim/lr$"],
        "norm of the gradient": [r"optim/grad_norm$"],
        "update relative to the weights": [r"optim/update_ratio$"],
        "steps skipped": [r"optim/skipped"],
    },
    "Queues and waits": {
        "batches ready": [r"data/\w+_queue$"],
        "seconds of a step, and waited in it": [r"time/(step|\w+_wait)_s$"],
    },
    "Rates": {
        "tokens per second": [r"time/\w+_tok_s$"],
        "share of the devices' peak": [r"time/\w+_mfu$"],
    },
    "Memory": {"GiB in use": [r"memory/"]},
}

VERSION = "brain.Event:2"  # of the files
RETRY_S = 30.0
KEPT = 2000  # entries, of a few KB each, that wait in memory while none can be written


class Board:
    """A run's tensorboard/ folder, continued after step `resumed_at` (0: from the start). For one thread.

    No method raises for a fault of the file system. warn: given a line when writing fails, and another when it
    works again; between them it is tried every RETRY_S seconds.
    """

    def __init__(self, directory: pathlib.Path, *, resumed_at: int, warn: Callable[[str], object]):
        self._directory, self._warn = directory, warn
        self._suffix = f".after-step-{resumed_at}"
        self._purge: int | None = resumed_at + 1 if resumed_at else 0  # until a file tells it
        self._file: _EventFile | None = None
        self._pending: collections.deque[bytes] = collections.deque(maxlen=KEPT)
        self._lost = 0  # entries of this outage that KEPT left no room for
        self._retry_at: float | None = None  # None while writing works
        self._write()

    def add_step(self, line: Mapping[str, Any]) -> None:
        """Add a completed line of train_log.jsonl: its numbers, and how many blocks had which accept length."""
        values = _scalars(_step_points(line))
        histogram = _accept_lengths(line)
        if histogram is not None:
            values.append(summary.Summary.Value(tag="train/blocks_by_accept_len", histo=histogram))
        self._add(_entry(step=line["step"], summary=summary.Summary(value=values)))

    def add_evaluation(self, line: Mapping[str, Any]) -> None:
        """Add a line of eval_log.jsonl, as eval/NAME."""
        found = (_points(f"eval/{name}", value) for name, value in line.items() if name != "step")
        values = _scalars(itertools.chain.from_iterable(found))
        self._add(_entry(step=line["step"], summary=summary.Summary(value=values)))

    def text(self, name: str, content: str, step: int) -> None:
        """Show `content` verbatim among TensorBoard's texts."""
        indented = "".join(f"    {line}\n" for line in content.splitlines())
        self._add(_entry(step=step, summary=summary.text(name, indented)))

    def flush(self) -> None:
        """Write what waits in memory, if that is possible now."""
        self._write()

    def close(self) -> None:
        """Write what waits in memory and close the file."""
        self._write()
        if self._pending:
            self._say(f"lacks {_entries(self._lost + len(self._pending))}")
        if self._file is not None:
            try:
                self._file.close()
            except OSError as fault:
                self._say(f"may lack its end ({_reason(fault)})")
            self._file = None

    def _add(self, entry: bytes) -> None:
        self._lost += len(self._pending) == KEPT
        self._pending.append(entry)
        if self._retry_at is None or time.monotonic() >= self._retry_at:
            self._write()

    def _write(self) -> None:
        try:
            removed = self._file is not None and self._file.removed()
            if removed:
                self._drop_file()
            if self._file is None:
                self._file = _EventFile(self._directory, self._suffix, head=_head(self._purge))
                self._purge = None
            while self._pending:
                self._file.append(self._pending[0])
                self._pending.popleft()
        except OSError as fault:
            self._drop_file()
            if self._retry_at is None:
                self._say(
                    f"cannot be written ({_reason(fault)}); training goes on, train_log.jsonl has it all; tried "
                    f"again every {RETRY_S:.0f} s"
                )
            self._retry_at = time.monotonic() + RETRY_S
            return
        if removed and self._retry_at is None:
            self._say("was removed; a fresh file has what follows")
        elif self._retry_at is not None:
            self._say(f"is written again{f'; it lacks {_entries(self._lost)}' if self._lost else ''}")
        self._retry_at, self._lost = None, 0

    def _say(self, what: str) -> None:
        self._warn(f"TensorBoard's record in {self._directory} {what}")

    def _drop_file(self) -> None:
        """Let the next attempt begin a file of its own: this one may never take another entry."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None


def record(directory: pathlib.Path, step: int, values: Mapping[str, float], *, name: str) -> None:
    """Add a point at `step` to each tag of `values`, in the tensorboard/ folder of a run; name: who measured.

    Raises UserError where nothing can be written.
    """
    folder = directory / "tensorboard"
    entry = _entry(step=step, summary=summary.Summary(value=_scalars(values.items())))
    try:
        with contextlib.closing(_EventFile(folder, f".{name}", head=_entry(file_version=VERSION))) as file:
            file.append(entry)
    except OSError as fault:
        raise UserError(
            f"{folder}: what {name} measured cannot be added to TensorBoard's record ({_reason(fault)}); its "
            "report is complete. Make room, or the folder writable, and repeat the command"
        ) from fault


class _EventFile:
    """A fresh event file, which holds whole entries only. Everything may raise OSError."""

    def __init__(self, directory: pathlib.Path, suffix: str, *, head: bytes):
        directory.mkdir(parents=True, exist_ok=True)
        self._file, self._size = _create(directory, suffix), 0
        try:
            self.append(head)
        except OSError:
            self.close()
            raise

    def append(self, entry: bytes) -> None:
        """Add an entry, or leave the file as it was."""
        rest = memoryview(entry)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            # TRAP: TensorBoard reads no further than a torn entry.
            self._file.truncate(self._size)
            raise
        self._size += len(entry)

    def removed(self) -> bool:
        """Whether nobody can see any more what is written here."""
        # Some network file systems count no links at all.
        return os.fstat(self._file.fileno()).st_nlink == 0 and not os.path.exists(self._file.name)

    def close(self) -> None:
        """Close the file; one without an entry is removed."""
        try:
            self._file.close()
        finally:
            if not self._size:
                os.unlink(self._file.name)


def _create(directory: pathlib.Path, suffix: str) -> Any:
    """An event file that did not exist, open for writing; TensorBoard reads those of a folder in their order."""
    start = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}{suffix}"
    for number in itertools.count():
        with contextlib.suppress(FileExistsError):
            return (directory / f"{start}.{number}" if number else directory / start).open("xb", buffering=0)


def _entry(**fields: Any) -> bytes:
    """An Event in TFRecord's layout: length (8 bytes), its CRC (4), the event, its CRC (4)."""
    event = writer.Event(wall_time=time.time(), **fields).SerializeToString()
    length = struct.pack("<Q", len(event))
    return b"".join((length, _crc(length), event, _crc(event)))


def _crc(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))


def _head(purge: int | None) -> bytes:
    """What a file begins with. purge: the step from which on TensorBoard is to forget what earlier files say."""
    entries = [_entry(file_version=VERSION)]
    if purge is not None:
        entries.append(_entry(step=purge, session_log=writer.SessionLog(status=writer.SessionLog.START)))
    layout = {
        category: {title: ("Multiline", patterns) for title, patterns in charts.items()}
        for category, charts in CHARTS.items()
    }
    return b"".join((*entries, _entry(summary=summary.custom_scalars(layout))))


def _scalars(points: Iterable[tuple[str, float]]) -> list[Any]:
    return [summary.Summary.Value(tag=tag, simple_value=number) for tag, number in points]


@functools.cache
def _group(name: str) -> str:
    return next(group for pattern, group in GROUPS.items() if fnmatch.fnmatchcase(name, pattern))


def _step_points(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """TensorBoard's points of a completed line of train_log.jsonl."""
    for name, value in line.items():
        if name != "step":
            yield from _points(f"{_group(name)}/{name}", value)
    for name in ("loss", "accept_len", "bucket_steps"):
        if "bucket" in line and name in line:
            yield from _points(f"bucket_{line['bucket']}/{name.removeprefix('bucket_')}", line[name])


def _points(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    """TensorBoard's points of a plain value: one a number, TAG/1, TAG/2, ... of a list, none of text."""
    if isinstance(value, list):
        for position, element in enumerate(value, start=1):
            yield from _points(f"{tag}/{position}", element)
    elif not isinstance(value, str):
        yield tag, value


def _accept_lengths(line: Mapping[str, Any]) -> Any | None:
    """A HistogramProto of the blocks by accept length 1, 2, .. W, a bin each; None where the line does not tell.

    A block accepts the length k if its first k - 1 drafts survive and the next does not.
    """
    survival, blocks = line.get("survival_by_position"), line.get("blocks")
    if not survival or not blocks or any(isinstance(number, str) for number in (*survival, blocks)):
        return None
    shares = [1.0, *survival, 0.0]
    counts = [round(blocks * (share - further)) for share, further in itertools.pairwise(shares)]
    lengths = [length for length, count in enumerate(counts, start=1) if count]
    first, last = lengths[0], lengths[-1]
    return summary.HistogramProto(
        # TRAP: TensorBoard takes min and max for the ends of the outer bins. Its two readers of files treat empty
        # bins there differently, so none is written.
        min=first - 0.5,
        max=last + 0.5,
        num=sum(counts),
        sum=sum(length * counts[length - 1] for length in lengths),
        sum_squares=sum(length**2 * counts[length - 1] for length in lengths),
        bucket_limit=[length + 0.5 for length in range(first, last + 1)],
        bucket=counts[first - 1 : last],
    )


def _entries(count: int) -> str:
    return (
        f"{count} {'entries' if count > 1 else 'entry'} (a step or an evaluation each) that could not be written"
    )


def _reason(fault: OSError) -> str:
    return fault.strerror or str(fault)
