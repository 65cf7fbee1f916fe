"""What clients get wrong: each gets the documented error at once, and the server stays up."""

import contextlib
import json
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kunserve.core.config import ServerConfig
from kunserve.server.http.limits import FrontLimits
from tests.conftest import wait_until
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.live_server import MODEL, LiveServer, live_server
from tests.unit.server.telemetry.test_metrics import labels, samples

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LIMITS = FrontLimits(max_body_bytes=1 << 20, max_discarded_bytes=60 << 20)
"""Patient, because on a busy machine 50 MB took longer than a limit that tests can wait for."""
IMPATIENT = FrontLimits(body_timeout_s=1.0, header_timeout_s=1.0, write_timeout_s=0.5)
"""Only for clients who are to be cut off."""


@pytest.fixture(scope="module")
def shared() -> Generator[LiveServer, None, None]:
    with live_server(limits=LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def shared_impatient() -> Generator[LiveServer, None, None]:
    with live_server(limits=IMPATIENT) as server:
        yield server


@pytest.fixture
def server(shared: LiveServer) -> Generator[LiveServer, None, None]:
    yield from used_by_one_test(shared)


@pytest.fixture
def impatient(shared_impatient: LiveServer) -> Generator[LiveServer, None, None]:
    yield from used_by_one_test(shared_impatient)


def used_by_one_test(server: LiveServer) -> Generator[LiveServer, None, None]:
    """A module's server; afterwards nothing of the test's requests is left."""
    server.renew_engine()
    yield server
    wait_until(lambda: not server.engine.tasks)
    wait_until(lambda: server.front.num_in_flight == 0)
    server.renew_engine()
    with server.client() as client:
        assert client.get("/health").status_code == 200
        answer = client.post(COMPLETIONS, json={"model": MODEL, "prompt": "a", "max_tokens": 1})
        assert answer.status_code in (200, 503)


@pytest.fixture
def client(server: LiveServer) -> Generator[httpx.Client, None, None]:
    with server.client() as one:
        yield one


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    (name,) = answer.json()
    error = answer.json()["error"]
    assert name == "error" and set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status and error["message"]
    assert "Traceback" not in answer.text
    return error


PROMPT = {"model": MODEL, "prompt": "hello"}
HI = [{"role": "user", "content": "hi"}]
MESSAGES = {"model": MODEL, "messages": HI}

BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, 2.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1, "a"]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [400]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [1] * 513}, "prompt"),
    ({"prompt": [1] * 512}, "prompt"),
    ({"prompt": "word " * 4000}, "prompt"),
    ({"prompt": "a" * 500_000}, "prompt"),
    ({"prompt": ["a"] * 2000}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": 10**100}, "max_tokens"),
    ({"max_tokens": 512}, "max_tokens"),
    ({"max_tokens": "16"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": 1e308}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"seed": 1 << 64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"stop": ["x" * 1000] * 9}, "stop"),
    ({"stop": {"a": "b"}}, "stop"),
    ({"stop_token_ids": [400]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": "1"}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"repetition_penalty": 0.0099}, "repetition_penalty"),
    ({"repetition_penalty": 10.1}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"400": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "a"}}, "logit_bias"),
    ({"logit_bias": {"1" * 5000: "a"}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "logprobs": 21}, "logprobs"),
    ({"echo": True, "max_tokens": -1}, "max_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"guided_json": {}}, "guided_json"),
    ({"structured_outputs": {"json": {"$ref": "http://127.0.0.1:1/x"}}}, "structured_outputs"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [400]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["  "]}, "bad_words"),
    ({"bad_words": "word"}, "bad_words"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"model": 5}, "model"),
    ({"user": 5}, "user"),
]

BAD_CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": 1, "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "martian", "content": "x"}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages",
    ),
    *(
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}, "messages")
        for calls in (
            "x",
            [{"function": {"name": "f", "arguments": "{"}}],
            [{"function": {"name": "f", "arguments": "[" * 100_000}}],
            [{"function": {"name": "f", "arguments": "3"}}],
        )
    ),
    ({"messages": [{"role": "tool", "content": None}]}, "messages"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "x"}], "tool_choice": "none"}, "tools"),
    ({"tools": [{"type": "function", "function": {}}], "tool_choice": "none"}, "tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        "tool_choice",
    ),
    ({"messages": [{"role": "user", "content": "a b " * 400}]}, "prompt"),
    ({"max_tokens": 512}, "max_tokens"),
    ({"max_completion_tokens": 10**12}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"messages": [{"role": "r" * 5000, "content": "hi"}]}, "messages"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
]


