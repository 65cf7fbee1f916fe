"""Prometheus metrics: requests as the front times them, groups as the controller sees them."""

from collections import Counter, deque
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kunserve.cluster.api import EngineClient
from kunserve.core.errors import Overloaded, Unavailable
from kunserve.core.request import FinishReason, Request
from kunserve.server.cluster_metrics import ClusterMetrics
from kunserve.server.errors import TooManyBodies
from kunserve.server.histogram import Histogram

ALL_ENGINES = "all"
"""``engine`` label of what the front measures: a request may change engines while it runs."""
REFUSAL_REASONS = {
    Overloaded: "queue_full",
    Unavailable: "unavailable",
    TooManyBodies: "too_many_bodies",
}

# vLLM's buckets, in seconds.
_TAIL = (5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BELOW_A_TENTH = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1)
FIRST_TOKEN_BUCKETS = (*_BELOW_A_TENTH, 0.25, 0.5, 0.75, 1.0, 2.5, *_TAIL, 160.0, 640.0, 2560.0)
_BELOW_A_HALF = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
TOKEN_BUCKETS = (*_BELOW_A_HALF, 0.75, 1.0, 2.5, *_TAIL)
_TENS = (10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_MINUTES = (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, *_TENS, *_MINUTES)
RECENT_S = 5.0
"""Window of the timeline's percentiles."""


class RecentValues:
    """The values of the last few seconds, for percentiles that a person watches."""

    def __init__(self, window_s: float = RECENT_S, at_most: int = 4096) -> None:
        self._window_s = window_s
        self._values: deque[tuple[float, float]] = deque(maxlen=at_most)

    def add(self, now_s: float, value: float) -> None:
        """Remember one value."""
        self._values.append((now_s, value))

    def count(self, now_s: float) -> int:
        """How many values the window has."""
        values = self._values
        while values and values[0][0] < now_s - self._window_s:
            values.popleft()
        return len(values)

    def percentiles(self, now_s: float, *shares: float) -> list[float | None]:
        """Nearest-rank percentiles of the window; None when nothing happened in it."""
        values = self._values
        if not self.count(now_s):
            return [None] * len(shares)
        ordered = sorted(value for _, value in values)
        last = len(ordered) - 1
        return [ordered[min(last, int(share * len(ordered)))] for share in shares]


class RequestTiming:
    """One request's clock (``RequestClock``). Starts when its HTTP headers had come."""

    __slots__ = ("_first_s", "_last_s", "_metrics", "_num_tokens", "_request")

    def __init__(self, metrics: "FrontMetrics", request: Request) -> None:
        self._metrics = metrics
        self._request = request
        self._num_tokens = 0
        self._first_s = 0.0
        self._last_s = 0.0

    def token(self, now_s: float, queued_s: float | None = None) -> None:
        """One output token came."""
        metrics = self._metrics
        metrics.generation_tokens += 1
        self._num_tokens += 1
        if self._num_tokens == 1:
            self._first_s = now_s
            waited_s = now_s - self._request.arrival_s
            metrics.prompt_tokens += len(self._request.prompt_token_ids)
            metrics.first_token.observe(waited_s)
            if queued_s is not None:
                metrics.queue_time.observe(queued_s)
            metrics.recent_first_token.add(now_s, waited_s)
        else:
            metrics.between_tokens.observe(now_s - self._last_s)
        self._last_s = now_s

    def ended(self, reason: FinishReason, now_s: float) -> None:
        """The request is over, for whatever reason."""
        metrics = self._metrics
        metrics.finished[reason] += 1
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            return
        metrics.whole_request.observe(now_s - self._request.arrival_s)
        if self._num_tokens > 1:
            per_token_s = (self._last_s - self._first_s) / (self._num_tokens - 1)
            metrics.per_token.observe(per_token_s)
            metrics.recent_per_token.add(now_s, per_token_s)


class FrontMetrics(Collector):
    """Every metric of ``/metrics``; also feeds the timeline."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": ALL_ENGINES}
        self.cluster = ClusterMetrics(engine, model_name)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self.registry.register(self.cluster)
        self.arrivals = 0
        """Requests that the engine took; refused ones are not among them."""
        self.refusals = dict.fromkeys(REFUSAL_REASONS.values(), 0)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[FinishReason] = Counter()
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self.between_tokens = Histogram(
            "vllm:inter_token_latency_seconds",
            "Between two consecutive tokens of a request.",
            TOKEN_BUCKETS,
        )
        self.per_token = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean time per token after the first.",
            TOKEN_BUCKETS,
        )
        self.whole_request = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From the request's arrival to its last token.",
            REQUEST_BUCKETS,
        )
        self.queue_time = Histogram(
            "vllm:request_queue_time_seconds",
            "From the request's arrival to the first step that it was part of.",
            REQUEST_BUCKETS,
        )
        self.recent_first_token = RecentValues()
        self.recent_per_token = RecentValues()

    def timing(self, request: Request) -> RequestTiming:
        """The clock of a request that the engine is about to be asked for."""
        return RequestTiming(self, request)

    def accepted(self) -> None:
        """The engine took a request."""
        self.arrivals += 1

    def refused(self, error: Exception) -> None:
        """An HTTP request was answered with an error; those that are 503 are counted."""
        for kind, reason in REFUSAL_REASONS.items():
            if isinstance(error, kind):
                self.refusals[reason] += 1

    def exposition(self) -> bytes:
        """The text of ``/metrics``."""
        self.cluster.observe()
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """What the front itself measured."""
        labels = self._labels
        yield self._counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that began.", self.prompt_tokens
        )
        yield self._counter(
            "vllm:generation_tokens", "Output tokens delivered.", self.generation_tokens
        )
        success = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, by reason.",
            labels=[*labels, "finished_reason"],
        )
        for reason in FinishReason:
            success.add_metric([*labels.values(), reason.value], self.finished[reason])
        yield success
        refused = CounterMetricFamily(
            "vllm:admission_rejections",
            "HTTP requests that were refused with 503, by reason.",
            labels=[*labels, "reason"],
        )
        for why, count in self.refusals.items():
            refused.add_metric([*labels.values(), why], count)
        yield refused
        for histogram in (
            self.first_token,
            self.between_tokens,
            self.per_token,
            self.whole_request,
            self.queue_time,
        ):
            yield histogram.family(labels)

    def _counter(self, name: str, documentation: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, documentation, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
