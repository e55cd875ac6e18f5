"""Files of rows in parts: the same rows from every kind of file, in bounded pieces, up to where it is damaged."""

import dataclasses
import gzip
import hashlib
import json
import pathlib
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_jax.errors import UserError
from dflash_jax.sources import files as source_files
from dflash_jax.sources.files import content_digest, find_files, read_parts, row_word, rows_of
from dflash_jax.sources.unused import UnusedRow

ROWS = [{"set": f"é{number}", "messages": [{"role": "user", "content": "x" * number}]} for number in range(40)]


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zstd(content):
    return pa.compress(content, codec="zstd", asbytes=True)


def write_parquet(path, rows, **options):
    pq.write_table(pa.Table.from_pylist(rows), path, **options)


def save(path: pathlib.Path) -> pathlib.Path:
    """ROWS in a file of the kind that its name says."""
    if path.suffix == ".parquet":
        write_parquet(path, ROWS, row_group_size=17)
        return path
    content = json_lines(ROWS) if ".jsonl" in path.name else json.dumps(ROWS, indent=1).encode()
    pack = {".gz": gzip.compress, ".zst": zstd}.get(path.suffix, bytes)
    path.write_bytes(pack(content))
    return path


def read(*files, **options):
    """(file, number, row) of all rows, why not as "reason: detail"."""
    parts = read_parts(files, **options)
    return [
        (part.file, number, str(row) if isinstance(row, UnusedRow) else row)
        for part in parts
        for number, row in rows_of(part)
    ]


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(source_files, "PART_ROWS", 7)
    monkeypatch.setattr(source_files, "PART_BYTES", 1000)
    monkeypatch.setattr(source_files, "CHUNK_BYTES", 97)


NAMES = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.gz", "a.json.zst", "a.parquet"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("small_parts")
def test_every_kind_of_file_gives_the_same_rows_in_parts_that_can_be_skipped(tmp_path, name):
    file = save(tmp_path / name)
    seen = []
    parts = list(read_parts([file, file], on_bytes=seen.append))
    assert sum(seen) == 2 * file.stat().st_size
    assert [part.index for part in parts] == list(range(len(parts)))
    assert len(parts) >= 12
    for part in parts:
        assert part.broken is None
        assert len(list(rows_of(part))) <= 7
    rows = [(part.file, number, row) for part in parts for number, row in rows_of(part)]
    assert rows == [(index, number, row) for index in (0, 1) for number, row in enumerate(ROWS, start=1)]
    for skip in (0, 1, 5, len(parts) // 2, len(parts) - 1, len(parts), 1000):
        assert list(read_parts([file, file], skip=skip)) == parts[skip:]
    assert pickle.loads(pickle.dumps(parts)) == parts
    with pytest.raises(dataclasses.FrozenInstanceError):
        parts[0].index = 1


def test_parts_hold_a_bounded_number_of_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "PART_BYTES", 300)
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"".join(b'{"a": "%b"}\n' % (b"x" * size) for size in (100, 100, 500, 80, 80, 80)))
    assert [len(part.content) for part in read_parts([file])] == [220, 510, 270]
    assert [part.first for part in read_parts([file])] == [1, 3, 4]


def test_a_row_that_is_too_long_is_left_out_and_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "MAX_ROW_BYTES", 100)
    rows = [{"a": "x" * 91}, {"a": "x" * 1000}, {"a": 1}, {"a": "x" * 92}]
    for name, content in (("a.jsonl", json_lines(rows)[:-1]), ("a.json", json.dumps(rows).encode())):
        (tmp_path / name).write_bytes(content)
        (part,) = read_parts([tmp_path / name])
        assert len(part.content) < 200
        found = [row if isinstance(row, dict) else row.reason for _, row in rows_of(part)]
        assert found == [rows[0], "too long", rows[2], "too long"]


