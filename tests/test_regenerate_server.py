"""`regenerate` with a server: every answer once, whatever fails; after a kill, only what is missing."""

import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import tiny_runs
from fake_server import FakeServer, completion, spoken

from dflash_jax import regenerate
from dflash_jax.answering import server as client
from dflash_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Pauses a hundred times as short, and no key of the person who runs the tests."""
    monkeypatch.setattr(client.random, "uniform", lambda low, high: high / 100)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def asked(count, turns=2):
    """Conversations of so many questions each, all different."""
    return [[{"role": "user", "content": f"{name}.{turn}"} for turn in range(turns)] for name in range(count)]


def command(folder, conversations, fake, *more):
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"set": "s", "messages": item}) + "\n" for item in conversations))
    return [f"server={fake.url}", f"prompts={prompts}", f"output={folder / 'out.jsonl'}", *more]


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def by_the_rule(conversation):
    """The conversation as the fake server answers it, worked out from its rule."""
    dialogue = []
    for message in conversation:
        dialogue.append(message)
        dialogue.append({"role": "assistant", "content": f"[{spoken({'messages': dialogue})}]"})
    return dialogue


def whole(folder, conversations):
    found = [line["messages"] for line in lines(folder / "out.jsonl")]
    return found == [by_the_rule(conversation) for conversation in conversations]


def settings(folder):
    return json.loads((folder / "out.jsonl.settings.json").read_text())


def test_every_turn_is_answered_after_the_ones_before_and_in_the_order_of_the_prompts(tmp_path):
    conversations = asked(40, 3)
    with FakeServer(delay_s=0.005) as fake:
        assert regenerate.main(command(tmp_path, conversations, fake, "concurrency=6", "max_new_tokens=77")) == 0
        assert fake.most_at_once == 6
        assert set(fake.answered.values()) == {1}
        assert {(request["model"], request["max_tokens"]) for request in fake.requests} == {("tiny", 77)}
    assert whole(tmp_path, conversations)
    found = settings(tmp_path)
    expected = {
        "model": "tiny",
        "server": fake.url,
        "temperature": 0.0,
        "max_new_tokens": 77,
        "left_to_server": [],
    }
    assert found | expected == found
    counts = {"conversations": 40, "answers": 120, "truncated": 0, "answer_tokens": 840}
    assert found["counts"] == counts | {"other_prompts": 0, "failed": 0}
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("out.jsonl", "out.jsonl.settings.json", "prompts.jsonl")
    ]


def test_a_server_that_fails_at_random_gives_every_answer_once(tmp_path):
    rng, guard = random.Random(5), threading.Lock()
    troubles = [(500, {}, "oh"), (429, {"Retry-After": "0"}, ""), (503, {}, ""), "hang up", "half", "stall"]
    seen = collections.Counter()

    def trouble(request, before):
        with guard:
            found = rng.choice([*troubles, None, None, None]) if before < 4 and request["messages"] else None
        seen[str(found)] += 1
        return found

    conversations = asked(60)
    with FakeServer(trouble) as fake:
        assert regenerate.main(command(tmp_path, conversations, fake, "concurrency=8", "timeout_s=0.3")) == 0
        assert set(fake.answered.values()) == {1}
        assert len(fake.answered) == 120
        assert fake.most_at_once <= 8 + seen["stall"], "more requests than connections that were given up"
    assert len(seen) == 7
    assert whole(tmp_path, conversations)


def test_what_the_server_refuses_is_told_and_the_others_go_on(tmp_path, capsys):
    def trouble(request, before):
        said = [message["content"] for message in request["messages"]]
        return (400, {}, {"error": {"message": "too long"}}) if {"7.0", "3.1"} & set(said) else None

    conversations = asked(12)
    with FakeServer(trouble) as fake:
        assert regenerate.main(command(tmp_path, conversations, fake)) == 0
        assert set(fake.received.values()) == {1}
    others = [conversation for index, conversation in enumerate(conversations) if index not in (3, 7)]
    assert whole(tmp_path, others)
    failed = lines(tmp_path / "out.jsonl.failed.jsonl")
    assert [(line["index"], line["reason"]) for line in failed] == [
        (3, "HTTP 400: too long"),
        (7, "HTTP 400: too long"),
    ]
    assert [message["content"] for message in failed[0]["messages"]] == ["3.0", "[u:3.0]", "3.1"]
    assert failed[1]["messages"] == conversations[7]
    assert settings(tmp_path)["counts"]["failed"] == 2
    assert "2 could not be answered" in capsys.readouterr().out


def test_the_run_stops_where_nothing_is_answered(tmp_path):
    error = (404, {}, {"error": {"message": "The model `x` does not exist."}})
    with FakeServer(lambda request, before: error if request["messages"] else None) as fake:
        arguments = command(tmp_path, asked(200), fake, "concurrency=4", "model=x")
        with pytest.raises(UserError, match=rf"{fake.url} failed for 4 conversations .* HTTP 404: The model `x`"):
            regenerate.main(arguments)
        assert sum(fake.received.values()) < 12
        (tmp_path / "two").mkdir()
        with pytest.raises(UserError, match="nothing could be answered; the first, conversation 1: HTTP 404"):
            regenerate.main(command(tmp_path / "two", asked(2), fake))


def test_a_server_that_dies_stops_the_run_and_the_command_continues(tmp_path):
    conversations = asked(90, 1)
    with FakeServer(lambda request, before: (502, {}, "") if len(fake.answered) >= 30 else None) as fake:
        arguments = command(tmp_path, conversations, fake, "concurrency=5", "retries=1")
        with pytest.raises(
            UserError, match="failed for 20 conversations one after another, at last with HTTP 502"
        ):
            regenerate.main(arguments)
        first = set(fake.answered)
        assert len(first) >= 30
    with FakeServer() as fake:
        arguments[0] = f"server={fake.url}"
        assert regenerate.main(arguments) == 0
        assert not first & set(fake.received)
        assert len(fake.answered) == 90 - len(first)
    assert whole(tmp_path, conversations)


def test_cut_answers_and_calls_of_tools_end_their_conversations(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}

    def respond(request):
        last = request["messages"][-1]["content"]
        if last == "0.0":
            return completion(request, ending="length", content="cut", reasoning="hm")
        if last == "1.0":
            return completion(request, ending="tool_calls", content=None, tool_calls=[call])
        if last == "2.0":
            return completion(request, content="thought", reasoning_content="hm")
        return completion(request)

    with FakeServer(respond=respond) as fake:
        assert regenerate.main(command(tmp_path, asked(3), fake)) == 0
        (second,) = [request for request in fake.requests if request["messages"][-1]["content"] == "2.1"]
    answers = [line["messages"][1:] for line in lines(tmp_path / "out.jsonl")]
    assert answers[0] == [{"role": "assistant", "content": "cut", "reasoning_content": "hm", "truncated": True}]
    parsed = call | {"function": {"name": "f", "arguments": {"x": 1}}}
    assert answers[1] == [{"role": "assistant", "content": "", "tool_calls": [parsed]}]
    assert answers[2][0] == {"role": "assistant", "content": "thought", "reasoning_content": "hm"}
    assert second["messages"][1]["reasoning_content"] == second["messages"][1]["reasoning"] == "hm"
    assert settings(tmp_path)["counts"]["truncated"] == 1


def test_tools_template_arguments_and_seeds_are_sent(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"messages": asked(1)[0], "tools": tools}, {"messages": asked(2)[1]}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["temperature=0.6", "top_p=0.95", "top_k=20", "seed=1", "template.enable_thinking=false"]
    sent = []
    for name in "ab":
        with FakeServer() as fake:
            arguments = [f"server={fake.url}", f"prompts={prompts}", f"output={tmp_path / name}.jsonl", *more]
            assert regenerate.main(arguments) == 0
        sent.append({spoken(request): request for request in fake.requests})
    assert sent[0] == sent[1]
    assert len({request["seed"] for request in sent[0].values()}) == 4
    for said, request in sent[0].items():
        assert request.get("tools") == (tools if "0.0" in said else None)
        assert request["chat_template_kwargs"] == {"enable_thinking": False}
        assert (request["temperature"], request["top_p"], request["top_k"]) == (0.6, 0.95, 20)


def test_prompts_of_another_length_than_the_targets_own_are_counted(tmp_path, capsys):
    path = tiny_runs.save_chat_llama(tmp_path / "target", num_hidden_layers=1)

    def respond(request):
        own = "".join(f"<{m['role']}\n{m['content']}>\n" for m in request["messages"]) + "<assistant\n"
        response = completion(request)
        response["usage"]["prompt_tokens"] = len(own) + (request["messages"][0]["content"] == "1.0")
        return response

    with FakeServer(respond=respond) as fake:
        assert regenerate.main(command(tmp_path, asked(3, 1), fake, f"target={path}")) == 0
    assert settings(tmp_path)["counts"]["other_prompts"] == 1
    assert "1 prompts have another length on the server" in capsys.readouterr().out


def test_the_key_of_the_environment_is_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with FakeServer() as fake:
        assert regenerate.main(command(tmp_path, asked(2), fake)) == 0
    assert {headers["Authorization"] for headers in fake.headers} == {"Bearer secret"}
    assert "secret" not in (tmp_path / "out.jsonl.settings.json").read_text()


def test_a_wrong_url_and_an_ambiguous_model_are_told_before_anything_is_written(tmp_path):
    with FakeServer() as fake:
        arguments = command(tmp_path, asked(2), fake)
    with pytest.raises(UserError, match="nothing answers at"):
        regenerate.main(arguments)
    with FakeServer(models=("a", "b")) as fake, pytest.raises(UserError, match="name one of: a, b"):
        regenerate.main(command(tmp_path, asked(2), fake))
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.jsonl"]


def recorded(partial):
    """(conversation, turn) of every answer in a journal that may have a torn last line."""
    whole = partial.read_bytes().rpartition(b"\n")[0].splitlines()[1:] if partial.exists() else []
    return [(line["index"], line["turn"]) for line in map(json.loads, whole)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_after_a_signal_nothing_that_is_answered_is_asked_again(tmp_path, number):
    conversations = asked(120)
    with FakeServer(delay_s=0.02) as fake:
        arguments = command(tmp_path, conversations, fake, "concurrency=4")
        partial = tmp_path / "out.jsonl.partial"
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_jax.regenerate", *arguments],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "nowhere"},  # a run with a server asks for no device
            stdout=subprocess.PIPE,
            text=True,
        )
        while len(recorded(partial)) < 40:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        said = process.communicate()[0]
        assert process.returncode == (-number if number == signal.SIGKILL else 1)
        assert ("the same command continues" in said) is (number == signal.SIGTERM)
        kept = recorded(partial)
        assert 40 <= len(kept) < 240
        assert len(kept) == len(set(kept))
        fake.delay_s = 0.0
        time.sleep(0.1)
        before = fake.received.copy()
        assert regenerate.main(arguments) == 0
        assert sum((fake.received - before).values()) == 240 - len(kept)
        assert sum(fake.received.values()) <= 240 + 4, "more was asked twice than was on its way"
    assert whole(tmp_path, conversations)
