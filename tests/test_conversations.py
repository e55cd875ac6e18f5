"""Rows in the formats of others become conversations in one spelling; what could be misread is refused by name."""

import gzip
import json
import pickle

import numpy as np
import pytest

from dflash_jax.errors import UserError
from dflash_jax.sources.conversations import Conversation, parse_row, read_conversations
from dflash_jax.sources.token_rows import TokenRow
from dflash_jax.sources.unused import REASONS, UnusedRow

ASK = {"role": "user", "content": "1 + 1?"}
ANSWER = {"role": "assistant", "content": "2", "truncated": True}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_formats_of_one_conversation():
    expected = (ASK, {"role": "assistant", "content": "2"})
    sharegpt = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2", "weight": None}]
    rows = [
        {"messages": list(expected), "prompt": "1 + 1?", "prompt_id": 3},
        {"messages": json.dumps(expected)},
        {"conversations": list(expected), "messages": None},
        {"conversations": sharegpt, "id": "x", "tokens": 17},
        {"prompt": "1 + 1?", "response": "2", "system": None},
        {"prompt": "1 + 1?", "completion": "2", "system": ""},
    ]
    assert [parse_row(row) for row in rows] == [Conversation(expected)] * len(rows)
    assert parse_row({"prompt": "1 + 1?", "set": "maths"}) == Conversation((ASK,), "maths")


def test_system_prompt_beside_the_messages():
    expected = ({"role": "system", "content": "be brief"}, ASK)
    for row in (
        {"messages": [ASK]},
        {"prompt": "1 + 1?"},
        {"conversations": [{"from": "user", "value": "1 + 1?"}]},
    ):
        assert parse_row(row | {"system": "be brief"}) == Conversation(expected)
    with pytest.raises(UnusedRow, match="system prompt under system and in its messages"):
        parse_row({"messages": list(expected), "system": "be brief"})


