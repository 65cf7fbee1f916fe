"""One connection: upgrades, pipelining, refusals, slow readers, and what a client leaves behind."""

import contextlib
import functools
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kunserve.core.config import ServerConfig
from kunserve.server.http.connection import FrontProtocol
from kunserve.server.http.limits import FrontLimits
from kunserve.server.start import serve
from tests.conftest import wait_until
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.live_server import MODEL, LiveServer, live_server

COMPLETIONS = "/v1/completions"
PROMPT = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
LIMITS = FrontLimits(
    header_timeout_s=0.5,
    body_timeout_s=20.0,
    max_waiting_chars=5000,
    max_body_values=1000,
    max_unfinished_bytes=250_000,
    small_body_bytes=1000,
)


@pytest.fixture(scope="module")
def shared() -> Generator[LiveServer, None, None]:
    with live_server(limits=LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def patient() -> Generator[LiveServer, None, None]:
    """For headers that come in parts: a busy machine takes its time between two."""
    with live_server(limits=replace(LIMITS, header_timeout_s=60.0)) as server:
        yield server


@pytest.fixture
def server(shared: LiveServer) -> Generator[LiveServer, None, None]:
    shared.renew_engine()
    yield shared
    wait_until(lambda: not shared.engine.tasks)
    wait_until(lambda: shared.front.num_in_flight == 0)
    shared.renew_engine()


def post_bytes(body: dict[str, Any], *headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "host: x", *headers]
    head = "\r\n".join([*lines, f"content-length: {len(content)}"])
    return head.encode() + b"\r\n\r\n" + content


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


UPGRADES = [
    ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQ"),
    ("connection: keep-alive, upgrade", "upgrade: websocket"),
    ("connection: UPGRADE", "upgrade: foo"),
]


@pytest.mark.parametrize("headers", UPGRADES, ids=lambda headers: headers[1])
@pytest.mark.parametrize("cut", ["nowhere", "in the headers", "behind the headers", "in the body"])
def test_a_request_that_wants_an_upgrade_keeps_its_body(
    patient: LiveServer, headers: tuple[str, ...], cut: str
) -> None:
    message = post_bytes(PROMPT, *headers)
    body_at = message.index(b"\r\n\r\n") + 4
    at = {"nowhere": 0, "in the headers": 9, "behind the headers": body_at}.get(cut, body_at + 5)
    with patient.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(message[:at])
        with patient.client() as other:  # a moment in which the first segment is read
            assert other.get("/health").status_code == 200
        connection.sendall(message[at:] + b"GET /version HTTP/1.1\r\nconnection: close\r\n\r\n")
        answer = everything(connection)
    assert answer.count(b"HTTP/1.1 200") == 2 and answer.count(b"HTTP/1.1") == 2
    assert answer.index(b"cmpl-") < answer.index(b'"version"')


@pytest.mark.parametrize("segments", [1, 2])
def test_no_request_is_read_out_of_a_body(patient: LiveServer, segments: int) -> None:
    inner = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    head = (
        b"POST /tokenize HTTP/1.1\r\nconnection: close, upgrade\r\nupgrade: h2c\r\n"
        b"content-length: %d\r\n\r\n" % len(inner)
    )
    with patient.connect() as connection:
        if segments == 1:
            connection.sendall(head + inner)
        else:
            connection.sendall(head)
            with patient.client() as other:
                assert other.get("/health").status_code == 200
            connection.sendall(inner)
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1


def test_connect_is_refused(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com\r\n\r\n")
        assert everything(connection).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_pipelined_request_hides_no_disconnect(server: LiveServer, state: str) -> None:
    server.configure(held=state == "queued", hold_after=3)
    body = PROMPT | {"max_tokens": 400, "stream": True}
    with server.connect() as connection:
        connection.sendall(post_bytes(body) + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_until(lambda: server.engine.tasks)
        if state == "running":
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(lambda: server.engine.aborted)


def test_pipelined_bodies_have_a_bound_together(server: LiveServer) -> None:
    server.configure(held=True)
    messages = post_bytes(PROMPT | {"user": "a" * 40_000}) * 1500
    with server.connect() as connection:
        connection.settimeout(2.0)
        with pytest.raises(TimeoutError):  # the server has stopped to read
            connection.sendall(messages)
        server.configure(held=False)


def until_a_late_header_is_refused(server: LiveServer) -> None:
    """Return when the deadline of a header that begins now has passed."""
    with server.connect() as connection:
        connection.sendall(b"G")
        assert everything(connection).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "garbage", [b"G", b"\x16\x03\x01 hello\r\n\r\n", b"GET /health HTTP/1.1\r\na: " + b"a" * 70_000]
)
def test_no_refusal_is_written_into_a_running_answer(server: LiveServer, garbage: bytes) -> None:
    server.configure(hold_after=3)
    with server.connect() as connection:
        connection.sendall(post_bytes(PROMPT | {"max_tokens": 10, "stream": True}))
        wait_until(lambda: server.engine.tasks)
        connection.sendall(garbage)
        until_a_late_header_is_refused(server)
        server.configure(hold_after=None)
        answer = everything(connection)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_body_that_breaks_off_gets_its_refusal(server: LiveServer) -> None:
    head = b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head + b"3\r\n{  \r\nnonsense\r\n")
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1


def test_a_client_that_says_nothing_hears_nothing(server: LiveServer) -> None:
    with server.connect() as connection:
        assert everything(connection) == b""


def test_malformed_requests_do_not_fill_the_log(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for line in (b"\x00\r\n\r\n", b"GET /health HTTP/1.1\r\nupgrade: a\r\nbroken\r\n\r\n"):
            with server.connect() as connection:
                connection.sendall(line)
                assert everything(connection).startswith(b"HTTP/1.1 400")
        with server.client() as client:
            headers = {"connection": "upgrade", "upgrade": "websocket"}
            assert client.get("/health", headers=headers).status_code == 200
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


class SlowTransport:
    """Holds what the test says that the client has not read."""

    num_unread = 100_000
    aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def get_extra_info(self, _name: str) -> socket.socket:
        return self.socket

    def abort(self) -> None:
        self.aborted = True

    def __init__(self) -> None:
        self.socket = socket.socket()


class Timer:
    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.call = functools.partial(function, *arguments)
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """Stands in for the loop: calls what was asked for when the test says so."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, _delay_s: float, function: Callable[..., None], *arguments: Any) -> Timer:
        self.timers.append(Timer(function, arguments))
        return self.timers[-1]

    def expire(self) -> None:
        timers, self.timers = self.timers, []
        for timer in timers:
            if not timer.cancelled:
                timer.call()


def test_a_slow_but_steady_reader_is_not_cut_off() -> None:
    transport, clock = SlowTransport(), Clock()
    protocol = FrontProtocol.__new__(FrontProtocol)
    protocol.limits, protocol.client = FrontLimits(), None
    protocol.transport, protocol.loop = transport, clock  # type: ignore[assignment]
    protocol._abort_unless_read()
    for _ in range(50):  # 1,000 bytes per write timeout, and never enough to write more
        transport.num_unread -= 1000
        clock.expire()
        assert clock.timers and not transport.aborted
    clock.expire()
    assert transport.aborted
    transport.socket.close()


@contextlib.contextmanager
def busy_threads(server: LiveServer) -> Generator[None, None, None]:
    """Both text threads work on something else for as long as this lasts."""
    release = threading.Event()
    pool = server.front.codec.threads._threads
    working = [pool.submit(release.wait, 60) for _ in range(2)]
    try:
        yield
    finally:
        release.set()
        for future in working:
            future.result(60)


def test_texts_of_clients_that_left_are_not_encoded(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = server.front.codec
    threads = codec.threads
    encoded: list[str] = []
    monkeypatch.setattr(codec, "_encode", lambda texts, _special: encoded.extend(texts))
    body = PROMPT | {"prompt": "a b " * 900}
    with busy_threads(server):
        for _ in range(5):  # together they would not have room
            with server.connect() as connection:
                connection.sendall(post_bytes(body))
                wait_until(lambda: threads.held_chars)
            wait_until(lambda: not threads.held_chars)
    with busy_threads(server):  # what was queued before has had its turn
        assert encoded == []


def test_texts_that_wait_have_a_bound(server: LiveServer) -> None:
    threads = server.front.codec.threads
    long = PROMPT | {"prompt": "a b " * 750}
    with server.connect() as first:
        with busy_threads(server):
            first.sendall(post_bytes(long))
            wait_until(lambda: threads.held_chars == 3000)
            with server.client() as client:
                refused = client.post(COMPLETIONS, json=long)
                assert refused.status_code == 503 and refused.headers["retry-after"]
                assert client.post(COMPLETIONS, json=PROMPT).status_code == 200
        assert first.recv(100).startswith(b"HTTP/1.1 400")  # too long, as its encoding shows
    wait_until(lambda: not threads.held_chars)


def test_bodies_on_their_way_have_a_bound(server: LiveServer) -> None:
    bodies = server.front.bodies
    part = post_bytes(PROMPT | {"user": "a" * 100_000})[:-10]
    with contextlib.ExitStack() as stack:
        for count in (1, 2):
            stack.enter_context(server.connect()).sendall(part)
            wait_until(lambda count=count: bodies.unfinished_bytes > 95_000 * count)
        with server.client() as client:
            refused = client.post(COMPLETIONS, json=PROMPT | {"user": "a" * 100_000})
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert client.post(COMPLETIONS, json=PROMPT).status_code == 200
    wait_until(lambda: bodies.unfinished_bytes == 0)
    with server.client() as client:
        body = PROMPT | {"user": "a" * 100_000}
        assert client.post(COMPLETIONS, json=body).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/responses"])
def test_a_request_has_arrived_when_its_body_has(server: LiveServer, path: str) -> None:
    """Not with its headers: a slow upload would pass everybody who came meanwhile."""
    asked: dict[str, dict[str, Any]] = {
        COMPLETIONS: PROMPT,
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
        "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    }
    content = json.dumps(asked[path]).encode() + b" " * 5000
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head.encode() + content[:-1])
        wait_until(lambda: server.front.bodies.unfinished_bytes > 3000)
        last_s = time.monotonic()
        connection.sendall(content[-1:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    (request,) = server.engine.submitted
    assert request.arrival_s >= last_s


def test_prompts_are_counted_before_they_are_encoded(server: LiveServer) -> None:
    with busy_threads(server), server.client() as client:
        many = {"prompt": ["a" * 500] * 20, "n": 100}
        for change, most in ((many, "1024 completions"), ({"user": "," * 2000}, "1024 values")):
            refused = client.post(COMPLETIONS, json=PROMPT | change)
            assert refused.status_code == 400 and f"at most {most}" in refused.text


def test_connections_that_are_cut_off_unheard_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_OVERFLOW", 0)
    settings = ServerConfig(max_connections=1, shutdown_timeout_s=1.0)
    with live_server(server=settings) as server, server.connect(), server.connect() as second:
        assert everything(second) == b""
        assert server.front.metrics.refusals["too_many_connections"] == 1


def test_an_engine_that_refuses_makes_no_arrival() -> None:
    with live_server(EchoEngine(admitting=False)) as server, server.client() as client:
        assert client.post(COMPLETIONS, json=PROMPT).status_code == 503
        assert server.front.metrics.arrivals == 0
        server.configure(admitting=True)
        answer: httpx.Response = client.post(COMPLETIONS, json=PROMPT | {"n": 2})
        assert answer.status_code == 200 and server.front.metrics.arrivals == 2
