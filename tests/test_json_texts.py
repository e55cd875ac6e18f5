"""JSON texts: files of rows are cut where a parser would cut them, and a text is read strictly or not at all."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.sources.json_texts import DEEPEST, OVERSIZED, cut_rows, parse_json
from dflash_jax.sources.unused import UnusedRow

LETTERS = st.text(st.sampled_from('ab"\\{}[], \né\U0001f600'), max_size=12)
VALUES = st.recursive(
    LETTERS | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LETTERS, inner, max_size=3),
    max_leaves=12,
)


def cut(content, *, step=1 << 16, longest=1 << 20):
    return list(cut_rows((content[at : at + step] for at in range(0, len(content), step)), longest=longest))


@settings(deadline=None)
@given(st.lists(VALUES, max_size=5), st.integers(1, 40), st.booleans(), st.sampled_from([None, 1]))
def test_the_rows_of_an_array_are_its_elements(rows, step, ascii_only, indent):
    content = json.dumps(rows, ensure_ascii=ascii_only, indent=indent).encode()
    texts = cut(content, step=step)
    assert [text.count(b"\n") for text in texts] == [1] * len(rows)
    assert [json.loads(text) for text in texts] == rows


@settings(deadline=None)
@given(st.lists(st.dictionaries(LETTERS, VALUES, max_size=3), max_size=4), st.integers(1, 40))
def test_objects_may_stand_one_after_another(rows, step):
    content = "\n".join(json.dumps(row, indent=1) for row in rows).encode()
    assert [json.loads(text) for text in cut(content, step=step)] == rows


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"", []),
        (b" \n", []),
        (b"[]", []),
        (b"\xef\xbb\xbf [1 , 2]\n", [b"1\n", b"2\n"]),
        (b'[{"a": ,}, {"b": 1}, ]', [b'{"a": ,}\n', b'{"b": 1}\n', b",\n"]),
        (b'[{"a": 1}}, {"b": [}]}, 3]', [b'{"a": 1}}\n', b'{"b": [}]}\n', b"3\n"]),
        (b"[1,,2]", [b"1\n", b",\n", b"2\n"]),
        (b'[1] {"more": 2}', [b"1\n", b'{"more": 2}\n']),
        (b"42", [b"42\n"]),
        (b'{"a": 1} text {"b": 2}', [b'{"a": 1}\n', b'text {"b": 2}\n']),
        (b'["a\nb"]', [b'"a\rb"\n']),
    ],
)
def test_a_faulty_row_takes_no_other_along(content, texts):
    for step in (3, 4, 1000):
        assert cut(content, step=step) == texts


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"[", []),
        (b'[1, {"a": 2}', [b"1\n", b'{"a": 2}\n']),
        (b'[1, {"a": "b', [b"1\n"]),
        (b'[1, "\\', [b"1\n"]),
        (b'[{"a": [1]}, [', [b'{"a": [1]}\n']),
        (b'{"a": 1}\n{"a": ', [b'{"a": 1}\n']),
    ],
)
def test_a_file_that_ends_inside_a_row_says_so_after_the_rows_before(content, texts):
    rows = cut_rows([content], longest=100)
    assert [next(rows) for _ in texts] == texts
    with pytest.raises(ValueError, match="cut short"):
        next(rows)


def test_a_text_that_is_too_long_is_not_kept():
    content = json.dumps(["x" * 90, "y" * 300, {"z": 1}]).encode()
    for step in (7, 1000):
        assert cut(content, step=step, longest=100) == [b'"%b"\n' % (b"x" * 90), OVERSIZED + b"\n", b'{"z": 1}\n']


def nested(depth):
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r', {"a": "é"}),
        (r'"\ud83d\ude00 \\ud800"', "\U0001f600 \\ud800"),
        ("[1.5, 1e300, 123456789012345678901]", [1.5, 1e300, 123456789012345678901]),
        ('[{"a": 1}, {"a": 2}]', [{"a": 1}, {"a": 2}]),
        (nested(DEEPEST), json.loads(nested(DEEPEST))),
        ('"%s"' % ("[{" * 1000), "[{" * 1000),
    ],
)
def test_texts_that_are_read(text, value):
    assert parse_json(text) == value


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        (b'"\xe9"', "not UTF-8", "byte 0xe9 at 1"),
        ('{"a": {"b": "\\uD83D!"}}', "not UTF-8", r"'\\ud83d' is half of a surrogate pair"),
        ('{"\\udc00": 1}', "not UTF-8", "surrogate"),
        ('{"a": "x', "not JSON", "Unterminated string starting at at character 7, near"),
        ("[1] 2", "not JSON", "Extra data at character 5"),
        ('"a\tb"', "not JSON", "Invalid control character"),
        (nested(DEEPEST + 1), "not JSON", f"more than {DEEPEST} deep"),
        (nested(100_000), "not JSON", f"more than {DEEPEST} deep"),
        ('{"a": [{"b": 1, "c": 2, "b": 3}]}', "duplicate key", r"'b' stands twice .*'b', 'c', 'b'"),
        ("[NaN]", "not a number", "NaN"),
        ('{"a": -Infinity}', "not a number", "-Infinity"),
        ("1e999", "not a number", "'1e999' is too large"),
        ("1" * 5000, "not a number", "thousands of digits"),
    ],
)
def test_texts_that_are_refused(text, reason, detail):
    with pytest.raises(UnusedRow, match=detail) as caught:
        parse_json(text)
    assert caught.value.reason == reason
    assert "\n" not in caught.value.detail