def test_every_sharegpt_speaker():
    speakers = {
        "system": "system",
        "human user": "user",
        "gpt assistant chatgpt model": "assistant",
        "tool observation function_response": "tool",
    }
    for names, role in speakers.items():
        for name in names.split():
            (message,) = parse_row({"conversations": [{"from": name, "value": "x"}]}).messages
            assert message == {"role": role, "content": "x"}
    for value in ({"name": "add", "arguments": {"a": 1}}, [{"name": "add", "arguments": '{"a": 1}'}]):
        (message,) = parse_row({"conversations": [{"from": "function_call", "value": json.dumps(value)}]}).messages
        assert message == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_messages_in_one_spelling():
    given = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ASK | {"name": "Ann", "id": 7, "tool_calls": [], "thinking": "ignored", "weight": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "c1", "index": 0}], "reasoning": ""},
        {"role": "tool", "content": None, "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "2", "thinking": "hm", "reasoning_content": "hm", "truncated": False},
        {"role": "assistant", "content": None, "weight": 0.0},
    ]
    thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "hm")
    assert parse_row({"messages": given}).messages == (
        {"role": "developer", "content": "ab"},
        ASK | {"name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALL}]},
        {"role": "tool", "content": "", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "2", "truncated": False} | thought,
        {"role": "assistant", "content": "", "weight": 0},
    )


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
@pytest.mark.parametrize("flat", [True, False])
def test_tool_calls_and_tools_may_be_json_text(arguments, flat):
    function = {"name": "add", "arguments": arguments}
    calls = [function if flat else {"function": function}]
    for given, tools in ((calls, [TOOL]), (json.dumps(calls), json.dumps([TOOL]))):
        read = parse_row({"messages": [ASK, {"role": "assistant", "tool_calls": given}], "tools": tools})
        assert read.messages[1]["tool_calls"] == [CALL]
        assert read.tools == (TOOL,)
    assert parse_row({"messages": [ASK], "tools": []}).tools is None


def test_arguments_of_a_tool_may_be_left_out():
    for given in ({}, {"arguments": None}, {"arguments": ""}):
        calls = [{"name": "now", **given}]
        (message,) = parse_row({"messages": [{"role": "assistant", "tool_calls": calls}]}).messages
        assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize(
    ("masked", "mask"),
    [
        ({"loss_mask": [0, 1, 1]}, [False, True, True]),
        ({"loss_mask": [False, True, 1], "attention_mask": [1, 1, True]}, [False, True, True]),
        ({"labels": [-100, 8, 0]}, [False, True, True]),
        ({"labels": [-100, -100, -100], "loss_mask": None}, [False, False, False]),
    ],
)
@pytest.mark.parametrize("key", ["input_ids", "tokens"])
def test_rows_of_tokens(key, masked, mask):
    read = parse_row({key: [7, 8, 0], "set": "s", "prompt": "x", **masked})
    assert isinstance(read, TokenRow)
    assert (read.tokens.dtype, read.loss_mask.dtype) == (np.int32, bool)
    assert (read.tokens.tolist(), read.loss_mask.tolist(), read.set) == ([7, 8, 0], mask, "s")


def message(**changes):
    return {"messages": [ASK, {"role": "assistant", "content": "2"} | changes]}


def tokens(ids, **masked):
    return {"input_ids": ids, **(masked or {"loss_mask": [1] * len(ids)})}


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        (
            {"text": "x", "id": None},
            "unknown format",
            r"needs messages, .* or input_ids; found the keys \['id', 't",
        ),
        ({"messages": None}, "unknown format", r"found the keys \['messages'\]"),
        ({"response": "x"}, "unknown format", "response but no prompt"),
        ({"tokens": 12}, "unknown format", "needs messages"),
        (message() | tokens([1]), "unknown format", "has messages and input_ids; keep one"),
        ({"prompt": "", "response": "", "completion": ""}, "unknown format", "has response and completion"),
        (message() | {"set": 3}, "unknown format", '"set" must be a string; found 3'),
        ({"messages": []}, "bad message", "messages is an empty list"),
        ({"messages": {"role": "user"}}, "bad message", "messages must be a list of messages; found {'role'"),
        ({"messages": "hello"}, "bad message", "messages is the text 'hello', which is not JSON: Expecting value"),
        ({"messages": [ASK, "hi"]}, "bad message", r"messages\[1\] must be an object .* found 'hi'"),
        (message(role="bot"), "bad message", r"messages\[1\] has role 'bot'; use one of system, developer"),
        (message(role=None), "bad message", r"messages\[1\] has role None"),
        (message(role="user", content=None), "bad message", r"messages\[1\] \(user\) has content None"),
        (message(content=2), "bad message", "has content 2; it must be a string or a list"),
        (
            message(content=[{"type": "image_url"}]),
            "bad message",
            r"content\[0\] must .* found a part of type 'image_",
        ),
        (message(content=[{"type": "text", "text": None}]), "bad message", "a part of type 'text'"),
        (message(content=["x"]), "bad message", "found 'x'"),
        (message(name=3), "bad message", '"name": 3; it must be a string'),
        (message(truncated=1), "bad message", '"truncated": 1; it must be true or false'),
        (message(weight=0.5), "bad message", '"weight": 0.5; it must be 0'),
        (message(reasoning=["x"]), "bad message", r"has reasoning \['x'\]; it must be a string"),
        (message(reasoning="x", thinking="y"), "bad message", "two reasonings, 'x' and 'y'; keep one"),
        (
            {"conversations": [{"from": "bard", "value": "x"}]},
            "bad message",
            r"\[0\] is from 'bard'; use one of sys",
        ),
        ({"conversations": [{"from": "gpt", "value": None}]}, "bad message", r'\(from gpt\) has "value": None'),
        ({"prompt": ["x"], "response": "x"}, "bad message", r"prompt must be a string; found \['x'\]"),
        ({"prompt": "x", "response": 4}, "bad message", "response must be a string; found 4"),
        (message() | {"system": 5}, "bad message", r"system \(system\) has content 5"),
        (message(tool_calls={"name": "f"}), "bad tool call", r"messages\[1\].tool_calls must be a list of calls"),
        (message(tool_calls=[{"function": {}}]), "bad tool call", r"tool_calls\[0\] must name the function"),
        (message(tool_calls=["f"]), "bad tool call", "must name the function it calls; found 'f'"),
        (
            message(tool_calls=[{"name": "f", "arguments": "{"}]),
            "bad tool call",
            "arguments is the text '{', which is",
        ),
        (
            message(tool_calls=[{"name": "f", "arguments": "[1]"}]),
            "bad tool call",
            r"\(f\) needs an object .* \[1\]",
        ),
        (message(role="user", tool_calls=[CALL]), "bad tool call", "role user; only an assistant"),
        (
            {"conversations": [{"from": "function_call", "value": "f()"}]},
            "bad tool call",
            r"value is the text 'f\(\)'",
        ),
        (message() | {"tools": {"a": 1}}, "bad tool call", "tools must be a list of objects; found {'a': 1}"),
        (message() | {"tools": ["f"]}, "bad tool call", "tools must be a list of objects"),
        (message() | {"tools": "none"}, "bad tool call", "tools is the text 'none', which is not JSON"),
        (tokens([]), "bad tokens", "input_ids is empty"),
        (tokens("1 2"), "bad tokens", "input_ids must be a list of integers; found '1 2'"),
        (tokens([1, 2.0]), "bad tokens", r"input_ids\[1\] is 2.0; it must be an integer"),
        (tokens([True]), "bad tokens", r"input_ids\[0\] is True"),
        (tokens([[1, 2]]), "bad tokens", r"input_ids\[0\] is \[1, 2\]"),
        (tokens([1, -1]), "bad tokens", r"input_ids\[1\] is -1; it must lie between 0 and 2147483647"),
        (tokens([2**31]), "bad tokens", "is 2147483648"),
        (tokens([1, 2], loss_mask=[1]), "bad tokens", "loss_mask has 1 entries for 2 tokens"),
        (tokens([1, 2], loss_mask=[1, 2]), "bad tokens", r"loss_mask\[1\] is 2; it must be 0 or 1"),
        (tokens([1, 2], loss_mask=[0.0, 1.0]), "bad tokens", r"loss_mask\[0\] is 0.0; it must be an integer"),
        (
            tokens([1, 2], labels=[-100, 3]),
            "bad tokens",
            r"labels\[1\] is 3; it must be -100 or .* itself, 2, not the",
        ),
        (tokens([1, 2], labels=[-1, 2]), "bad tokens", r"labels\[0\] is -1"),
        (tokens([1, 2], other=1), "bad tokens", r"one of loss_mask .* and labels .*; found neither"),
        (tokens([1], labels=[1], loss_mask=[1]), "bad tokens", "found loss_mask and labels"),
        (tokens([1, 0], loss_mask=[1, 0], attention_mask=[1, 0]), "bad tokens", "without padding"),
    ],
)
def test_rows_that_cannot_be_used_say_where_and_what(row, reason, detail):
    with pytest.raises(UnusedRow, match=detail) as caught:
        parse_row(row)
    assert caught.value.reason == reason
    assert "\n" not in caught.value.detail


