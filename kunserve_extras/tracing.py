"""``--otlp-traces-endpoint``: requests as OpenTelemetry spans, with vLLM's names.

    llm_request     from arrival to end; child of the caller's span if the caller sent one
      queue         until the first step
      prefill       until the first token
      decode        until the last one
      exchange      the part of a drop or restore in which it ran or waited, linked to that one
    drop, restore   a transition, with its commit as an event

Spans are made when a request has ended, because everything is known then. The module needs the
extra ``otel``, so it is imported only when traces are asked for.
"""

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue
from starlette.types import ASGIApp, Receive, Scope, Send

from kunserve.cluster.api import EngineClient
from kunserve.core.ids import RequestId, TransitionId
from kunserve.core.request import FinishReason
from kunserve.core.snapshots import Outcome, TransitionRecord
from kunserve.server.telemetry.request_life import RequestLife

MAX_KNOWN = 1000
"""Transitions that requests may still be linked to."""
_CALLER: ContextVar[Context | None] = ContextVar("caller", default=None)


class OtlpTracer:
    """Implements ``Tracer``: spans go to a provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider

    @classmethod
    def to(cls, endpoint: str) -> "OtlpTracer":
        """Sends spans to a collector, in batches and in another thread."""
        return cls(_provider(endpoint))

    def observer(self, engine: EngineClient, model_name: str) -> "Tracing":
        """See ``Tracer``."""
        return Tracing(self._provider, engine, model_name)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """See ``Tracer``."""
        return CallerMiddleware(app)

    def close(self) -> None:
        """See ``Tracer``."""
        self._provider.shutdown()


def _provider(endpoint: str) -> TracerProvider:
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "kunserve"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


class CallerMiddleware:
    """Pure ASGI middleware: remembers the caller's span (``traceparent``) for a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the module."""
        if scope["type"] == "http":
            headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
            _CALLER.set(extract(headers))
        await self._app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Clock:
    """From our clocks to the time of day."""

    epoch_s: float
    monotonic_s: float
    cluster_s: float

    def ns(self, monotonic_s: float) -> int:
        return int((self.epoch_s + monotonic_s - self.monotonic_s) * 1e9)

    def cluster_ns(self, cluster_s: float) -> int:
        return int((self.epoch_s + cluster_s - self.cluster_s) * 1e9)


