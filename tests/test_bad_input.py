"""Bad and odd input, a row of a table each: what becomes of it, and that the good rows around it are used.

Everything goes through whole preparations: files on disk, records out, and a report of what was not used.
"""

import gzip
import hashlib
import json
import pathlib
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_runs

from dflash_jax.chat.tokenizer import load_tokenizer
from dflash_jax.data.origin import Preparation
from dflash_jax.data.prepare import prepare_records
from dflash_jax.data.records import UNUSED
from dflash_jax.errors import UserError
from dflash_jax.sources.files import find_files

ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
GOOD = {"messages": [ASK, SAY]}
LINE = json.dumps(GOOD).encode()
MAX_LENGTH = 512
MONSTER = 2_000_000  # tokens


@pytest.fixture(scope="module")
def preparation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_runs.save_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    return Preparation(tokenizer, (tokenizer.eos_token_id,), arguments={}, max_length=MAX_LENGTH)


def prepared(inputs, preparation, *, out):
    """(records made, [(file, row, reason, detail)] not used)."""
    records = prepare_records(find_files(str(inputs)), out, preparation=preparation)
    lines = [json.loads(line) for line in (records.directory / UNUSED).read_text("utf-8").splitlines()]
    unused = [(pathlib.Path(line["file"]).name, line["row"], line["reason"], line["detail"]) for line in lines]
    return len(records), unused


def messages(*given, **row):
    return json.dumps({"messages": list(given), **row}).encode()


def said(**changes):
    return messages(ASK, SAY | changes)


def tokens(ids, **masked):
    return json.dumps({"input_ids": ids, **masked}).encode()


def nested(depth):
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


