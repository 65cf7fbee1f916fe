"""Streams of different servers, cut anywhere, and streams that are wrong."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kunserve_lab.bench.sse import ChunkKind, EventBuffer, MalformedStream, parse_chunk

STREAM = b'data: {"a": 1}\n\n: comment\r\ndata:{"b": 2}\r\n\r\nevent: x\ndata: [DONE]\n\n'


def chunk(**values: object) -> bytes:
    return json.dumps(values).encode()


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_may_be_cut_anywhere(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    buffer = EventBuffer()
    found = [
        payload for start, end in pairwise(edges) for payload in buffer.feed(STREAM[start:end])
    ]
    assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]
    assert buffer.rest == b""


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"text": "a", "finish_reason": None}, ChunkKind.TOKEN),
        ({"text": "", "finish_reason": None}, ChunkKind.TOKEN),
        ({"text": "a", "finish_reason": "length"}, ChunkKind.TOKEN),
        ({"text": "", "finish_reason": "stop"}, ChunkKind.LAST),
        ({"delta": {"role": "assistant", "content": ""}}, ChunkKind.OTHER),
        ({"delta": {"content": "a"}}, ChunkKind.TOKEN),
        ({"delta": {"reasoning_content": "a"}}, ChunkKind.TOKEN),
        ({"delta": {}, "finish_reason": "stop"}, ChunkKind.LAST),
        ({"delta": {"content": None}, "finish_reason": None}, ChunkKind.OTHER),
    ],
)
def test_what_a_chunk_means(choice: dict[str, object], kind: ChunkKind) -> None:
    parsed = parse_chunk(chunk(choices=[choice]))
    assert parsed.kind is kind
    assert parsed.finish_reason == choice.get("finish_reason")


def test_usage() -> None:
    parsed = parse_chunk(chunk(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 5}))
    assert (parsed.kind, parsed.prompt_tokens, parsed.completion_tokens) == (ChunkKind.OTHER, 3, 5)
    assert parse_chunk(chunk(choices=None, usage=None)).completion_tokens is None


@pytest.mark.parametrize(
    "values",
    [
        {"error": {"message": "engine died", "code": 500}},
        {"error": "engine died"},
        {"object": "error", "message": "engine died"},
        {"error": {"error": {"message": "engine died"}}},
    ],
)
def test_errors_in_the_stream(values: dict[str, object]) -> None:
    assert parse_chunk(chunk(**values)).error == "error in stream: engine died"


@given(st.binary(max_size=60))
def test_garbage_is_one_kind_of_error(payload: bytes) -> None:
    try:
        parse_chunk(payload)
    except MalformedStream as error:
        assert str(error).startswith("malformed stream")