class Tracing:
    """A observer of requests."""

    def __init__(self, provider: TracerProvider, engine: EngineClient, model_name: str) -> None:
        self._tracer = provider.get_tracer("kunserve")
        self._engine = engine
        self._model_name = model_name
        self._callers: dict[RequestId, Context | None] = {}
        self._known: dict[TransitionId, SpanContext] = {}

    def began(self, life: RequestLife) -> None:
        """See ``RequestObserver``."""
        self._callers[life.request.request_id] = _CALLER.get()

    def ended(self, life: RequestLife) -> None:
        """See ``RequestObserver``."""
        assert life.ended_s is not None
        state = self._engine.state()
        clock = _Clock(time.time(), time.monotonic(), state.now_s)
        span = self._tracer.start_span(
            "llm_request",
            context=self._callers.pop(life.request.request_id, None),
            kind=SpanKind.SERVER,
            attributes=request_attributes(life, self._model_name),
            start_time=clock.ns(life.request.arrival_s),
        )
        if life.reason is FinishReason.ERROR:
            span.set_status(Status(StatusCode.ERROR, "the engine failed"))
        self._phases(life, span, clock)
        self._exchanges(life, span, state.transitions, clock)
        span.end(clock.ns(life.ended_s))

    def _phases(self, life: RequestLife, parent: Span, clock: _Clock) -> None:
        """What the request did, one after the other."""
        assert life.ended_s is not None
        arrival_s = life.request.arrival_s
        started_s = None if life.queued_s is None else arrival_s + life.queued_s
        marks = [arrival_s, started_s, life.first_s, life.last_s]
        names = ["queue", "prefill", "decode"]
        if life.first_s is None:
            marks, names = [arrival_s, life.ended_s], ["queue"]  # it never made a token
        elif started_s is None:
            marks, names = [arrival_s, life.first_s, life.last_s], ["prefill", "decode"]
        for name, begin_s, end_s in zip(names, marks, marks[1:], strict=False):
            if begin_s is not None and end_s is not None:
                self._child(name, parent, clock.ns(begin_s), clock.ns(end_s))

    def _exchanges(
        self,
        life: RequestLife,
        parent: Span,
        records: Sequence[TransitionRecord],
        clock: _Clock,
    ) -> None:
        """Transitions that were under way while the request was."""
        assert life.ended_s is not None
        born_ns, dead_ns = clock.ns(life.request.arrival_s), clock.ns(life.ended_s)
        for record in records:
            if record.finished_s is None:
                continue
            link = self._transition(record, record.finished_s, clock)
            if record.committed_s is None or record.outcome is not Outcome.DONE:
                continue
            begin_ns = max(born_ns, clock.cluster_ns(record.committed_s))
            end_ns = min(dead_ns, clock.cluster_ns(record.finished_s))
            if begin_ns < end_ns:
                self._child(
                    "exchange",
                    parent,
                    begin_ns,
                    end_ns,
                    {"kunserve.transition.id": int(record.transition_id)},
                    [Link(link)],
                )

    def _transition(
        self, record: TransitionRecord, finished_s: float, clock: _Clock
    ) -> SpanContext:
        """The transition's own span, made the first time that somebody asks."""
        known = self._known.get(record.transition_id)
        if known is not None:
            return known
        span = self._tracer.start_span(
            record.kind.value,
            context=Context(),
            attributes=transition_attributes(record),
            start_time=clock.cluster_ns(record.started_s),
        )
        if record.committed_s is not None:
            span.add_event("commit", timestamp=clock.cluster_ns(record.committed_s))
        if record.outcome is not Outcome.DONE:
            span.set_status(Status(StatusCode.ERROR, record.ending))
        span.end(clock.cluster_ns(finished_s))
        self._known[record.transition_id] = span.get_span_context()
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return self._known[record.transition_id]

    def _child(
        self,
        name: str,
        parent: Span,
        begin_ns: int,
        end_ns: int,
        attributes: Mapping[str, AttributeValue] | None = None,
        links: Sequence[Link] = (),
    ) -> None:
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(parent),
            attributes=attributes,
            links=links,
            start_time=begin_ns,
        )
        span.end(end_ns)


def request_attributes(life: RequestLife, model_name: str) -> dict[str, AttributeValue]:
    """With vLLM's names, so that its dashboards fit. What is not known is left out."""
    sampling = life.request.sampling
    assert life.ended_s is not None and life.reason is not None
    found: dict[str, AttributeValue | None] = {
        "gen_ai.request.id": life.request.request_id,
        "gen_ai.response.model": model_name,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.finish_reasons": [life.reason.value],
        "gen_ai.usage.prompt_tokens": len(life.request.prompt_token_ids),
        "gen_ai.usage.completion_tokens": life.num_tokens,
        "gen_ai.latency.time_in_queue": life.queued_s,
        "gen_ai.latency.time_to_first_token": life.ttft_s,
        "gen_ai.latency.e2e": life.ended_s - life.request.arrival_s,
    }
    if life.ttft_s is not None and life.queued_s is not None:
        found["gen_ai.latency.time_in_model_prefill"] = life.ttft_s - life.queued_s
    if life.first_s is not None and life.last_s is not None:
        found["gen_ai.latency.time_in_model_decode"] = life.last_s - life.first_s
    return {name: value for name, value in found.items() if value is not None}


def transition_attributes(record: TransitionRecord) -> dict[str, AttributeValue]:
    """What a drop or restore was measured to do."""
    members = [member for layout in record.groups_before for member in layout.members]
    return {
        "kunserve.transition.id": int(record.transition_id),
        "kunserve.transition.outcome": record.ending,
        "kunserve.transition.trigger": record.trigger,
        "kunserve.transition.instances": [int(member) for member in members],
        "kunserve.transition.freed_bytes": record.freed_bytes,
        "kunserve.transition.moved_bytes": record.moved_bytes,
        "kunserve.transition.requests_moved": record.requests_moved,
        "kunserve.transition.gap_ms": record.gap_s * 1e3,
        "kunserve.transition.max_stall_ms": record.max_stall_s * 1e3,
    }