NOT_USED = [
    ("latin-1", LINE.replace(b"yes", b"caf\xe9"), "not UTF-8", "byte 0xe9"),
    ("lone surrogate", LINE.replace(b"yes", b"\\ud83d!"), "not UTF-8", "half of a surrogate pair"),
    ("broken JSON", b'{"messages": [,]}', "not JSON", "Expecting value at character 15"),
    ("half a row", LINE[:-20], "not JSON", "at character"),
    ("raw control character", LINE.replace(b"yes", b"a\tb"), "not JSON", "Invalid control character"),
    ("two objects on a line", LINE + b" " + LINE, "not JSON", "Extra data"),
    ("deep nesting", nested(100_000), "not JSON", "more than 200 deep"),
    ("just too deep nesting", nested(201), "not JSON", "more than 200 deep"),
    ("key twice", b'{"set": "a", ' + LINE[1:-1] + b', "set": "b"}', "duplicate key", "'set' stands twice"),
    ("key twice in a message", LINE.replace(b'"hi"', b'"hi", "role": "user"'), "duplicate key", "'role' stands"),
    ("NaN", LINE[:-1] + b', "score": NaN}', "not a number", "NaN"),
    ("Infinity", LINE[:-1] + b', "score": -Infinity}', "not a number", "-Infinity"),
    ("infinite float", LINE[:-1] + b', "score": 1e400}', "not a number", "1e400"),
    ("huge integer", LINE[:-1] + b', "id": ' + b"9" * 5000 + b"}", "not a number", "thousands of digits"),
    ("a list", b"[" + LINE + b"]", "unknown format", "found .*; a file that is one JSON array is named .json"),
    ("a number", b"42", "unknown format", "must be a JSON object; found 42"),
    ("no known format", b'{"text": "hi"}', "unknown format", r"found the keys \['text'\]"),
    ("two formats", messages(ASK, SAY, conversations=[]), "unknown format", "has messages and conversations"),
    ("set is a number", messages(ASK, SAY, set=1), "unknown format", '"set" must be a string'),
    ("response alone", b'{"response": "yes"}', "unknown format", "response but no prompt"),
    ("no messages", messages(), "bad message", "empty list"),
    ("messages is an object", b'{"messages": {"0": "hi"}}', "bad message", "must be a list"),
    ("message is a string", messages("hi", SAY), "bad message", r"messages\[0\] must be an object"),
    ("unknown role", messages(ASK, {"role": "bot", "content": "yes"}), "bad message", "has role 'bot'"),
    (
        "null question",
        messages({"role": "user", "content": None}, SAY),
        "bad message",
        r"\(user\) has content None",
    ),
    ("content is a number", said(content=3), "bad message", "has content 3"),
    ("an image", said(content=[{"type": "image", "url": "x"}]), "bad message", "a part of type 'image'"),
    ("weight 2", said(weight=2), "bad message", '"weight": 2'),
    ("truncated is a word", said(truncated="yes"), "bad message", "\"truncated\": 'yes'"),
    ("two reasonings", said(reasoning="a", thinking="b"), "bad message", "two reasonings"),
    ("unknown speaker", b'{"conversations": [{"from": "bing", "value": "x"}]}', "bad message", "from 'bing'"),
    ("value is a number", b'{"conversations": [{"from": "gpt", "value": 1}]}', "bad message", '"value": 1'),
    ("arguments are no JSON", said(tool_calls=[{"name": "f", "arguments": "{x"}]), "bad tool call", "'{x'"),
    ("call without a name", said(tool_calls=[{"function": {"arguments": {}}}]), "bad tool call", "must name"),
    ("tools is an object", messages(ASK, SAY, tools={"name": "f"}), "bad tool call", "tools must be a list"),
    ("token past the vocabulary", tokens([1, 5000], loss_mask=[1, 1]), "bad tokens", "token 5000"),
    ("negative token", tokens([1, -1], loss_mask=[1, 1]), "bad tokens", r"\[1\] is -1"),
    ("token past all integers", tokens([1, 10**30], loss_mask=[1, 1]), "bad tokens", r"\[1\] is 10000"),
    ("fractional token", tokens([1, 2.5], loss_mask=[1, 1]), "bad tokens", r"\[1\] is 2.5"),
    ("token is true", tokens([1, True], loss_mask=[1, 1]), "bad tokens", r"\[1\] is True"),
    ("no tokens", tokens([], loss_mask=[]), "bad tokens", "is empty"),
    ("short loss mask", tokens([1, 2, 3], loss_mask=[1, 1]), "bad tokens", "2 entries for 3 tokens"),
    ("shifted labels", tokens([1, 2, 3], labels=[2, 3, -100]), "bad tokens", r"labels\[0\] is 2; it must be"),
    ("neither mask nor labels", tokens([1, 2, 3]), "bad tokens", "found neither"),
    ("padded tokens", tokens([1, 2, 0], loss_mask=[1, 1, 0], attention_mask=[1, 1, 0]), "bad tokens", "padding"),
    ("no trained tokens", tokens([1, 2, 3], loss_mask=[0, 0, 0]), "no anchor", "0 trained tokens"),
    ("no two trained in a row", tokens([1, 2, 3], loss_mask=[1, 0, 1]), "no anchor", "2 trained tokens"),
    ("no answer", messages(ASK), "no answer", "no assistant message"),
    ("prompt without response", b'{"prompt": "hi"}', "no answer", "no assistant message"),
    ("only a system prompt", messages({"role": "system", "content": "s"}), "no answer", "no assistant message"),
    ("answers of weight 0", said(weight=0), "no answer", "weight 1"),
    ("answer first", messages(SAY), "template", "begins with an assistant message"),
    ("empty answer", said(content=""), "no anchor", "empty"),
    ("null answer", said(content=None), "no anchor", "empty"),
    ("tool call that the template drops", said(tool_calls=[{"name": "fetch"}]), "unverified", "tool calls"),
    ("monster answer", said(content="x" * MONSTER), "too long", f"no answer .*ends within {MAX_LENGTH}"),
    ("monster of tokens", tokens([1] * MONSTER, loss_mask=[1] * MONSTER), "too long", f"{MONSTER} tokens"),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("line", "reason", "detail"), [pytest.param(*row[1:], id=row[0]) for row in NOT_USED])
def test_a_bad_row_is_reported_and_the_rows_around_it_are_used(tmp_path, preparation, line, reason, detail):
    (tmp_path / "a.jsonl").write_bytes(LINE + b"\n" + line + b"\n" + LINE + b"\n")
    count, unused = prepared(tmp_path / "a.jsonl", preparation, out=tmp_path / "out")
    assert count == 2
    ((*place, what),) = unused
    assert place == ["a.jsonl", 2, reason]
    assert re.search(detail, what)
    assert len(what) < 400


