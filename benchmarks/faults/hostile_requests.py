"""HTTP requests as an enemy, or a broken program, would send them; drawn from a seed.

Bodies come from the JSON schemas of the server's own models: each field with values that its
type allows, values at the edge of its bounds, and values of every other kind. Then bytes are
broken, and then the HTTP around them.
"""

import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from kunserve.server.api.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from kunserve.server.api.unsupported import REFUSED
from kunserve_extras.admin import DropBody, EmptyBody, KillBody
from kunserve_extras.responses.schema import ResponsesBody

HI = [{"role": "user", "content": "hi"}]
POSTS: tuple[tuple[str, type[BaseModel], dict[str, Any]], ...] = (
    ("/v1/completions", CompletionBody, {"prompt": "hello", "max_tokens": 3}),
    ("/v1/chat/completions", ChatBody, {"messages": HI, "max_tokens": 3}),
    ("/v1/responses", ResponsesBody, {"input": "hello", "max_output_tokens": 3}),
    ("/tokenize", TokenizeBody, {"prompt": "hello"}),
    ("/detokenize", DetokenizeBody, {"tokens": [65, 66]}),
    ("/kunserve/drop", DropBody, {"bytes": 1}),
    ("/kunserve/restore", EmptyBody, {}),
    ("/kunserve/pause", EmptyBody, {}),
    ("/kunserve/resume", EmptyBody, {}),
    ("/kunserve/kill", KillBody, {"instance_id": 99}),
)
GENERATING = 2
"""The first two of ``POSTS``: they get most of the requests."""
GETS = (
    "/v1/models",
    "/v1/models/fuzz",
    "/version",
    "/health",
    "/health/ready",
    "/metrics",
    "/kunserve/state",
    "/kunserve/timeline",
    "/dashboard",
    "/dashboard/page.html",
)
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW", "get")


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


TEXTS = (
    "", " ", "a", "hello", "\x00", "\ud800", "\udfff\ud800", "\ufeff", "\uffff", "\u202e",
    "e\u0301", "🎉🎉🎉", "漢字", "%s%n{0}${x}", "../../etc/passwd", "<script>", "'; --",
    "\r\nx: y", "1e999", "<|end|>", "a" * 5000, "🎉" * 3000, "word " * 2000,
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 16, 255, 256, 4096, 65536, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63),
    10**40, 10**400, 0.0, -0.0, 0.5, 1e-45, 1e-38, 1e-5, 0.999999, 1.0, 1e30, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None, True, False, [], {}, [[]], [None], {"": ""}, {"a": {"b": [1]}}, {"-1": 1}, {"1": 100},
    {"0": 1e400}, nested(5), nested(300), [1] * 3000, ["a"] * 3000, [[1, 2]] * 200, [0.5], [True],
    [1, "a"], [-1], [2**70], {str(number): 1 for number in range(500)},
    [{"role": "user", "content": "x"}] * 50, [{"role": "user", "content": [{"type": "text"}]}],
    [{"type": "text", "text": "x"}], {"include_usage": True}, {"type": "text"},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hostile:
    """One connection's worth of bytes."""

    name: str
    pieces: tuple[bytes, ...]
    """Sent one after another, each by itself."""
    is_sound: bool
    """Whether it is HTTP, so that some answer is due."""
    half_close: bool = False
    """Whether the client then says that it will send no more."""
    reset: bool = False
    """Whether the client then goes without waiting for an answer."""


def hostile_requests(seed: int, count: int) -> Iterator[Hostile]:
    """The same requests for the same seed."""
    draw = random.Random(seed)
    schemas = {shape: shape.model_json_schema() for _, shape, _ in POSTS}
    for _ in range(count):
        kind = draw.random()
        if kind < 0.72:
            yield _post(draw, schemas)
        elif kind < 0.85:
            yield _get(draw)
        else:
            yield _odd(draw)


