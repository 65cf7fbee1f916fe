"""Answers of every endpoint, good and bad, compared with those that are kept.

The real server over an engine that repeats the prompt. Ids and times are masked. Streams come in
one piece or token by token as the client reads them, so nothing depends on how busy the machine is.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

import kunserve
from kunserve.cluster.api import Vitals
from kunserve.core.config import KunServeConfig
from kunserve.server.start.app import create_app
from tests.golden.http_asks import SHEETS, Ask
from tests.golden.kept import compare
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.live_server import MODEL, LiveServer, live_server
from tests.unit.server.tiny_tokenizer import tiny_tokenizer

ANSWERS = Path(__file__).parent / "http"
GIVEN_ID = "golden"
UNTOLD_HEADERS = {"date", "content-length"}
"""The time, and what the body tells too."""
MASKED = {
    "created",
    "created_at",
    "completed_at",
    "now_s",
    "t_s",
    "unix_s",
    "run_id",
    "tokenizer_class",
}
"""Fields that are never equal twice, and what a library calls its own."""
OWN_ID = re.compile(r"\b[0-9a-f]{32}\b")
OF_A_STATE = ("num_drops", "num_restores", "size", "paused")
"""What is shown of the state in answers that have it beside a result."""
LONGEST_LINE = 160


@pytest.mark.parametrize("name", SHEETS)
def test_answers_are_as_kept(name: str, renew: bool) -> None:
    sheet = SHEETS[name]
    lines: list[str] = []
    with (
        live_server(server=sheet.server, chat=sheet.chat, limits=sheet.limits) as server,
        server.client() as client,
    ):
        for ask in sheet.asks:
            if not sheet.keeps_engine:
                server.renew_engine()
                server.configure(per_tick=64)
            server.configure(**_engine_fields(ask))
            lines += [f"== {ask.title}", *_asked(ask), *_told(server, client, ask), ""]
    compare(ANSWERS / f"{name}.txt", lines, renew)


def test_no_answers_without_a_sheet() -> None:
    assert {path.stem for path in ANSWERS.iterdir()} == set(SHEETS)


def test_every_route_is_asked() -> None:
    app = create_app(EchoEngine(), tiny_tokenizer(), MODEL, KunServeConfig())
    paths = {ask.path.partition("?")[0] for sheet in SHEETS.values() for ask in sheet.asks}
    routes = [route for route in app.routes if isinstance(route, Route)]
    for route in routes:
        is_asked = any(route.path_regex.match(path) for path in paths)
        is_elsewhere = route.path in ("/metrics", "/openapi.json")
        assert is_asked or is_elsewhere, f"{route.path}: see test_texts.py and test_openapi.py"


def _engine_fields(ask: Ask) -> dict[str, Any]:
    fields = dict(ask.engine)
    if "wholeness" in fields:
        fields["wholeness"] = Vitals(2, num_missing=1, num_errors=0)
    if ask.is_stepwise:
        fields |= {"hold_after": 1, "per_tick": 1}
    return fields


def _method(ask: Ask) -> str:
    return ask.method or ("GET" if ask.body is None else "POST")


def _content(ask: Ask) -> bytes | None:
    if ask.body is None or isinstance(ask.body, bytes):
        return ask.body
    return json.dumps(ask.body).encode()


def _asked(ask: Ask) -> Iterator[str]:
    content = (_content(ask) or b"").decode()
    yield f"{_method(ask)} {ask.path} {_shortened(content)}".rstrip()
    yield from (f"  {name}: {value}" for name, value in ask.headers.items())


def _shortened(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:60]} ... ({len(text)} characters)"


def _told(server: LiveServer, client: httpx.Client, ask: Ask) -> Iterator[str]:
    """Status, headers and body."""
    headers = {"x-request-id": GIVEN_ID, **ask.headers}
    if ask.body is not None:
        headers = {"content-type": "application/json", **headers}
    with client.stream(_method(ask), ask.path, content=_content(ask), headers=headers) as answer:
        text = "".join(_pieces(server, answer, ask))
    yield str(answer.status_code)
    for name, value in sorted(answer.headers.items()):
        if name not in UNTOLD_HEADERS:
            yield f"  {name}: {_header(name, value)}"
    if answer.headers.get("content-type", "").startswith("text/html"):
        yield f"(a page that begins with {text[:15]!r})"
    else:
        yield from _body(text)


def _header(name: str, value: str) -> str:
    return "<etag>" if name == "etag" else OWN_ID.sub("<id>", value)


def _pieces(server: LiveServer, answer: httpx.Response, ask: Ask) -> Iterator[str]:
    """The body; of a stepwise stream each token is let out when the one before it is here."""
    if not ask.is_stepwise:
        yield answer.read().decode()
        return
    num_tokens = 1
    for line in answer.iter_lines():
        yield f"{line}\n"
        if re.search(r'"(text|content)":"[^"]', line):
            num_tokens += 1
            server.configure(hold_after=num_tokens)


def _body(text: str) -> Iterator[str]:
    for line in text.splitlines():
        mark = "data: " if line.startswith("data: ") else ""
        try:
            value = json.loads(line.removeprefix(mark))
        except ValueError:
            yield OWN_ID.sub("<id>", line)
            continue
        # Keys stay in their order: clients may show them as they come.
        yield from (f"{mark}{one}" if mark else one for one in _written(_masked(value)))


def _masked(value: Any) -> Any:
    match value:
        case dict():
            masked = {name: _masked_field(name, one) for name, one in value.items()}
            if "samples" in masked and "period_s" in masked:
                masked["samples"] = masked["samples"][:1]  # one is taken every moment
            if "result" in masked and "state" in masked:
                masked["state"] = {name: masked["state"][name] for name in OF_A_STATE}
            return masked
        case list():
            return [_masked(one) for one in value]
        case str():
            return OWN_ID.sub("<id>", value)
    return value


def _masked_field(name: str, value: Any) -> Any:
    if name in MASKED:
        return f"<{name}>"
    if name == "version":
        assert value == kunserve.__version__
        return "<version>"
    return _masked(value)


def _written(value: Any, indent: str = "", before: str = "", after: str = "") -> Iterator[str]:
    """JSON on one line where it fits, and otherwise a line for each thing in it."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(indent + before + flat) <= LONGEST_LINE or not isinstance(value, dict | list):
        yield f"{indent}{before}{flat}{after}"
        return
    pairs = value.items() if isinstance(value, dict) else [(None, one) for one in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    yield f"{indent}{before}{opening}"
    for place, (name, one) in enumerate(pairs):
        comma = "," if place + 1 < len(value) else ""
        key = "" if name is None else f"{json.dumps(name)}: "
        yield from _written(one, indent + " ", key, comma)
    yield f"{indent}{closing}{after}"
