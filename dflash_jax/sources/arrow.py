"""What is read with Arrow: Parquet files in stretches of rows, those rows, and zstd streams.

pyarrow is imported where it is used: JSON files need none of it.
"""

import io
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from dflash_jax.sources.unused import UnusedRow

BUFFER_BYTES = 1 << 16
ARROW_DAMAGE = (OSError, ValueError, NotImplementedError)  # pyarrow's exceptions are kinds of these


class Stretch(NamedTuple):
    """`rows` consecutive rows of a file of `total`, as an Arrow stream; empty if skipped or damaged."""

    rows: int
    total: int
    content: bytes
    broken: str | None


def zstd_stream(stored: BinaryIO) -> io.BufferedReader:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(stored, "zstd"))  # pyright: ignore[reportArgumentType]


def parquet_stretches(path: pathlib.Path, *, skip: int, most_rows: int, most_bytes: int) -> Iterator[Stretch]:
    """A Parquet file in stretches of at most `most_rows` rows and about `most_bytes` bytes.

    The first `skip` stretches may be empty. How many there are is fixed by what the file says of itself: where a
    row group is damaged, its remaining stretches are empty, and the first of these says why; the next group is
    read again. So skipping needs no reading and yet leaves out the same stretches.
    """
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False)
    except ARROW_DAMAGE as fault:
        yield Stretch(0, 0, b"", fault_line(fault))
        return
    with file:
        total = file.metadata.num_rows
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            step = max(1, min(most_rows, most_bytes * group.num_rows // max(1, group.total_byte_size)))
            counts = [min(step, group.num_rows - start) for start in range(0, group.num_rows, step)]
            if skip >= len(counts):
                contents = iter([(b"", None)] * len(counts))
            else:
                contents = _group_contents(file, number, counts)
            for rows, (content, broken) in zip(counts, contents, strict=True):
                yield Stretch(rows, total, content, broken)
            skip = max(0, skip - len(counts))


def _group_contents(file: Any, number: int, counts: Sequence[int]) -> Iterator[tuple[bytes, str | None]]:
    done = 0
    try:
        for batch in file.iter_batches(batch_size=counts[0], row_groups=[number]):
            if batch.num_rows != counts[done]:
                raise ValueError(f"{batch.num_rows} rows came where {counts[done]} were expected")
            content = _as_stream(batch)
            done += 1
            yield content, None
    except ARROW_DAMAGE as fault:
        yield b"", fault_line(fault)
        yield from [(b"", None)] * (len(counts) - done - 1)


def _as_stream(batch: Any) -> bytes:
    import pyarrow as pa

    content = io.BytesIO()
    with pa.ipc.new_stream(content, batch.schema) as stream:
        stream.write_batch(batch)
    return content.getvalue()


def arrow_rows(content: bytes) -> Iterator[dict[str, Any] | UnusedRow]:
    """The rows of an Arrow stream; what is null in a row is left out of it, at any depth.

    In Arrow each object has the keys of all objects of its column, so null is the same as absent.
    """
    import pyarrow as pa

    with pa.ipc.open_stream(content) as batches:
        for batch in batches:
            try:
                rows: Iterable[Any] = batch.to_pylist()
            except ValueError:  # of one value; the other rows are as good as before
                rows = (_one_row(batch.slice(index, 1)) for index in range(batch.num_rows))
            yield from map(_without_nulls, rows)


def _one_row(batch: Any) -> dict[str, Any] | UnusedRow:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as fault:
        return UnusedRow("not UTF-8", f"byte {fault.object[fault.start]:#04x} at {fault.start} of a text")
    except ValueError as fault:
        return UnusedRow("unknown format", f"a value cannot be read: {fault_line(fault)}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def fault_line(fault: BaseException) -> str:
    """The first line of an exception's message, with what helps where the file is whole but beyond this reader."""
    said = str(fault).partition("\n")[0] or type(fault).__name__
    if isinstance(fault, NotImplementedError):
        return f"pyarrow cannot read this kind of content ({said}); write the file anew without it"
    return said