def test_what_was_found_is_shortened():
    with pytest.raises(UnusedRow) as caught:
        parse_row({"messages": [{"role": "user", "content": {"text": ["x" * 1000] * 1000}}]})
    assert len(caught.value.detail) < 250


def test_the_reason_goes_between_processes_and_is_one_of_those_known():
    unused = pickle.loads(pickle.dumps(UnusedRow("bad message", "why")))
    assert (unused.reason, unused.detail, str(unused)) == ("bad message", "why", "bad message: why")
    with pytest.raises(ValueError, match="'because' is none of the reasons"):
        UnusedRow("because", "why")
    assert all(meaning for meaning in REASONS.values())


def test_conversations_of_a_file_in_order(tmp_path):
    rows = [{"messages": [ASK, ANSWER], "set": "maths", "id": 7}, {"prompt": "1 + 1?"}]
    expected = [Conversation((ASK, ANSWER), "maths"), Conversation((ASK,))]
    (tmp_path / "c.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    assert read_conversations(tmp_path / "c.jsonl") == expected
    assert read_conversations(str(tmp_path / "c.json.gz")) == expected


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"messages": [', "not JSON: Expecting value"),
        ('{"messages": []}', "bad message: messages is an empty list"),
        ('{"input_ids": [1], "loss_mask": [1]}', "unknown format: token ids, where the text"),
    ],
)
def test_the_first_bad_row_of_a_file_is_named(tmp_path, line, found):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": [ASK, ANSWER]}) + "\n\n" + line + "\n")
    with pytest.raises(UserError, match=rf"c\.jsonl, line 3: {found}"):
        read_conversations(path)
    path = tmp_path / "c.json"
    path.write_text(json.dumps([{"messages": [ASK, ANSWER]}, [1]]))
    with pytest.raises(UserError, match=r"c\.json, row 2: unknown format"):
        read_conversations(path)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl: no such file"):
        read_conversations(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no conversations"):
        read_conversations(tmp_path / "empty.jsonl")
