"""Reading conversations: what is accepted, and how each fault is named."""

import hashlib
import json

import pytest

from dflash_jax.data.conversations import Conversation, content_digest, read_conversations
from dflash_jax.errors import UserError

ASK, ANSWER = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}


def test_reads_messages_sets_and_ignores_other_keys(tmp_path):
    path = tmp_path / "c.jsonl"
    lines = [{"messages": [ASK, ANSWER], "set": "maths", "id": 7}, {"messages": [ASK]}]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    assert read_conversations(path) == [Conversation((ASK, ANSWER), "maths"), Conversation((ASK,))]
    assert content_digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"messages": [', "not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1]", "found list"),
        (b'{"text": "x"}', r"found \['text'\]"),
        (b'{"messages": []}', '"messages"'),
        (b'{"messages": ["hi"]}', r"messages\[0\] must be an object"),
        (b'{"messages": [{"role": "bot", "content": ""}]}', r"messages\[0\] has role 'bot'"),
        (b'{"messages": [{"role": "user", "content": null}]}', "content of type NoneType"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "surrogate"),
        (b'{"messages": [{"role": "user", "content": "", "truncated": 1}]}', '"truncated": 1'),
        (b'{"messages": [{"role": "assistant", "content": "", "weight": 0.5}]}', '"weight": 0.5'),
        (b'{"messages": [{"role": "user", "content": ""}], "set": 3}', '"set" must be a string; found 3'),
    ],
)
def test_faults_name_file_line_and_finding(tmp_path, line, found):
    path = tmp_path / "c.jsonl"
    path.write_bytes(json.dumps({"messages": [ASK, ANSWER]}).encode() + b"\n" + line + b"\n")
    with pytest.raises(UserError, match=rf"c\.jsonl, line 2: .*{found}"):
        read_conversations(path)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_conversations(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no conversations"):
        read_conversations(tmp_path / "empty.jsonl")
