"""Files of rows, in parts that worker processes take: JSON lines, JSON and Parquet, plain or compressed.

    files -> parts -> rows        find_files, read_parts (one process, streaming), rows_of (any process)

Where a part begins and ends depends on nothing but the files' content.
"""

import codecs
import glob
import gzip
import hashlib
import io
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from dflash_jax.errors import UserError
from dflash_jax.sources.arrow import ARROW_DAMAGE, arrow_rows, fault_line, parquet_stretches, zstd_stream
from dflash_jax.sources.json_texts import OVERSIZED, cut_rows, parse_json
from dflash_jax.sources.unused import UnusedRow, shown

PART_ROWS = 2048
PART_BYTES = 8 << 20
MAX_ROW_BYTES = 64 << 20
CHUNK_BYTES = 1 << 16

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json")
MAGIC = {".parquet": b"PAR1", ".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
DAMAGE = (*ARROW_DAMAGE, EOFError, zlib.error)  # what reading a damaged file raises


@dataclass(frozen=True)
class Part:
    """Consecutive rows of one file, as they go to a worker.

    index: counts all parts; file: index of the file; first: number of the first row, from 1 (of JSON lines the
    number of the line, blank ones counted). kind "lines": `content` is JSON texts, each with a line end; "arrow":
    an Arrow stream. broken: why the rows after these cannot be read, None if they can or there are none.
    """

    index: int
    file: int
    first: int
    kind: str
    content: bytes
    broken: str | None


def find_files(inputs: str) -> list[pathlib.Path]:
    """The files that a comma-separated list of paths, globs and folders names; sorted within a glob or folder.

    Of a folder, every file inside at any depth whose name says that it holds rows. Raises UserError for an entry
    that names nothing, a file of another kind, a file that is not what its name says, and one named twice.
    """
    files = [file for entry in inputs.split(",") for file in _entry_files(entry.strip())]
    named: dict[pathlib.Path, pathlib.Path] = {}
    for file in files:
        check_file(file)
        if (other := named.setdefault(file.resolve(), file)) is not file:
            raise UserError(f"{file} is named twice (also as {other}); every row would count twice")
    return files


def check_file(path: pathlib.Path) -> None:
    """Raise UserError if the file does not hold rows, as far as its name and its first and last bytes tell."""
    if not path.is_file():
        raise UserError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    layout, packing = _suffixes(path)
    if layout is None:
        raise UserError(
            f"{path}: cannot tell what it holds; a name must end in {', '.join(TEXT_SUFFIXES)} "
            "(each perhaps with .gz or .zst after it) or .parquet"
        )
    try:
        with path.open("rb") as stored:
            magic = MAGIC.get(packing or layout, b"")
            if (begin := stored.read(len(magic))) != magic:
                raise UserError(f"{path} is no {packing or layout} file: it begins with {begin!r}, not {magic!r}")
            stored.seek(max(0, path.stat().st_size - len(magic)))
            if layout == ".parquet" and stored.read() != magic:
                raise UserError(f"{path} lacks the end of a Parquet file; it was cut short, so fetch it again")
    except OSError as fault:
        raise UserError(f"{path}: cannot be read: {fault.strerror}") from fault
    if layout != ".parquet" and _first_bytes(path).startswith(UTF16):
        raise UserError(f"{path} is UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8")


def row_word(path: pathlib.Path) -> str:
    """What the numbers of a file's rows count: "line" or "row"."""
    return "line" if _suffixes(path)[0] in (".jsonl", ".ndjson") else "row"


def content_digest(file: str | pathlib.Path) -> str:
    """The sha256 of the stored bytes, in hex."""
    try:
        with pathlib.Path(file).open("rb") as stored:
            return hashlib.file_digest(stored, "sha256").hexdigest()
    except OSError as fault:
        raise UserError(f"{file}: cannot be read: {fault.strerror}") from fault


def read_parts(
    files: Sequence[pathlib.Path], *, skip: int = 0, on_bytes: Callable[[int], object] | None = None
) -> Iterator[Part]:
    """The parts of all files in order, without the first `skip` of them; memory holds one at a time.

    on_bytes is told how many stored bytes each part took, the skipped ones included; in all, the files' sizes.
    """
    index = 0
    for number, path in enumerate(files):
        seen, size = 0, path.stat().st_size
        pieces = _arrow_pieces if _suffixes(path)[0] == ".parquet" else _text_pieces
        for piece in pieces(path, skip=max(0, skip - index)):
            if on_bytes:
                on_bytes(piece.read - seen)
                seen = piece.read
            if index >= skip:
                yield Part(index, number, piece.first, piece.kind, piece.content, piece.broken)
            index += 1
        if on_bytes and size > seen:
            on_bytes(size - seen)


def rows_of(part: Part) -> Iterator[tuple[int, dict[str, Any] | UnusedRow]]:
    """(number, row or why it is not used) of each row of a part; blank lines are left out.

    Where the file is broken after the part, that comes last, under the number of the row that cannot be read.
    """
    number = part.first
    rows = arrow_rows(part.content) if part.kind == "arrow" else _text_rows(part.content)
    for number, row in enumerate(rows, part.first):
        if row is not None:
            yield number, row
    if part.broken is not None:
        yield number + bool(part.content), UnusedRow("broken file", part.broken)


def _entry_files(entry: str) -> list[pathlib.Path]:
    if not entry:
        raise UserError("an entry between commas is empty; name a file, a folder or a glob")
    entry = os.path.expanduser(entry)
    if os.path.exists(entry) or not glob.has_magic(entry):
        return _files_at(pathlib.Path(entry))
    found = sorted(glob.glob(entry, recursive=True))
    if not found:
        raise UserError(f"{entry}: no file has such a name")
    return [file for name in found for file in _files_at(pathlib.Path(name))]


def _files_at(path: pathlib.Path) -> list[pathlib.Path]:
    """The file itself, or the files of rows in a folder; hidden ones are left-overs of other programs."""
    if not path.is_dir():
        return [path]
    visible = (file for file in path.rglob("*") if "/." not in f"/{file.relative_to(path).as_posix()}")
    inside = sorted(file for file in visible if file.is_file() and _suffixes(file)[0])
    if not inside:
        raise UserError(f"{path}: no file in this folder ends in {', '.join(TEXT_SUFFIXES)} or .parquet")
    return inside


def _suffixes(path: pathlib.Path) -> tuple[str | None, str]:
    """(suffix of what the file holds, None if unknown; suffix of its compression, "" if none)."""
    name = path.name.lower()
    packing = next((packing for packing in (".gz", ".zst") if name.endswith(packing)), "")
    layout = pathlib.PurePath(name.removesuffix(packing)).suffix
    return layout if layout in TEXT_SUFFIXES or (layout == ".parquet" and not packing) else None, packing


def _unpacked(stored: BinaryIO, packing: str) -> io.BufferedIOBase | BinaryIO:
    if packing == ".gz":
        return gzip.GzipFile(fileobj=stored)
    return zstd_stream(stored) if packing == ".zst" else stored


def _first_bytes(path: pathlib.Path) -> bytes:
    try:
        with path.open("rb") as stored:
            return _unpacked(stored, _suffixes(path)[1]).read(2)
    except DAMAGE:
        return b""  # read_parts reports it with the row


class _Piece(NamedTuple):
    """A part but for its place among all parts; `read`: stored bytes of the file up to its end."""

    read: int
    first: int
    content: bytes = b""
    kind: str = "lines"
    broken: str | None = None


def _text_pieces(path: pathlib.Path, *, skip: int) -> Iterator[_Piece]:
    """All pieces: to know where one begins, those to `skip` must be read as well."""
    layout, packing = _suffixes(path)
    texts: list[bytes] = []
    first, size, broken = 1, 0, None
    with path.open("rb") as stored:
        stream = _unpacked(stored, packing)
        chunks = iter(lambda: stream.read1(CHUNK_BYTES), b"")  # pyright: ignore[reportAttributeAccessIssue]
        rows = cut_rows(chunks, longest=MAX_ROW_BYTES) if layout == ".json" else _lines(stream)
        try:
            for text in rows:
                if texts and (len(texts) == PART_ROWS or size + len(text) > PART_BYTES):
                    yield _Piece(stored.tell(), first, b"".join(texts))
                    first, size = first + len(texts), 0
                    texts.clear()
                texts.append(text)
                size += len(text)
        except DAMAGE as fault:
            broken = fault_line(fault)
        if texts or broken:
            yield _Piece(stored.tell(), first, b"".join(texts), broken=broken)


def _lines(stream: Any) -> Iterator[bytes]:
    while line := stream.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_ROW_BYTES)
            line = OVERSIZED
        yield line if line.endswith(b"\n") else line + b"\n"


def _arrow_pieces(path: pathlib.Path, *, skip: int) -> Iterator[_Piece]:
    size, first = path.stat().st_size, 1
    stretches = parquet_stretches(path, skip=skip, most_rows=PART_ROWS, most_bytes=PART_BYTES)
    for rows, total, content, broken in stretches:
        kind = "arrow" if content else "lines"
        yield _Piece(size * (first - 1 + rows) // max(1, total), first, content, kind, broken)
        first += rows


def _text_rows(content: bytes) -> Iterator[dict[str, Any] | UnusedRow | None]:
    for text in content.split(b"\n")[:-1]:
        if not text or text.isspace():
            yield None
        elif text.startswith(OVERSIZED):
            yield UnusedRow(
                "too long", f"text of more than {MAX_ROW_BYTES >> 20} MiB, the most that a row may have"
            )
        else:
            yield _row(text)


def _row(text: bytes) -> dict[str, Any] | UnusedRow:
    try:
        row = parse_json(text)
    except UnusedRow as unused:
        return unused
    if isinstance(row, dict):
        return row
    array = "; a file that is one JSON array is named .json" if isinstance(row, list) else ""
    return UnusedRow("unknown format", f"a row must be a JSON object; found {shown(row)}{array}")
