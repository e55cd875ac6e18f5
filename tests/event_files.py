"""TensorBoard's event files, read by their layout, and lines to fill them with."""

import pathlib
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from tensorboardX.proto.event_pb2 import Event

from dflash_jax.monitor.board import Board


def events_of(file: pathlib.Path) -> Iterator[Event]:
    """A file's events, read by the TFRecord layout: length (8 bytes), its CRC (4), data, CRC (4)."""
    content, start = file.read_bytes(), 0
    while start < len(content):
        (length,) = struct.unpack_from("<Q", content, start)
        assert start + 16 + length <= len(content), "a torn entry"
        yield Event.FromString(content[start + 12 : start + 12 + length])
        start += 16 + length


def values_of(folder: pathlib.Path, kind: str) -> dict[tuple[str, int], Any]:
    """What the files of a folder hold of a kind (simple_value, histo, tensor) by tag and step."""
    return {
        (value.tag, event.step): getattr(value, kind)
        for file in sorted(folder.iterdir())
        for event in events_of(file)
        for value in event.summary.value
        if value.WhichOneof("value") == kind
    }


def steps_in(folder: pathlib.Path) -> list[int]:
    """Those that have a train/loss."""
    return sorted(step for tag, step in values_of(folder, "simple_value") if tag == "train/loss")


def purges_of(file: pathlib.Path) -> list[int]:
    """The steps from which on a file tells TensorBoard to forget earlier files."""
    return [event.step for event in events_of(file) if event.HasField("session_log")]


def layouts_of(folder: pathlib.Path) -> list[bytes]:
    """How the page of custom scalars is laid out, for each file that says so."""
    return [
        value.tensor.string_val[0]
        for file in sorted(folder.iterdir())
        for event in events_of(file)
        for value in event.summary.value
        if value.tag == "custom_scalars__config__"
    ]


def add_steps(board: Board, steps: Iterable[int]) -> None:
    """Give a board a line for each of the steps."""
    for step in steps:
        board.add_step({"step": step, "loss": step / 2})
