"""A client of OpenAI's chat completions, as vLLM, SGLang and others serve them.

What may pass (no connection, a time-out, 408, 425, 429, 5xx, half an answer) is tried again after a pause drawn
from [0, 2^n / 2] seconds, n counting the trials from 0, plus what the server asks for in Retry-After. What will
not pass is `Refused` at once.
"""

import contextlib
import email.utils
import http.client
import json
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from dflash_jax.answering.completions import OFF, Refused, Reply, reply_of
from dflash_jax.errors import UserError

CONNECT_TIMEOUT_S = 10.0
LONGEST_PAUSE_S = 60.0
PASSING = {408, 425, 429}


class Unavailable(Exception):
    """The server failed at every trial."""


class Stopped(Exception):
    """The client was closed while it waited."""


class Server:
    """Thread-safe. Every request has its own connection, which `close` breaks off."""

    def __init__(self, url: str, *, key: str | None, timeout_s: float, retries: int):
        """url: up to /v1; key: a bearer token; timeout_s: for an answer; retries: trials after the first."""
        try:
            parts = urllib.parse.urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError
            self._host, self._port = parts.hostname, parts.port
        except ValueError:  # also of a port that is no number
            raise UserError(f"server: found {url!r}, allowed: a URL such as http://localhost:8000/v1") from None
        self.url, self._path = url.rstrip("/"), parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._timeout_s, self._retries = timeout_s, retries
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._connections: set[http.client.HTTPConnection] = set()
        self.unknown: list[str] = []  # keys of OFF that the server turned out not to know

    def close(self) -> None:
        """Break off all requests, which then raise Stopped."""
        self._closed.set()
        with self._lock:
            for connection in self._connections:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):  # it may have ended just now
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def model(self, name: str | None) -> str:
        """The name of the model to ask for; None stands for the only one that the server has.

        Raises UserError where the server cannot be reached, wants another key, or has not just one model.
        """
        try:
            listed = self._request("GET", "/models", None)
        except Refused as error:
            if name is not None and error.status not in (401, 403):
                return name  # a server need not have a list
            raise UserError(
                f"server: {self.url}/models: {error}; check that the URL ends as the server's does (mostly /v1), "
                "name the model with model=, and put a key, if one is wanted, into OPENAI_API_KEY"
            ) from None
        except Unavailable as error:
            raise UserError(f"server: nothing answers at {self.url} ({error})") from None
        if name is not None:
            return name
        names = [str(entry.get("id")) for entry in listed.get("data", []) if isinstance(entry, dict)]
        if len(names) != 1:
            raise UserError(
                f"model: {self.url} has {len(names)} models, name one of: {', '.join(names) or 'none'}"
            )
        return names[0]

    def ask(self, body: Mapping[str, Any]) -> Reply:
        """The answer to a chat completion request. Raises Refused, Unavailable or Stopped."""
        while True:
            spared = {name for name in self.unknown if body.get(name) == OFF[name]}
            sent = {name: value for name, value in body.items() if name not in spared}
            try:
                return reply_of(self._request("POST", "/chat/completions", sent))
            except Refused as error:
                strange = {name for name, off in OFF.items() if sent.get(name) == off and name in str(error)}
                if not strange:
                    raise
                with self._lock:
                    self.unknown += sorted(strange.difference(self.unknown))

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        for trial in range(self._retries + 1):
            try:
                return self._once(method, path, content)
            except _Passing as error:
                if self._closed.is_set():
                    raise Stopped from None
                # A server that is not there when the run begins is a mistake in the URL.
                if trial == self._retries or (method == "GET" and error.no_server):
                    raise Unavailable(str(error)) from None
                pause_s = random.uniform(0, min(2.0**trial / 2, LONGEST_PAUSE_S)) + error.wait_s
            if self._closed.wait(min(pause_s, LONGEST_PAUSE_S)):
                raise Stopped
        raise AssertionError

    def _once(self, method: str, path: str, content: bytes | None) -> dict[str, Any]:
        connection = self._kind(self._host, self._port, timeout=min(CONNECT_TIMEOUT_S, self._timeout_s))
        with self._lock:
            self._connections.add(connection)
        try:
            try:
                connection.connect()
            except OSError as error:
                raise _Passing(f"no connection: {_said(error)}", no_server=True) from None
            if self._closed.is_set():
                raise _Passing("closed")
            connection.sock.settimeout(self._timeout_s)
            connection.request(method, self._path + path, content, self._headers)
            with connection.getresponse() as answer:
                return _content(answer.status, answer.read(), answer.getheader("Retry-After"))
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(_said(error)) from None
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()


class _Passing(Exception):
    """A failure that may not happen again. wait_s: how long the server wants to be left alone."""

    def __init__(self, said: str, *, wait_s: float = 0.0, no_server: bool = False):
        super().__init__(said)
        self.wait_s, self.no_server = wait_s, no_server


def _content(status: int, body: bytes, retry_after: str | None) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    if status == 200 and isinstance(content, dict):
        return content
    said = f"HTTP {status}: {_reason(content, body)}"
    if status == 200 or status in PASSING or status >= 500:
        raise _Passing(said, wait_s=_seconds(retry_after))
    raise Refused(said, status=status)


def _reason(content: Any, body: bytes) -> str:
    """The message of an error, however the server wraps it."""
    for name in ("error", "message", "detail"):
        if isinstance(content, dict) and name in content:
            content = content[name]
    said = content if isinstance(content, str) else body.decode(errors="replace")
    return " ".join(said.split())[:300]


def _seconds(retry_after: str | None) -> float:
    """What a Retry-After header asks for, in seconds or as a date; 0 where it asks for nothing."""
    asked = (retry_after or "0").strip()
    if asked.isdecimal():
        return float(asked)
    try:
        return max(email.utils.parsedate_to_datetime(asked).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
