"""A chat completions server in a thread, which answers by a rule and fails as it is told."""

import collections
import contextlib
import http.server
import json
import threading
import time
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]
# From a request and how often it came before, to what goes wrong: None, an HTTP status with headers, or a word.
Trouble = Callable[[Request, int], Any]


def spoken(request: Request) -> str:
    """The rule: an answer that tells which messages it was given."""
    return " / ".join(f"{message['role'][0]}:{message['content']}" for message in request["messages"])


class FakeServer:
    """received: requests by the text of `spoken`; answered: those that got an answer; most_at_once: of them."""

    def __init__(
        self,
        trouble: Trouble = lambda request, before: None,
        *,
        respond: Callable[[Request], Request] | None = None,
        models: tuple[str, ...] = ("tiny",),
        delay_s: float = 0.0,
    ):
        self.trouble, self.respond, self.models, self.delay_s = trouble, respond, models, delay_s
        self.received: collections.Counter[str] = collections.Counter()
        self.answered: collections.Counter[str] = collections.Counter()
        self.requests: list[Request] = []
        self.headers: list[Any] = []
        self.times: list[float] = []
        self.most_at_once = self._at_once = 0
        self.lock = threading.Lock()

    def __enter__(self):
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                owner.list_models(self)

            def do_POST(self):
                owner.complete(self)

            def log_message(self, *_):
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.handle_error = lambda *_: None  # clients that hang up are part of the tests
        self._http.daemon_threads = False  # so that leaving waits for every request
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def list_models(self, handler):
        self.headers.append(handler.headers)
        trouble = self.trouble({"messages": []}, len(self.headers) - 1)
        if isinstance(trouble, tuple):
            return send(handler, *trouble)
        if handler.path != "/v1/models":
            return send(handler, 404, {}, {"error": {"message": "no such page"}})
        return send(handler, 200, {}, {"data": [{"id": name} for name in self.models]})

    def complete(self, handler):
        request = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        said = spoken(request)
        with self.lock:
            before = self.received[said]
            self.received[said] += 1
            self.requests.append(request)
            self.headers.append(handler.headers)
            self.times.append(time.monotonic())
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(self.delay_s)
        trouble = self.trouble(request, before)
        with self.lock:
            # Before anything is sent: the client may ask again before this thread goes on.
            self._at_once -= 1
        if trouble == "hang up":
            return
        if trouble == "half":
            handler.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            return
        if trouble == "stall":
            time.sleep(0.6)
            return
        if trouble is not None:
            send(handler, *trouble)
            return
        with self.lock:
            self.answered[said] += 1
        send(handler, 200, {}, (self.respond or completion)(request))


def completion(request: Request, *, ending: str = "stop", **message: Any) -> Request:
    """A response: the rule's answer, or the message given."""
    said = spoken(request)
    given = {"role": "assistant", "content": f"[{said}]", "tool_calls": None} | message
    usage = {"prompt_tokens": len(said), "completion_tokens": 7}
    return {"choices": [{"index": 0, "message": given, "finish_reason": ending}], "usage": usage}


def send(handler, status: int, headers: dict[str, str], content: Any) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