def _post(draw: random.Random, schemas: dict[type[BaseModel], dict[str, Any]]) -> Hostile:
    generating = draw.random() < 0.8
    path, shape, sound = draw.choice(POSTS[:GENERATING] if generating else POSTS)
    body = dict(sound)
    properties = schemas[shape]["properties"]
    names = [*properties, *(REFUSED if generating else ()), "a_future_field", "", "🎉"]
    for name in draw.choices(names, k=draw.choice((0, 1, 1, 2, 3, 6))):
        body[name] = _value(draw, properties.get(name, {}))
    if body and draw.random() < 0.1:
        body.pop(draw.choice(list(body)), None)
    content = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    headers = ["content-type: application/json"]
    if content and draw.random() < 0.25:
        content, more = draw.choice(BREAKERS)(draw, content)
        headers += more
    head = _head("POST", path, [*headers, f"content-length: {len(content)}"])
    return _sent(draw, f"POST {path}", head, content)


def _value(draw: random.Random, schema: dict[str, Any]) -> Any:
    """A value for a field: what its schema allows, its edges, or anything at all."""
    shapes = schema.get("anyOf", [schema])
    if draw.random() < 0.4 or not schema:
        return draw.choice(draw.choice((TEXTS, NUMBERS, OTHERS)))
    shape = draw.choice(shapes)
    least = shape.get("minimum", shape.get("exclusiveMinimum"))
    most = shape.get("maximum", shape.get("exclusiveMaximum"))
    match shape.get("type"):
        case "integer":
            low, high = least or 0, min(most or 20, 20)
            return draw.choice((low, high, low - 1, most, draw.randint(low, max(low, high))))
        case "number":
            low, high = least or 0.0, most or 2.0
            return draw.choice((low, high, low - 1e-9, high + 1e-9, draw.uniform(low, high)))
        case "boolean":
            return draw.random() < 0.5
        case "string":
            return draw.choice(TEXTS)
        case "array":
            items = shape.get("items", {})
            return [_value(draw, items) for _ in range(draw.choice((0, 1, 3, 70, 300)))]
        case "object":
            return {str(draw.choice(NUMBERS)): draw.choice(NUMBERS) for _ in range(3)}
        case _:
            return draw.choice((*TEXTS, [1, 2, 3], ["a", "b"], [[1], [2, 3]]))


Breaker = Callable[[random.Random, bytes], tuple[bytes, list[str]]]


def _cut(draw: random.Random, content: bytes) -> tuple[bytes, list[str]]:
    return content[: draw.randrange(len(content) + 1)], []


def _flip(draw: random.Random, content: bytes) -> tuple[bytes, list[str]]:
    broken = bytearray(content)
    for _ in range(draw.randint(1, 8)):
        broken[draw.randrange(len(broken))] = draw.randrange(256)
    return bytes(broken), []


def _insert(draw: random.Random, content: bytes) -> tuple[bytes, list[str]]:
    at = draw.randrange(len(content) + 1)
    return content[:at] + draw.choice((b"\xff\xfe", b"\xc0\x80", b"\x00", b"\xed\xa0\x80")), []


def _other_charset(draw: random.Random, content: bytes) -> tuple[bytes, list[str]]:
    charset = draw.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7"))
    text = content.decode("utf-8", "replace")
    return text.encode(charset), [f"content-type: application/json; charset={charset}"]


def _compressed(_draw: random.Random, content: bytes) -> tuple[bytes, list[str]]:
    return gzip.compress(content, mtime=0), ["content-encoding: gzip"]


def _twice(draw: random.Random, content: bytes) -> tuple[bytes, list[str]]:
    return draw.choice((content * 2, content[:-1] + b"," + content[1:], content + b"garbage")), []


def _deep(draw: random.Random, content: bytes) -> tuple[bytes, list[str]]:
    depth = draw.choice((100, 200, 5000))
    return content[:-1] + b',"x":' + b"[" * depth + b"]" * depth + b"}", []


BREAKERS: tuple[Breaker, ...] = (_cut, _flip, _insert, _other_charset, _compressed, _twice, _deep)