def test_line_numbers_count_blank_lines_and_line_ends_may_be_windows(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}\n[3]\n"x"\n{"a":\n{"a": "\xe9"}\n{"a": 4}')
    assert read(file) == [
        (0, 1, {"a": 1}),
        (0, 4, {"a": 2}),
        (
            0,
            5,
            "unknown format: a row must be a JSON object; found [3]; a file that is one JSON array is named .json",
        ),
        (0, 6, "unknown format: a row must be a JSON object; found 'x'"),
        (0, 7, "not JSON: Expecting value at character 6, near '{\"a\":'"),
        (0, 8, "not UTF-8: byte 0xe9 at 7; convert the file to UTF-8"),
        (0, 9, {"a": 4}),
    ]
    assert row_word(file) == "line"
    assert row_word(tmp_path / "a.json.gz") == "row"


def test_empty_files_have_no_parts(tmp_path):
    for name in ("a.jsonl", "b.json", "c.parquet"):
        (tmp_path / name).write_bytes(b"")
    write_parquet(tmp_path / "c.parquet", [{"a": 1}])
    pq.write_table(pq.read_table(tmp_path / "c.parquet").slice(0, 0), tmp_path / "c.parquet")
    assert list(read_parts(find_files(str(tmp_path)))) == []


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
@pytest.mark.parametrize("layout", [".jsonl", ".json"])
def test_a_file_that_was_cut_short_gives_the_rows_before(tmp_path, pack, layout):
    rows = [{"a": hashlib.sha512(b"%d" % number).hexdigest() * 8} for number in range(2000)]
    file = tmp_path / f"a{layout}{'.gz' if pack is gzip.compress else '.zst'}"
    content = pack(json_lines(rows) if layout == ".jsonl" else json.dumps(rows).encode())
    file.write_bytes(content[: len(content) // 2])
    *before, (_, number, last) = read(*find_files(str(file)))
    assert last.startswith("broken file: ")
    assert before == [(0, number, row) for number, row in enumerate(rows[: len(before)], start=1)]
    assert number == len(before) + 1 > 200


def test_parquet_reads_on_behind_a_damaged_row_group(tmp_path):
    file = tmp_path / "a.parquet"
    write_parquet(
        file, ROWS, row_group_size=10, use_dictionary=False, compression="zstd", write_page_checksum=True
    )
    whole = list(read_parts([file]))
    column = pq.ParquetFile(file).metadata.row_group(1).column(0)
    content = bytearray(file.read_bytes())
    at = column.data_page_offset
    content[at : at + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(content)
    found = read(file)
    assert [row for row in found if isinstance(row[2], dict)] == [
        (0, number, row) for number, row in enumerate(ROWS, start=1) if number not in range(11, 21)
    ]
    ((_, number, said),) = [row for row in found if isinstance(row[2], str)]
    assert number == 11
    assert said.startswith("broken file: ")
    damaged = list(read_parts([file]))
    assert [part.index for part in damaged] == [part.index for part in whole]
    assert list(read_parts([file], skip=3)) == damaged[3:] == whole[3:]


def test_parquet_without_a_readable_footer_is_broken_from_its_first_row(tmp_path):
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1" + b"\xff" * 60 + b"\x20\x00\x00\x00PAR1")
    ((_, number, said),) = read(*find_files(str(file)))
    assert number == 1
    assert said.startswith("broken file: ")


def test_arrow_leaves_out_what_is_null_and_names_what_cannot_be_read(tmp_path):
    file = tmp_path / "a.parquet"
    inner = [[{"a": 1, "b": None}, None], None, []]
    when = pa.array([1000, 1001, None], pa.timestamp("ns"))
    pq.write_table(pa.table({"inner": inner, "when": when}), file)
    first, second, third = (row for _, _, row in read(file))
    assert first["inner"] == [{"a": 1}, None]
    assert second.startswith("unknown format: a value cannot be read: Nanosecond")
    assert third == {"inner": []}
    text = pa.array([b"\xff", b"ok"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": text}), file)
    assert read(file) == [(0, 1, "not UTF-8: byte 0xff at 0 of a text"), (0, 2, {"text": "ok"})]


def test_lists_globs_and_folders_name_files(tmp_path):
    for name in ("b.jsonl", "a.json", "sub/c.parquet", "sub/.hidden/x.jsonl", "notes.md", "d/e.JSONL.GZ"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    write_parquet(tmp_path / "sub/c.parquet", [{"a": 1}])
    (tmp_path / "d/e.JSONL.GZ").write_bytes(gzip.compress(b""))
    names = ["a.json", "b.jsonl", "d/e.JSONL.GZ", "sub/c.parquet"]
    assert find_files(str(tmp_path)) == [tmp_path / name for name in names]
    listed = f"{tmp_path}/b.jsonl, {tmp_path}/*.json,{tmp_path}/*/"
    assert find_files(listed) == [tmp_path / name for name in ("b.jsonl", *names[:1], *names[2:])]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("none.jsonl", "none.jsonl: no such file"),
        ("x*.jsonl", r"x\*.jsonl: no file has such a name"),
        ("empty", "no file in this folder ends in .jsonl"),
        ("good.jsonl,", "an entry between commas is empty"),
        ("notes.txt", r"notes.txt: cannot tell .* must end in .jsonl, .ndjson, .json .*\.parquet"),
        ("good.parquet.gz", "good.parquet.gz: cannot tell"),
        ("good.jsonl,./*.jsonl", "good.jsonl is named twice"),
        ("link.json", None),
        ("good.jsonl,link.json", r"link.json is named twice \(also as .*good.jsonl\)"),
        ("wrong.parquet", r"wrong.parquet is no .parquet file: it begins with b'\{\"a\"'"),
        ("short.parquet", "short.parquet lacks the end of a Parquet file; it was cut short"),
        ("wrong.jsonl.gz", "wrong.jsonl.gz is no .gz file"),
        ("wrong.json.zst", "wrong.json.zst is no .zst file"),
        ("wide.jsonl", "wide.jsonl is UTF-16 text"),
        ("wide.jsonl.gz", "wide.jsonl.gz is UTF-16 text"),
    ],
)
def test_entries_that_name_no_rows(tmp_path, monkeypatch, inputs, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in (
        "good.jsonl",
        "notes.txt",
        "wrong.parquet",
        "wrong.jsonl.gz",
        "wrong.json.zst",
        "good.parquet.gz",
    ):
        pathlib.Path(name).write_bytes(b'{"a": 1}\n')
    pathlib.Path("short.parquet").write_bytes(b"PAR1" + b"\0" * 50)
    pathlib.Path("wide.jsonl").write_bytes('{"a": 1}'.encode("utf-16"))
    pathlib.Path("wide.jsonl.gz").write_bytes(gzip.compress('{"a": 1}'.encode("utf-16")))
    pathlib.Path("link.json").symlink_to("good.jsonl")
    if message is None:
        assert find_files(inputs) == [pathlib.Path(inputs)]
        return
    with pytest.raises(UserError, match=message):
        find_files(inputs)


def test_digest_of_the_stored_bytes(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"stored\r\n")
    assert content_digest(tmp_path / "a.jsonl") == hashlib.sha256(b"stored\r\n").hexdigest()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        content_digest(tmp_path / "none.jsonl")


def test_what_pyarrow_cannot_read_is_refused_with_a_remedy(tmp_path, monkeypatch):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "response": ["b"]}), file)

    def unsupported(*_, **__):
        raise pa.ArrowNotImplementedError("Unhandled type")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", unsupported)
    ((number, unused),) = [found for part in read_parts([file]) for found in rows_of(part)]
    assert number == 1
    assert unused.reason == "broken file"
    assert "cannot read this kind of content (Unhandled type); write the file anew" in unused.detail
