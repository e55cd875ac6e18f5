"""JSON texts: cut one after another out of a stream of bytes, and parsed without forgiving anything.

A file may hold one array of rows or rows one after another. It is cut where the brackets close, without parsing,
so that memory stays flat, and one faulty row does not take those after it along.
"""

import codecs
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from dflash_jax.sources.unused import UnusedRow, shown

OVERSIZED = b"\0oversized"  # stands for a text that was too long to keep; no JSON text begins so
# Lists and objects inside one another. What Python itself can read depends on how deep its stack is already.
DEEPEST = 200

# On bytes without escapes, see _without_escapes. Nothing is demanded after a loop, so that none is ever retried.
_INSIDE = re.compile(rb'(?:[^"{}\[\]]+|"[^"]*")*')
_BETWEEN = re.compile(rb'[^"{}\[\],]*')
_QUOTED = re.compile(rb'[^"]*')
_QUOTE, _COMMA, _CLOSING, _OPENING = b'"', b",", b"]}", b"[{"


def parse_json(text: bytes | str) -> Any:
    """The value of one JSON text; a byte order mark before it is ignored.

    Raises UnusedRow for what is not UTF-8 or not JSON, for a key that an object has twice, for NaN, Infinity and
    numbers beyond every float, and for half of a surrogate pair in a string, which no tokenizer can encode.
    """
    try:
        letters = text if isinstance(text, str) else text.removeprefix(codecs.BOM_UTF8).decode()
        value = _DECODER.decode(letters)
        if letters.count("[") + letters.count("{") > DEEPEST and _depth(value) > DEEPEST:
            raise RecursionError
        if "\\ud" in letters or "\\uD" in letters:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as fault:
        raise UnusedRow(
            "not UTF-8", f"byte {fault.object[fault.start]:#04x} at {fault.start}; convert the file to UTF-8"
        ) from fault
    except UnicodeEncodeError as fault:
        half = fault.object[fault.start]
        raise UnusedRow(
            "not UTF-8", f"{half!a} is half of a surrogate pair, not a character; remove it"
        ) from fault
    except json.JSONDecodeError as fault:
        near = fault.doc[max(0, fault.pos - 20) : fault.pos + 20]
        raise UnusedRow("not JSON", f"{fault.msg} at character {fault.pos + 1}, near {shown(near)}") from fault
    except RecursionError as fault:
        raise UnusedRow("not JSON", f"lists or objects inside one another more than {DEEPEST} deep") from fault
    except ValueError as fault:  # Python's limit on the digits of an integer
        raise UnusedRow("not a number", "an integer of thousands of digits") from fault
    return value


def _depth(value: Any) -> int:
    depth, inside = 0, [value]
    while inside := [item for item in inside if isinstance(item, list | dict)]:
        depth += 1
        inside = [inner for item in inside for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UnusedRow("duplicate key", f"{shown(twice)} stands twice in an object with the keys {shown(keys)}")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise UnusedRow("not a number", f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise UnusedRow("not a number", f"{shown(text)} is too large for a float")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)


def cut_rows(chunks: Iterable[bytes], *, longest: int) -> Iterator[bytes]:
    """The texts of the rows of a JSON file, each on one line with its line end.

    chunks: the file's bytes, a byte order mark in one piece. longest: bytes; OVERSIZED stands for a longer text,
    which is not kept. Raises ValueError where the file ends inside a row or its array.
    """
    row, depth, quoted, rows = _Row(longest), 0, False, 0
    in_array = closed = False
    started = False
    for chunk in _whole_escapes(chunks):
        at = 0
        if not started:
            chunk = chunk.removeprefix(codecs.BOM_UTF8).lstrip()
            started = bool(chunk)
            in_array = chunk.startswith(b"[")
            at = int(in_array)
        start, plain = at, _without_escapes(chunk)
        while at < len(chunk) and not closed:
            if quoted:
                at = _end(_QUOTED, plain, at) + 1
                quoted = at > len(chunk)
                continue
            at = _end(_INSIDE if depth else _BETWEEN, plain, at) + 1
            letter = plain[at - 1 : at]
            if not letter:
                break
            if letter == _QUOTE:
                quoted = True
            elif letter in _OPENING:
                depth += 1
            elif letter in _CLOSING and depth:
                depth -= 1
                if not depth and not in_array:
                    row.add(chunk[start:at])
                    yield row.take()
                    start = at
            elif in_array and letter != b"}":
                row.add(chunk[start : at - 1])
                closed = letter != _COMMA
                if rows or letter == _COMMA or not row.blank:
                    yield row.take()
                    rows += 1
                start = at
        row.add(chunk[start:])
    inside = bool(depth or quoted)
    if not inside and not row.blank:
        yield row.take()
    if inside or (in_array and not closed):
        raise ValueError("the file ends inside a row or its array; it was cut short")


def _end(pattern: re.Pattern[bytes], chunk: bytes, at: int) -> int:
    match = pattern.match(chunk, at)
    return match.end() if match else at


def _without_escapes(chunk: bytes) -> bytes:
    """The same number of bytes, in which every quote begins or ends a string."""
    return chunk.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def _whole_escapes(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in chunks none of which ends with a backslash, but perhaps the last."""
    held = b""
    for chunk in chunks:
        held += chunk
        if not held.endswith(b"\\"):
            yield held
            held = b""
    if held:
        yield held


class _Row:
    """The text of the row being cut, kept as long as it is not too long."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.kept = bytearray()
        self.size = 0

    @property
    def blank(self) -> bool:
        return self.size == len(self.kept) and not self.kept.strip()

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        if self.size <= self.longest:
            self.kept += piece
        else:
            self.kept.clear()

    def take(self) -> bytes:
        """The text on one line; a comma where there is none between two commas, which is then no JSON."""
        # A line end inside a row becomes a carriage return: blank between values, and as wrong within strings.
        text = bytes(self.kept).strip().replace(b"\n", b"\r") or b","
        if self.size > self.longest:
            text = OVERSIZED
        self.kept.clear()
        self.size = 0
        return text + b"\n"
