"""The client of chat completions against a server that misbehaves."""

import datetime
import email.utils
import threading
import time

import pytest
from fake_server import FakeServer, completion

from dflash_jax.answering import server as client
from dflash_jax.answering.completions import Refused, request_body
from dflash_jax.answering.generation import Generation
from dflash_jax.answering.server import Server, Stopped, Unavailable
from dflash_jax.errors import UserError

GREEDY = Generation(temperature=0.0, top_p=1.0, top_k=0, seed=3, max_new_tokens=50, template={})
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Pauses a hundred times as short; what they would have been is in the list."""
    drawn = []
    monkeypatch.setattr(client.random, "uniform", lambda low, high: drawn.append((low, high)) or high / 100)
    return drawn


def open_server(fake, **changes):
    return Server(fake.url, **({"key": None, "timeout_s": 5.0, "retries": 4} | changes))


def body(messages=HELLO, generation=GREEDY, tools=None):
    return request_body(messages, tools, model="tiny", generation=generation, seed=99)


def test_a_request_says_how_to_sample_even_where_nothing_is_asked_for():
    off = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    plain = {"model": "tiny", "messages": HELLO, "max_tokens": 50, "temperature": 0.0, "top_p": 1.0}
    assert body() == plain | off
    warm = Generation(0.7, 0.9, 20, 3, 50, {"enable_thinking": False})
    tools = [{"type": "function", "function": {"name": "f"}}]
    more = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 99, "tools": tools}
    more["chat_template_kwargs"] = {"enable_thinking": False}
    assert body(generation=warm, tools=tools) == plain | off | more


def test_messages_go_out_as_the_api_wants_them():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call], "weight": 0, "reasoning_content": "hm"},
        {"role": "tool", "content": "1", "tool_call_id": "1", "name": "f", "truncated": False},
    ]
    sent = body(messages)["messages"]
    assert sent[1]["tool_calls"] == [call | {"function": {"name": "f", "arguments": '{"x": "é"}'}}]
    assert sent[1]["reasoning_content"] == "hm"
    assert sent[2] == {"role": "tool", "content": "1", "tool_call_id": "1", "name": "f"}
    assert "weight" not in sent[1]
    assert isinstance(call["function"]["arguments"], dict), "the conversation itself was changed"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, {"content": "[u:hello]"}),
        ({"ending": "length"}, {"content": "[u:hello]", "truncated": True}),
        ({"content": None, "reasoning_content": "hm"}, {"content": "", "reasoning_content": "hm"}),
        ({"content": "so", "reasoning": "hm", "refusal": None}, {"content": "so", "reasoning_content": "hm"}),
        (
            {"content": None, "ending": "length", "reasoning": "hm"},
            {"content": "", "reasoning_content": "hm", "truncated": True},
        ),
        (
            {
                "content": None,
                "ending": "tool_calls",
                "tool_calls": [
                    {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                ],
            },
            {
                "content": "",
                "tool_calls": [{"id": "7", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
            },
        ),
    ],
)
def test_what_an_answer_becomes(given, message):
    with FakeServer(respond=lambda request: completion(request, **given)) as fake:
        reply = open_server(fake).ask(body())
    assert reply.message == {"role": "assistant", **message}
    assert (reply.tokens, reply.prompt_tokens) == (7, len("u:hello"))


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ({"error": "overloaded"}, "no chat completion"),
        ({"choices": []}, "no chat completion"),
        ({"choices": [{"message": None, "finish_reason": "stop"}]}, "no chat completion"),
        (completion({"messages": HELLO}, ending="content_filter"), "finish_reason 'content_filter'"),
        (completion({"messages": HELLO}, ending="abort"), "finish_reason 'abort'"),
        (completion({"messages": HELLO}, content=[1]), "bad message"),
        (completion({"messages": HELLO}, content="\ud83d"), "surrogate"),
        (
            completion({"messages": HELLO}, tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
            "bad tool call",
        ),
    ],
)
def test_answers_that_cannot_be_used_are_refused_without_another_trial(response, said):
    with FakeServer(respond=lambda request: response) as fake:
        with pytest.raises(Refused, match=said):
            open_server(fake).ask(body())
        assert fake.received["u:hello"] == 1


TROUBLES = [
    (408, {}, ""),
    (429, {}, {"error": {"message": "slow down"}}),
    (500, {}, "oh"),
    (503, {}, b"<html>"),
    (200, {}, b'{"choices": ['),
    "hang up",
    "half",
]


@pytest.mark.parametrize("trouble", TROUBLES, ids=str)
def test_what_may_pass_is_tried_again(trouble, impatient):
    with FakeServer(lambda request, before: trouble if before < 3 else None) as fake:
        assert open_server(fake).ask(body()).message["content"] == "[u:hello]"
        assert fake.received["u:hello"] == 4
        assert fake.answered["u:hello"] == 1
    assert impatient == [(0, 0.5), (0, 1), (0, 2)]


def test_an_answer_that_takes_too_long_is_asked_for_again():
    with FakeServer(lambda request, before: None if before else "stall") as fake:
        assert open_server(fake, timeout_s=0.2).ask(body()).message["content"] == "[u:hello]"
        assert fake.received["u:hello"] == 2


def test_after_the_last_trial_the_cause_is_named(impatient):
    with FakeServer(lambda request, before: (503, {}, {"error": {"message": "model is loading"}})) as fake:
        with pytest.raises(Unavailable, match="HTTP 503: model is loading"):
            open_server(fake, retries=2).ask(body())
        assert fake.received["u:hello"] == 3
        with pytest.raises(Unavailable):
            open_server(fake, retries=0).ask(body())
        assert fake.received["u:hello"] == 4
        with pytest.raises(Unavailable):
            open_server(fake, retries=9).ask(body())
    assert impatient[-1] == (0, 60.0), "a pause grows without end"


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 302])
def test_what_will_not_pass_is_refused_at_once(status):
    error = {"object": "error", "message": "This model's maximum context length is\n10 tokens"}
    with FakeServer(lambda request, before: (status, {}, error)) as fake:
        with pytest.raises(Refused, match=f"HTTP {status}: This model's maximum context length is 10 tokens"):
            open_server(fake).ask(body())
        assert fake.received["u:hello"] == 1


def test_a_server_is_left_alone_as_long_as_it_asks_for():
    with FakeServer(lambda request, before: None if before else (429, {"Retry-After": "1"}, "")) as fake:
        open_server(fake).ask(body())
        first, second = fake.times
    assert 1.0 <= second - first < 3.0


def test_retry_after_as_a_date_and_as_nonsense():
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=20)
    assert 15 < client._seconds(email.utils.format_datetime(soon, usegmt=True)) <= 20
    assert client._seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert client._seconds("3") == 3
    assert client._seconds(None) == client._seconds("soon") == client._seconds("-1") == client._seconds("nan") == 0


def test_an_hour_of_retry_after_is_a_minute(monkeypatch):
    waited = []
    with FakeServer(lambda request, before: None if before else (429, {"Retry-After": "3600"}, "")) as fake:
        server = open_server(fake)
        monkeypatch.setattr(server._closed, "wait", lambda seconds: waited.append(seconds))
        server.ask(body())
    assert waited == [60.0]


def test_a_key_that_only_says_off_is_left_out_where_it_is_not_known():
    def strict(request, before):
        strange = sorted(request.keys() & {"top_k", "min_p", "repetition_penalty"})
        return (
            (400, {}, {"error": {"message": f"Unrecognized request argument: {strange[0]}"}}) if strange else None
        )

    with FakeServer(strict) as fake:
        server = open_server(fake)
        assert server.ask(body()).message["content"] == "[u:hello]"
        assert sorted(server.unknown) == ["min_p", "repetition_penalty", "top_k"]
        server.ask(body())
        assert len(fake.requests) == 4 + 1
        warm = Generation(0.7, 1.0, 20, 3, 50, {})
        with pytest.raises(Refused, match="top_k"):
            server.ask(body(generation=warm))


def test_the_model_is_the_servers_only_one():
    with FakeServer() as fake:
        assert open_server(fake).model(None) == "tiny"
        assert open_server(fake).model("other") == "other"
    with FakeServer(models=("a", "b")) as fake:
        with pytest.raises(UserError, match="has 2 models, name one of: a, b"):
            open_server(fake).model(None)
        assert open_server(fake).model("b") == "b"


def test_a_list_of_models_is_not_needed_where_the_model_is_named():
    with FakeServer() as fake:
        root = Server(fake.url.removesuffix("/v1"), key=None, timeout_s=5.0, retries=1)
        assert root.model("tiny") == "tiny"
        with pytest.raises(UserError, match="HTTP 404: no such page; check that the URL ends"):
            root.model(None)


def test_the_key_is_sent_and_a_wrong_one_is_told_at_the_start():
    def guarded(request, before):
        return None if fake.headers[-1]["Authorization"] == "Bearer right" else (401, {}, {"detail": "who?"})

    with FakeServer(guarded) as fake:
        assert open_server(fake, key="right").model("tiny") == "tiny"
        for key in ("wrong", None):
            with pytest.raises(UserError, match=r"HTTP 401: who\?; .* OPENAI_API_KEY"):
                open_server(fake, key=key).model("tiny")


def test_a_server_that_is_not_there_is_told_at_once(impatient):
    with FakeServer() as fake:
        gone = open_server(fake)
    with pytest.raises(UserError, match=r"nothing answers at http://127\.0\.0\.1:\d+/v1 \(no connection: Conn"):
        gone.model(None)
    assert impatient == []
    with pytest.raises(Unavailable, match="no connection"):
        gone.ask(body())
    assert len(impatient) == 4


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://", "ftp://host/v1", "http://host:port/v1", "http://[", "8000", ""]
)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(UserError, match="server: found"):
        Server(url, key=None, timeout_s=1.0, retries=0)


@pytest.mark.parametrize("trouble", ["stall", (429, {"Retry-After": "50"}, "")], ids=str)
def test_closing_ends_requests_and_pauses(trouble):
    with FakeServer(lambda request, before: trouble) as fake:
        server = open_server(fake)
        threading.Timer(0.2, server.close).start()
        start = time.monotonic()
        with pytest.raises(Stopped):
            server.ask(body())
        assert time.monotonic() - start < 0.5
        assert fake.received["u:hello"] == 1