def shown(change: dict[str, Any]) -> str:
    return json.dumps(change)[:50]


@pytest.mark.parametrize(
    ("change", "param"), BAD_COMPLETIONS, ids=[shown(c) for c, _ in BAD_COMPLETIONS]
)
def test_bad_completion(
    server: LiveServer, client: httpx.Client, change: dict[str, Any], param: str | None
) -> None:
    error = error_of(client.post(COMPLETIONS, json=PROMPT | change), 400)
    assert error["param"] == param and error["type"] == "BadRequestError"
    assert len(error["message"]) < 300
    assert server.engine.submitted == []


@pytest.mark.parametrize(("change", "param"), BAD_CHATS, ids=[shown(c) for c, _ in BAD_CHATS])
def test_bad_chat(
    server: LiveServer, client: httpx.Client, change: dict[str, Any], param: str | None
) -> None:
    error = error_of(client.post(CHAT, json=MESSAGES | change), 400)
    assert error["param"] == param and len(error["message"]) < 300
    assert server.engine.submitted == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"prompt"',
        b"null",
        b"nonsense",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
        b"\x00\x01\x02",
    ],
    ids=lambda content: repr(content[:30]),
)
def test_malformed_bodies(server: LiveServer, client: httpx.Client, content: bytes) -> None:
    error_of(client.post(COMPLETIONS, content=content), 400)
    assert server.engine.submitted == []


@pytest.mark.parametrize(
    "change",
    [
        {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"best_of": 1, "suffix": None, "response_format": {"type": "text"}, "tools": []},
        {"temperature": None, "top_k": 0, "stop": [], "logit_bias": {}, "a_future_field": 1},
        {"top_k": -1, "temperature": 1e-30, "length_penalty": 1.0, "seed": -5},
        {"model": None},
    ],
    ids=shown,
)
def test_harmless_fields_are_accepted(client: httpx.Client, change: dict[str, Any]) -> None:
    assert client.post(COMPLETIONS, json=PROMPT | change).status_code == 200


def test_unknown_model_path_and_method(client: httpx.Client) -> None:
    unknown = error_of(client.post(CHAT, json=MESSAGES | {"model": "gpt-9"}), 404)
    assert unknown["param"] == "model" and unknown["type"] == "NotFoundError"
    error_of(client.get("/v1/embeddings"), 404)
    error_of(client.get("/v1/completions/"), 405)
    error_of(client.post("/../../etc/passwd"), 404)
    refused = client.get(COMPLETIONS)
    error_of(refused, 405)
    assert "POST" in refused.headers["allow"]


def test_over_long_prompts_say_so_first(client: httpx.Client) -> None:
    for change, param in (
        ({"prompt": [1] * 600}, "prompt"),
        ({"prompt": "word " * 90_000}, "prompt"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"prompt": [1] * 512, "max_tokens": 5}, "prompt"),
        ({"prompt": [1] * 510, "max_tokens": 5}, "max_tokens"),
    ):
        error = error_of(client.post(COMPLETIONS, json=PROMPT | change), 400)
        assert error["message"].startswith("This model's maximum context length is 512 tokens.")
        assert error["param"] == param, change