USED = [
    ("NUL in a text", said(content="a\0b")),
    ("white space for an answer", said(content="  \n ")),
    ("token that ends a turn in the question", messages(ASK | {"content": "a<|im_end|>b"}, SAY)),
    ("token that ends a turn in the answer", said(content="a<|im_end|>b")),
    ("pair of surrogates", LINE.replace(b"yes", b"\\ud83d\\ude00")),
    ("two answers in a row", messages(ASK, SAY, SAY)),
    ("Windows line end", LINE + b"\r"),
    ("white space around", b" \t" + LINE + b"  "),
    ("unknown keys", said(likes=3, annotations=[{"a": None}]).replace(b"{", b'{"id": [1, {}], ', 1)),
    ("null keys", messages(ASK, SAY | {"tool_calls": None, "weight": None}, tools=None, conversations=None)),
    ("text parts", said(content=[{"type": "text", "text": "yes"}])),
    ("messages as JSON text", json.dumps({"messages": json.dumps(GOOD["messages"])}).encode()),
    ("deep nesting in a text", said(content="[{" * 200)),
    ("tokens to the last of the vocabulary", tokens([0, 257], labels=[0, 257])),
]


@pytest.mark.parametrize("line", [pytest.param(line, id=name) for name, line in USED])
def test_an_odd_row_is_used(tmp_path, preparation, line):
    (tmp_path / "a.jsonl").write_bytes(LINE + b"\n" + line + b"\n" + LINE + b"\n")
    assert prepared(tmp_path / "a.jsonl", preparation, out=tmp_path / "out") == (3, [])


def zstd(content):
    return pa.compress(content, codec="zstd", asbytes=True)


def many(count):
    """Lines that do not compress away, so that half of a file still holds some."""
    texts = (hashlib.sha512(b"%d" % number).hexdigest() for number in range(count))
    return b"".join(said(content=text) + b"\n" for text in texts)


def parquet(rows, **options):
    out = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), out, **options)
    return out.getvalue().to_pybytes()


def damaged(content):
    """A Parquet file whose second row group is overwritten."""
    column = pq.ParquetFile(pa.BufferReader(content)).metadata.row_group(1).column(0)
    at, size = column.data_page_offset, column.total_compressed_size
    return content[:at] + b"\xff" * size + content[at + size :]