def _get(draw: random.Random) -> Hostile:
    path = draw.choice(GETS)
    match draw.randrange(4):
        case 0:
            path += "?" + draw.choice(
                ("since=nan", "since=1e999", "since=", "a=%ff&b", "%00", "&&=")
            )
        case 1:
            path += draw.choice(
                ("/", "/..", "//", "%2f", "%00", "%ff", "/a" * 200, ";x", "%2e%2e/")
            )
    return _sent(draw, f"GET {path[:40]}", _head("GET", path, []), b"")


def _odd(draw: random.Random) -> Hostile:
    """A request whose HTTP is unusual, or broken."""
    body = b'{"prompt":"hello","max_tokens":3}'
    length = f"content-length: {len(body)}"
    path = "/v1/completions"
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    upgrade = ["connection: close, upgrade", "upgrade: h2c", length]
    sound: tuple[tuple[str, bytes, bytes], ...] = (
        ("method", _head(draw.choice(METHODS), path, [length]), body),
        ("chunked", _head("POST", path, ["transfer-encoding: chunked"]), chunked),
        ("expect", _head("POST", path, ["expect: 100-continue", length]), body),
        ("upgrade", _head("POST", path, upgrade), body),
        ("http/1.0", _head("POST", path, [length], "HTTP/1.0"), body),
        ("absolute", _head("GET", "http://elsewhere.example/version", []), b""),
        ("no type", _head("POST", path, ["content-type:", length]), body),
        ("large header", _head("GET", "/version", ["x-a: " + "a" * 30_000]), b""),
        ("id", _head("GET", "/version", [f"x-request-id: {draw.choice(TEXTS[:8])!r}"]), b""),
        ("key", _head("GET", "/version", ["authorization: Bearer " + "k" * 5000]), b""),
    )
    broken: tuple[tuple[str, bytes, bytes], ...] = (
        ("long length", _head("POST", path, ["content-length: 5000"]), body),
        ("bad length", _head("POST", path, ["content-length: -1"]), body),
        ("huge length", _head("POST", path, ["content-length: 99999999999"]), body),
        ("two lengths", _head("POST", path, [length, "content-length: 1"]), body),
        ("both", _head("POST", path, [length, "transfer-encoding: chunked"]), chunked),
        ("bad chunk", _head("POST", path, ["transfer-encoding: chunked"]), b"zz\r\n" + body),
        ("odd coding", _head("POST", path, ["transfer-encoding: xchunked"]), chunked),
        ("many headers", _head("GET", "/version", [f"x-{n}: {n}" for n in range(9000)]), b""),
        ("bad header", _head("GET", "/version", ["x y: \x00"]), b""),
        ("tls", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b""),
        ("noise", draw.randbytes(draw.randrange(1, 400)), b""),
        ("cut head", _head("POST", path, [length])[: draw.randrange(1, 60)], b""),
        ("connect", _head("CONNECT", "example.com:443", []), b""),
        ("http/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b""),
    )
    is_sound = draw.random() < 0.5
    name, head, content = draw.choice(sound if is_sound else broken)
    return _sent(draw, name, head, content, is_sound)


def _head(method: str, path: str, headers: list[str], version: str = "HTTP/1.1") -> bytes:
    lines = [f"{method} {path} {version}", "host: 127.0.0.1"]
    if not any(header.startswith("connection:") for header in headers):
        lines.append("connection: close")
    return "\r\n".join([*lines, *headers]).encode("utf-8", "replace") + b"\r\n\r\n"


def _sent(
    draw: random.Random, name: str, head: bytes, content: bytes, is_sound: bool = True
) -> Hostile:
    """How the bytes are put on the wire: at once, in pieces, broken off or half-closed."""
    whole = head + content
    pieces: tuple[bytes, ...] = (whole,)
    if draw.random() < 0.2:
        at = draw.randrange(len(whole) + 1)
        pieces = (whole[:at], whole[at:])
    ending = draw.random()
    return Hostile(name, pieces, is_sound, ending < 0.05, 0.05 <= ending < 0.12)