def test_body_of_50_mb(client: httpx.Client) -> None:
    content = b'{"prompt": "' + b"a" * (50 << 20) + b'"}'
    error_of(client.post(COMPLETIONS, content=content), 413)

    def chunks() -> Generator[bytes, None, None]:
        for _ in range(50):
            yield b"a" * (1 << 20)

    error_of(client.post(COMPLETIONS, content=chunks()), 413)


def raw(server: LiveServer, content: bytes) -> bytes:
    """What the server answers to these bytes until it closes the connection."""
    with server.connect() as connection:
        connection.sendall(content)
        parts = []
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)


def test_declared_body_beyond_all_reason(server: LiveServer) -> None:
    answer = raw(server, b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")


def test_body_that_never_comes(impatient: LiveServer) -> None:
    answer = raw(impatient, b"POST /v1/completions HTTP/1.1\r\ncontent-length: 10\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408") and b'"code":408' in answer


def test_headers_that_never_end(server: LiveServer, impatient: LiveServer) -> None:
    assert raw(impatient, b"GET /health HTTP/1.1\r\nx-a: ").startswith(b"HTTP/1.1 408")
    assert raw(impatient, b"") == b""  # nothing was asked, so nothing is answered
    endless = b"GET /health HTTP/1.1\r\nx-a: " + b"a" * (1 << 17)
    assert raw(server, endless).startswith(b"HTTP/1.1 431")


def test_what_is_not_http(server: LiveServer) -> None:
    assert raw(server, b"\x16\x03\x01 hello\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_request_ids_are_echoed_and_checked(client: httpx.Client) -> None:
    named = client.get("/version", headers={"X-Request-Id": "trace-1"})
    assert named.headers["x-request-id"] == "trace-1"
    odd = client.get("/version", headers={"X-Request-Id": "a" * 5000})
    assert odd.headers["x-request-id"] != "a" * 5000


def post_bytes(body: dict[str, Any], path: str = COMPLETIONS) -> bytes:
    content = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
        path.encode(),
        len(content),
        content,
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["queued", "running"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("rudely", [False, True])
def test_a_client_that_vanishes(
    server: LiveServer, stream: bool, state: str, n: int, rudely: bool
) -> None:
    server.configure(held=state == "queued", hold_after=None if state == "queued" else 3)
    body = PROMPT | {"max_tokens": 400, "stream": stream, "n": n}
    with server.connect() as connection:
        connection.sendall(post_bytes(body))
        wait_until(lambda: len(server.engine.tasks) == n)
        if state == "running" and stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        if rudely:  # a reset instead of an orderly close
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    wait_until(lambda: len(server.engine.aborted) == n)
    assert sorted(server.engine.aborted) == sorted(
        request.request_id for request in server.engine.submitted
    )


def is_open(server_port: int, client_port: int) -> bool:
    """Whether the server still holds its end of a connection."""
    ends = (f":{server_port:04X}", f":{client_port:04X}")
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if (local[-5:], remote[-5:]) == ends:
            return state == "01"  # ESTABLISHED
    return False


def test_a_client_that_never_reads(impatient: LiveServer) -> None:
    impatient.configure(
        max_model_len=512, per_tick=50, script=lambda request: [1] * request.sampling.max_tokens
    )
    body = PROMPT | {"max_tokens": 500, "stream": True, "n": 128, "logprobs": 20}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", impatient.port))
        connection.sendall(post_bytes(body))
        wait_until(lambda: impatient.engine.submitted)
        with impatient.client() as other:  # others are not held up
            assert other.get("/health").status_code == 200
            quick = other.post(COMPLETIONS, json=PROMPT | {"max_tokens": 2})
            assert quick.status_code == 200
        wait_until(lambda: not impatient.engine.tasks)
        wait_until(lambda: impatient.front.num_in_flight == 0)
        wait_until(lambda: not is_open(impatient.port, connection.getsockname()[1]))
        connection.settimeout(10)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 20):
                received += part
    assert received and b"[DONE]" not in received


def test_a_client_that_never_reads_a_whole_answer(impatient: LiveServer) -> None:
    impatient.configure(per_tick=50, script=lambda request: [1] * request.sampling.max_tokens)
    body = PROMPT | {"max_tokens": 150, "n": 100, "logprobs": 20}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", impatient.port))
        connection.sendall(post_bytes(body))
        wait_until(lambda: impatient.engine.submitted)
        wait_until(lambda: impatient.front.num_in_flight == 0)
        wait_until(lambda: not is_open(impatient.port, connection.getsockname()[1]))


def test_pipelined_requests_are_answered_in_order(server: LiveServer) -> None:
    first = post_bytes(PROMPT | {"max_tokens": 2})
    with server.connect() as connection:
        connection.sendall(first + b"GET /version HTTP/1.1\r\nconnection: close\r\n\r\n")
        answers = b""
        while part := connection.recv(65536):
            answers += part
    assert answers.count(b"HTTP/1.1 200") == 2
    assert answers.index(b"cmpl-") < answers.index(b'"version"')


def test_health_answers_while_a_long_prompt_is_encoded() -> None:
    with live_server(EchoEngine(max_model_len=1_000_000)) as server:
        content = json.dumps(PROMPT | {"prompt": "word " * 200_000, "max_tokens": 1})
        answered: list[int] = []

        def post() -> None:
            with server.client(timeout=60) as client:
                answered.append(client.post(COMPLETIONS, content=content).status_code)

        posting = threading.Thread(target=post)
        posting.start()
        with server.client() as client:
            while posting.is_alive():
                assert client.get("/health").status_code == 200
        posting.join()
    assert answered == [200]


def test_connections_beyond_the_limit() -> None:
    settings = ServerConfig(max_connections=20, shutdown_timeout_s=1.0)
    limits = FrontLimits(overflow_timeout_s=0.3)
    with live_server(EchoEngine(held=True), settings, limits) as server:
        body = post_bytes(PROMPT | {"stream": True})
        with contextlib.ExitStack() as open_connections:
            served = [open_connections.enter_context(server.connect()) for _ in range(20)]
            for connection in served:
                connection.sendall(body)
            wait_until(lambda: len(server.engine.tasks) == 20)
            extra = [open_connections.enter_context(server.connect()) for _ in range(300)]
            for connection in extra[:150]:
                connection.sendall(body)
            with server.client() as client:  # also beyond the limit, but a health check
                assert client.get("/health").status_code == 200
                assert client.get("/metrics").status_code == 200
                refused = client.post(COMPLETIONS, json=PROMPT)
                assert error_of(refused, 503)["type"] == "ServiceUnavailableError"
                assert refused.headers["retry-after"] == "1"
            for connection in extra:  # told so, whether they spoke or not
                assert connection.recv(100).startswith(b"HTTP/1.1 503")
            with server.client() as client:
                told = samples(client.get("/metrics").text)
            # All who were told so, and nobody who was served.
            name = "vllm:admission_rejections_total"
            assert told[name, labels(reason="too_many_connections")] == 301
            assert len(server.engine.tasks) == 20
        wait_until(lambda: not server.engine.tasks)
        server.configure(held=False)
        with server.client() as client:
            assert client.post(COMPLETIONS, json=PROMPT).status_code == 200


def test_thousands_of_connections_beyond_the_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count = 3000 if hard == resource.RLIM_INFINITY else min(3000, hard - 2000)
    settings = ServerConfig(max_connections=50, shutdown_timeout_s=1.0)
    limits = FrontLimits(header_timeout_s=100.0)  # whoever is served stays so to the end
    with live_server(server=settings, limits=limits) as server, server.client() as client:
        flood = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("flood.py")),
                str(server.port),
                str(count),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        while flood.poll() is None:
            answer = client.get("/health", headers={"connection": "close"})
            assert answer.status_code == 200
        told = json.loads(flood.communicate()[0])
        # The system may keep some connections back on a busy machine; nobody is let in.
        assert told["refused"] >= 0.8 * count and told["served"] == 0, told
        assert client.post(COMPLETIONS, json=PROMPT).status_code == 200
