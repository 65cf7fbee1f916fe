"""What the log says of requests, and how."""

import json
import logging
import re
import sys
from collections.abc import Generator

import pytest

from kunserve.cluster.log_format import JsonFormatter, fields_of
from kunserve.core.config import KunServeConfig, LogConfig, ServerConfig
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId
from kunserve.core.request import SamplingParams
from kunserve.server.start.command import config_from_flags, serve_command
from kunserve.server.telemetry.request_log import shown_params
from tests.conftest import wait_until
from tests.unit.server.live_server import LiveServer, live_server

BODY = {"prompt": "ab", "max_tokens": 4, "temperature": 0.0}
STOPS = ServerConfig(shutdown_timeout_s=1.0)


@pytest.fixture(scope="module")
def server() -> Generator[LiveServer, None, None]:
    with live_server(server=STOPS, log=LogConfig(enable_log_requests=True)) as one:
        yield one


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "kunserve")
    return caplog


def of_requests(lines: pytest.LogCaptureFixture) -> list[str]:
    records = [one for one in lines.records if one.name == "kunserve.server.requests"]
    return [one.getMessage() for one in records]


def test_a_line_at_arrival_and_one_at_the_end(
    server: LiveServer, lines: pytest.LogCaptureFixture
) -> None:
    with server.client() as client:
        sent = client.post("/v1/completions", json=BODY, headers={"x-request-id": "trace-7"})
    said = wait_until(lambda: len(of_requests(lines)) == 2 and of_requests(lines))
    (request_id,) = {re.findall(r"request=(\S+)", line)[0] for line in said}
    assert request_id.startswith("cmpl-trace-7-") and sent.json()["id"] == "cmpl-trace-7"
    arrived, ended = said
    assert "prompt_tokens=2 params={'max_tokens': 4, 'temperature': 0.0" in arrived
    assert "finish_reason=length prompt_tokens=2 output_tokens=4" in ended
    for name in ("ttft", "tpot", "total"):
        assert re.search(rf"{name}_ms=\d+\.\d", ended)


def test_one_id_in_the_header_the_body_and_the_log(
    server: LiveServer, lines: pytest.LogCaptureFixture
) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", json=BODY | {"n": 2})
    unique = answer.headers["x-request-id"]
    assert answer.json()["id"] == f"cmpl-{unique}"
    said = wait_until(lambda: len(of_requests(lines)) == 4 and of_requests(lines))
    for number in (0, 1):
        assert sum(f"request=cmpl-{unique}-{number} " in line for line in said) == 2


def test_an_aborted_and_a_refused_request(
    server: LiveServer, lines: pytest.LogCaptureFixture
) -> None:
    with server.client() as client:
        server.configure(hold_after=2)
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
            next(stream.iter_lines())
        wait_until(lambda: len(of_requests(lines)) == 2)
        server.configure(hold_after=None)
        wrong = client.post("/v1/completions/", json={"prompt": "secret", "max_tokens": "many"})
    assert wrong.status_code == 400
    _, ended, refused = of_requests(lines)
    assert "finish_reason=abort" in ended and "output_tokens=2" in ended
    request_id = wrong.headers["x-request-id"]
    assert f"request={request_id} path=/v1/completions/ status=400" in refused
    assert "param=max_tokens" in refused and "many" not in refused


def test_prompts_are_shown_only_if_asked_for(
    server: LiveServer, lines: pytest.LogCaptureFixture
) -> None:
    prompt = {"prompt": "my secret\nis long", "max_tokens": 1, "stop": ["hush"]}
    with server.client() as client:
        client.post("/v1/completions", json=prompt)
    wait_until(lambda: len(of_requests(lines)) == 2)
    assert not any(word in line for line in of_requests(lines) for word in ("secret", "hush"))
    asked = LogConfig(enable_log_requests=True, max_log_len=12)
    with live_server(server=STOPS, log=asked) as other, other.client() as client:
        client.post("/v1/completions", json=prompt)
        said = wait_until(lambda: len(of_requests(lines)) == 4 and of_requests(lines))
    assert said[2].endswith(r"prompt='my secret\nis'"), "in one line, and no more than asked for"


def test_nothing_is_said_by_default(lines: pytest.LogCaptureFixture) -> None:
    with live_server(server=STOPS) as server, server.client() as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200
        assert server.front.watch is server.front.metrics, "and nothing is done for it"
    assert not of_requests(lines)


def test_the_access_log(lines: pytest.LogCaptureFixture) -> None:
    log = LogConfig(uvicorn_access_log=True)
    with live_server(server=STOPS, log=log) as server, server.client() as client:
        client.get("/version")
        said = [one.getMessage() for one in lines.records if one.name == "uvicorn.access"]
    assert len(said) == 1 and '"GET /version HTTP/1.1" 200' in said[0]


def test_long_lists_are_shown_by_length() -> None:
    many = SamplingParams(max_tokens=3, stop_token_ids=(7, 8), logit_bias=((1, 2.0),), top_k=None)
    assert shown_params(many) == {"max_tokens": 3, "stop_token_ids": 2, "logit_bias": 1}


def record_of(text: str, *args: object, error: bool = False) -> logging.LogRecord:
    info = None
    if error:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            info = sys.exc_info()
    return logging.LogRecord("kunserve.x", logging.WARNING, "file", 1, text, args, info)


def test_a_json_line_has_the_fields_of_the_text() -> None:
    record = record_of("preempted request=%s lost_tokens=%d share=%.2f %s", "r-0", 5, 0.5, "more")
    line = JsonFormatter(InstanceId(3)).format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {
        "level": "warning",
        "logger": "kunserve.x",
        "message": "preempted request=r-0 lost_tokens=5 share=0.50 more",
        "instance": 3,
        "request": "r-0",
        "lost_tokens": 5,
        "share": 0.5,
    }


@pytest.mark.parametrize(
    ("text", "args", "fields"),
    [
        ("100%% of x=%d", (3,), {"x": 3}),
        ("level=%s message=%s", ("a", "b"), {"level": "a", "message": "b"}),
        ("plain", (), {}),
        ("url=%s://%s:%d/v1 model=%s", ("http", "a", 1, "m"), {"model": "m"}),
        ("%(name)s", ({"name": 1},), {}),
        ("x=%r y=%-5s", ([1], None), {"x": [1], "y": None}),
    ],
)
def test_fields(text: str, args: tuple[object, ...], fields: dict[str, object]) -> None:
    record = record_of(text, *args)
    assert fields_of(record) == fields
    found = json.loads(JsonFormatter().format(record))
    assert (found["level"], found["message"]) == ("warning", record.getMessage())


def test_an_exception_is_in_the_same_line() -> None:
    line = JsonFormatter().format(record_of("failed", error=True))
    assert "\n" not in line and "ValueError: two\nlines" in json.loads(line)["exception"]


def test_a_length_for_lines_that_are_not_written_is_refused() -> None:
    with pytest.raises(ConfigError, match="give --enable-log-requests too"):
        LogConfig(max_log_len=5)


def test_the_flags() -> None:
    def parsed(*args: str) -> KunServeConfig:
        return config_from_flags(serve_command.make_context("serve", list(args)).params)

    assert parsed().log == LogConfig()
    flags = ("--log-level", "warning", "--log-format", "json", "--enable-log-requests")
    log = parsed(*flags, "--max-log-len", "5", "--enable-uvicorn-access-log").log
    assert log == LogConfig("warning", "json", True, 5, uvicorn_access_log=True)
    assert not parsed("--disable-uvicorn-access-log").log.uvicorn_access_log
