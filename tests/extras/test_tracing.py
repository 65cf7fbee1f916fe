"""Requests and transitions as OpenTelemetry spans."""

import sys
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kunserve.core.config import KunServeConfig, LogConfig, ServerConfig
from kunserve.core.errors import ConfigError
from kunserve.core.ids import TransitionId
from kunserve.core.snapshots import Kind, Outcome, TransitionRecord
from kunserve.server.start.launch_parts import tracer_of
from kunserve_extras.tracing import OtlpTracer
from tests.conftest import wait_until
from tests.unit.server.live_server import LiveServer, live_server

BODY = {"prompt": "ab", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9}
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SPANS = InMemorySpanExporter()


@pytest.fixture(scope="module")
def server() -> Generator[LiveServer, None, None]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(SPANS))
    settings = ServerConfig(shutdown_timeout_s=1.0)
    with live_server(server=settings, tracer=OtlpTracer(provider)) as one:
        yield one


@pytest.fixture(autouse=True)
def no_spans() -> None:
    SPANS.clear()


def spans() -> dict[str, ReadableSpan]:
    """By name, once the request's own span has ended: it is the last one."""
    wait_until(lambda: any(one.name == "llm_request" for one in SPANS.get_finished_spans()))
    return {one.name: one for one in SPANS.get_finished_spans()}


def ids(span: ReadableSpan) -> tuple[int, int | None]:
    assert span.context is not None
    return span.context.trace_id, None if span.parent is None else span.parent.span_id


def test_a_request_and_its_phases(server: LiveServer) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", json=BODY, headers={"traceparent": CALLER})
    found = spans()
    assert set(found) == {"llm_request", "prefill", "decode"}, "this engine tells of no queue"
    request = found["llm_request"]
    assert ids(request) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    shown: dict[str, Any] = dict(request.attributes or {})
    assert shown.pop("gen_ai.request.id") == answer.json()["id"] + "-0"
    for name in ("time_to_first_token", "e2e", "time_in_model_decode"):
        assert shown.pop(f"gen_ai.latency.{name}") >= 0.0
    assert shown == {
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.prompt_tokens": 2,
        "gen_ai.usage.completion_tokens": 3,
    }
    assert request.start_time is not None and request.end_time is not None
    assert abs(request.end_time / 1e9 - time.time()) < 60.0
    for name in ("prefill", "decode"):
        child = found[name]
        assert request.context is not None
        assert ids(child) == (request.context.trace_id, request.context.span_id)
        assert child.start_time is not None and child.end_time is not None
        assert request.start_time <= child.start_time <= child.end_time <= request.end_time


def test_without_a_caller_it_is_a_trace_of_its_own(server: LiveServer) -> None:
    with server.client() as client:
        client.post("/v1/completions", json=BODY, headers={"traceparent": "nonsense"})
        client.post("/v1/completions", json=BODY)
    wait_until(lambda: len(SPANS.get_finished_spans()) == 6)
    roots = [one for one in SPANS.get_finished_spans() if one.name == "llm_request"]
    assert all(one.parent is None for one in roots)
    assert len({ids(one)[0] for one in roots}) == 2


def test_requests_are_linked_to_the_transition_that_they_met(server: LiveServer) -> None:
    snapshot = server.engine.snapshot
    now_s = snapshot.now_s
    whole = TransitionRecord(
        TransitionId(5),
        Kind.DROP,
        "demand 9 blocks, capacity 8",
        now_s - 50.0,
        snapshot.groups,
        snapshot.groups,
        committed_s=now_s - 49.0,
        finished_s=now_s + 1e6,
        outcome=Outcome.DONE,
        freed_bytes=4096,
    )
    failed = replace(
        whole, transition_id=TransitionId(6), outcome=Outcome.ROLLED_BACK, reason="no memory"
    )
    server.configure(snapshot=replace(snapshot, transitions=(whole, failed)))
    with server.client() as client:
        client.post("/v1/completions", json=BODY)
        found = spans()
        SPANS.clear()
        client.post("/v1/completions", json=BODY)
        again = spans()
    server.configure(snapshot=snapshot)
    assert "drop" in found and "drop" not in again, "each transition is told once"
    (link,) = found["exchange"].links
    (other,) = again["exchange"].links
    assert link.context == other.context
    assert found["exchange"].parent is not None
    assert (found["exchange"].attributes or {})["kunserve.transition.id"] == 5
    drop = found["drop"]
    assert (drop.attributes or {})["kunserve.transition.outcome"] == "rolled back: no memory"
    assert [event.name for event in drop.events] == ["commit"]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = KunServeConfig(log=LogConfig(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces"))
    monkeypatch.setitem(sys.modules, "kunserve_extras.tracing", None)
    with pytest.raises(ConfigError, match=r"pip install 'kunserve\[otel\]'"):
        tracer_of(config)
    assert tracer_of(KunServeConfig()) is None


def test_only_http() -> None:
    with pytest.raises(ConfigError, match="write http://localhost:4318/v1/traces"):
        LogConfig(otlp_traces_endpoint="grpc://localhost:4317")
    tracer = tracer_of(KunServeConfig(log=LogConfig(otlp_traces_endpoint="http://127.0.0.1:1")))
    assert tracer is not None
    tracer.close()