def half(content):
    return content[: len(content) // 2]


CALLS = [ASK, {"role": "assistant", "content": "yes", "tool_calls": None}]
# name, content, records (None: some), the row and reason of what is not used
FILES = [
    ("byte-order-mark.jsonl", b"\xef\xbb\xbf" + LINE + b"\n" + LINE + b"\n", 2, []),
    ("windows.jsonl", LINE + b"\r\n\r\n" + LINE + b"\r\n", 2, []),
    ("blank-lines.jsonl", b"\n\n" + LINE + b"\n  \n\n" + b"{\n" + LINE + b"\n\n", 2, [(6, "not JSON")]),
    ("no-final-newline.jsonl", LINE + b"\n" + LINE, 2, []),
    ("half-a-line-last.jsonl", LINE + b"\n" + LINE + b"\n" + half(LINE), 2, [(3, "not JSON")]),
    ("packed.jsonl.gz", gzip.compress(LINE) + gzip.compress(b"\n" + LINE), 2, []),
    ("packed.jsonl.zst", zstd(LINE) + zstd(b"\n" + LINE), 2, []),
    ("short.jsonl.gz", half(gzip.compress(many(300))), None, [(None, "broken file")]),
    ("short.jsonl.zst", half(zstd(many(3000))), None, [(None, "broken file")]),
    ("more-after.jsonl.gz", gzip.compress(LINE + b"\n") + b"more", 1, [(2, "broken file")]),
    ("array.json", json.dumps([GOOD, GOOD], indent=2).encode(), 2, []),
    ("one.json", json.dumps(GOOD, indent=2).encode(), 1, []),
    ("lines.json", LINE + b"\n" + LINE, 2, []),
    ("broken-element.json", b"[" + LINE + b', {"messages": [,]}, ' + LINE + b"]", 2, [(2, "not JSON")]),
    (
        "element-is-a-list.json",
        b"[" + LINE + b", [], 7, " + LINE + b"]",
        2,
        [(2, "unknown format"), (3, "unknown format")],
    ),
    ("trailing-comma.json", b"[" + LINE + b", ]", 1, [(2, "not JSON")]),
    ("short.json", b"[" + LINE + b", " + half(LINE), 1, [(2, "broken file")]),
    ("more-after.json", b"[" + LINE + b"] more", 1, [(2, "not JSON")]),
    (
        "nested.parquet",
        parquet([GOOD, {"messages": CALLS}, {"messages": [ASK, SAY, ASK, SAY], "set": "b"}]),
        3,
        [],
    ),
    ("text.parquet", parquet([{"messages": json.dumps([ASK, SAY])}, {"messages": "[x"}]), 1, [(2, "bad message")]),
    (
        "other.parquet",
        parquet([{"text": "hi", "messages": None}, {"text": "ho", **GOOD}]),
        1,
        [(1, "unknown format")],
    ),
    ("damaged.parquet", damaged(parquet([GOOD] * 9, row_group_size=3)), 6, [(4, "broken file")]),
]


@pytest.mark.parametrize(
    ("name", "content", "count", "expected"), [pytest.param(*row, id=row[0]) for row in FILES]
)
def test_whole_files(tmp_path, preparation, name, content, count, expected):
    (tmp_path / name).write_bytes(content)
    records, unused = prepared(tmp_path / name, preparation, out=tmp_path / "out")
    if count is None:
        ((_, number, reason, _),) = unused
        assert (reason, number) == ("broken file", records + 1)
        assert records > 100
    else:
        assert records == count
        assert [row[1:3] for row in unused] == expected


REFUSED = [
    ("empty.jsonl", b"", "There are no rows in"),
    ("blank.jsonl", b"\n \r\n\n", "There are no rows in"),
    ("empty.json", b"[]", "There are no rows in"),
    ("number.json", b"42", "No row .* can be used: 1 unknown format. The first: .*number.json:1, .* found 42"),
    ("wide.jsonl", LINE.decode().encode("utf-16"), "wide.jsonl is UTF-16 text; convert it"),
    ("no.jsonl.gz", LINE, "no.jsonl.gz is no .gz file"),
    ("no.jsonl.zst", LINE, "no.jsonl.zst is no .zst file"),
    ("no.parquet", LINE, "no.parquet is no .parquet file"),
    ("short.parquet", half(parquet([GOOD] * 9)), "short.parquet lacks the end of a Parquet file"),
    ("wrong.parquet", b"PAR1" + b"\xff" * 50 + b"PAR1", "1 broken file. The first: .*wrong.parquet:1"),
    ("columns.parquet", parquet([{"a": 1}]), r"1 unknown format. .*found the keys \['a'\]"),
    ("rows.csv", LINE, "cannot tell what it holds; a name must end in .jsonl"),
    ("folder/rows.csv", LINE, "no file in this folder ends in .jsonl"),
    ("gone.jsonl", None, "gone.jsonl: no such file"),
]


@pytest.mark.parametrize(("name", "content", "message"), [pytest.param(*row, id=row[0]) for row in REFUSED])
def test_input_without_any_row_is_refused(tmp_path, preparation, name, content, message):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if content is not None:
        file.write_bytes(content)
    inputs = file.parent if name == "folder/rows.csv" else file
    with pytest.raises(UserError, match=message):
        prepared(inputs, preparation, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_is_not_used_twice_and_a_bad_file_does_not_spoil_the_next(tmp_path, preparation):
    (tmp_path / "a.jsonl").write_bytes(LINE + b"\nx\n")
    (tmp_path / "b.json").write_bytes(b"[" + LINE)
    (tmp_path / "c.jsonl").write_bytes(b"y\n" + LINE)
    with pytest.raises(UserError, match=r"a.jsonl is named twice"):
        prepared(f"{tmp_path}, {tmp_path}/a.jsonl", preparation, out=tmp_path / "out")
    count, unused = prepared(tmp_path, preparation, out=tmp_path / "out")
    assert count == 3
    assert [row[:3] for row in unused] == [
        ("a.jsonl", 2, "not JSON"),
        ("b.json", 2, "broken file"),
        ("c.jsonl", 1, "not JSON"),
    ]
