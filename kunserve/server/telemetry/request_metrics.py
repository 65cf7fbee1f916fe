"""Requests as the front times and measures them."""

from collections import Counter, deque
from collections.abc import Callable, Sequence

from kunserve.core.errors import LIMITS, Overloaded, Unavailable
from kunserve.core.request import FinishReason, Request
from kunserve.server.http.errors import TooManyBodies, TooManyConnections
from kunserve.server.telemetry.histogram import (
    CHOICES_BUCKETS,
    FIRST_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
    Histogram,
    length_buckets,
)
from kunserve.server.telemetry.metric_row import Row, counter, histogram

ALL_ENGINES = "all"
"""``engine`` label of what the front measures: a request may change engines while it runs."""
RECENT_S = 5.0
"""Window of the timeline's percentiles."""
UNAVAILABLE = "unavailable"
TOO_MANY_BODIES, TOO_MANY_CONNECTIONS = "too_many_bodies", "too_many_connections"
REASONS = (*LIMITS, UNAVAILABLE, TOO_MANY_BODIES, TOO_MANY_CONNECTIONS)
"""Of refusals: vLLM's two, then what else is answered with 503."""


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
    """One request's clock (``RequestClock``). Starts when its HTTP body had come."""

    __slots__ = (
        "_first_s",
        "_last_s",
        "_metrics",
        "_num_cached",
        "_num_tokens",
        "_queued_s",
        "_request",
    )

    def __init__(self, metrics: "RequestMetrics", request: Request) -> None:
        self._metrics = metrics
        self._request = request
        self._num_tokens = 0
        self._num_cached = 0
        self._first_s = 0.0
        self._last_s = 0.0
        self._queued_s: float | None = None

    def accepted(self) -> None:
        """The engine took the request."""
        self._metrics.arrivals += 1

    def token(
        self, now_s: float, queued_s: float | None = None, num_cached_tokens: int = 0
    ) -> None:
        """One output token came."""
        metrics = self._metrics
        metrics.generation_tokens += 1
        self._num_tokens += 1
        if self._num_tokens == 1:
            self._first_s = now_s
            self._queued_s = queued_s
            self._num_cached = num_cached_tokens
            waited_s = now_s - self._request.arrival_s
            metrics.prompt_tokens += len(self._request.prompt_token_ids)
            metrics.cached_tokens += num_cached_tokens
            metrics.first_token.observe(waited_s)
            if queued_s is not None:
                metrics.queue_time.observe(queued_s)
                metrics.prefill_time.observe(max(0.0, waited_s - queued_s))
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
        request = self._request
        whole_s = now_s - request.arrival_s
        metrics.whole_request.observe(whole_s)
        metrics.prompt_length.observe(len(request.prompt_token_ids))
        metrics.computed_prompt.observe(len(request.prompt_token_ids) - self._num_cached)
        metrics.output_length.observe(self._num_tokens)
        metrics.max_tokens.observe(request.sampling.max_tokens)
        if self._num_tokens:
            metrics.decode_time.observe(self._last_s - self._first_s)
            if self._queued_s is not None:
                metrics.inference_time.observe(max(0.0, whole_s - self._queued_s))
        if self._num_tokens > 1:
            per_token_s = (self._last_s - self._first_s) / (self._num_tokens - 1)
            metrics.per_token.observe(per_token_s)
            metrics.recent_per_token.add(now_s, per_token_s)


class RequestMetrics:
    """Counts and times every request (``RequestWatch``)."""

    def __init__(self, max_model_len: int) -> None:
        lengths = length_buckets(max_model_len)
        self.arrivals = 0
        """Requests that the engine took; refused ones are not among them."""
        self.refusals = dict.fromkeys(REASONS, 0)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[FinishReason] = Counter()
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.between_tokens = Histogram(TOKEN_BUCKETS)
        self.per_token = Histogram(TOKEN_BUCKETS)
        self.whole_request = Histogram(REQUEST_BUCKETS)
        self.queue_time = Histogram(REQUEST_BUCKETS)
        self.prefill_time = Histogram(REQUEST_BUCKETS)
        self.decode_time = Histogram(REQUEST_BUCKETS)
        self.inference_time = Histogram(REQUEST_BUCKETS)
        self.prompt_length = Histogram(lengths)
        self.computed_prompt = Histogram(lengths)
        self.output_length = Histogram(lengths)
        self.longest_output = Histogram(lengths)
        self.max_tokens = Histogram(lengths)
        self.choices = Histogram(CHOICES_BUCKETS)
        self.recent_first_token = RecentValues()
        self.recent_per_token = RecentValues()

    def timing(self, request: Request) -> RequestTiming:
        """The clock of a request that the engine is about to be asked for."""
        return RequestTiming(self, request)

    def answered(self, output_lengths: Sequence[int]) -> None:
        """All choices of a prompt have ended by themselves, with so many tokens each."""
        self.choices.observe(len(output_lengths))
        self.longest_output.observe(max(output_lengths))

    def refused(self, error: Exception) -> None:
        """An HTTP request was answered with an error; those that are 503 are counted."""
        match error:
            case Overloaded():
                self.refusals[error.limit] += 1
            case Unavailable():
                self.refusals[UNAVAILABLE] += 1
            case TooManyBodies():
                self.refusals[TOO_MANY_BODIES] += 1
            case TooManyConnections():
                self.refusals[TOO_MANY_CONNECTIONS] += 1


def _count(name: str, meaning: str, number: Callable[[RequestMetrics], int]) -> Row[RequestMetrics]:
    return counter(name, meaning, lambda own: {(ALL_ENGINES,): number(own)}, "engine")


def _measured(
    name: str, meaning: str, values: Callable[[RequestMetrics], Histogram]
) -> Row[RequestMetrics]:
    return histogram(name, meaning, lambda own: {(ALL_ENGINES,): values(own)}, "engine")


ROWS: tuple[Row[RequestMetrics], ...] = (
    _count(
        "vllm:prompt_tokens_total",
        "Prompt tokens of requests that began.",
        lambda own: own.prompt_tokens,
    ),
    _count(
        "vllm:prompt_tokens_cached_total",
        "Prompt tokens of requests that began whose KV was found in the prefix cache.",
        lambda own: own.cached_tokens,
    ),
    counter(
        "vllm:prompt_tokens_by_source_total",
        "Prompt tokens of requests that began, by where their KV is from.",
        lambda own: {
            (ALL_ENGINES, "local_compute"): own.prompt_tokens - own.cached_tokens,
            (ALL_ENGINES, "local_cache_hit"): own.cached_tokens,
            (ALL_ENGINES, "external_kv_transfer"): 0,
        },
        "engine",
        "source",
    ),
    _count(
        "vllm:generation_tokens_total",
        "Output tokens delivered to clients.",
        lambda own: own.generation_tokens,
    ),
    counter(
        "vllm:request_success_total",
        "Requests that ended, by reason.",
        lambda own: {(ALL_ENGINES, why.value): own.finished[why] for why in FinishReason},
        "engine",
        "finished_reason",
    ),
    counter(
        "vllm:admission_rejections_total",
        "Requests refused with 503, by reason; also connections beyond the limit.",
        lambda own: {(why,): number for why, number in own.refusals.items()},
        "reason",
    ),
    _measured(
        "vllm:time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        lambda own: own.first_token,
    ),
    _measured(
        "vllm:inter_token_latency_seconds",
        "Between two consecutive tokens of a request.",
        lambda own: own.between_tokens,
    ),
    _measured(
        "vllm:request_time_per_output_token_seconds",
        "A request's mean time per token after the first.",
        lambda own: own.per_token,
    ),
    _measured(
        "vllm:e2e_request_latency_seconds",
        "From a request's arrival to its last token.",
        lambda own: own.whole_request,
    ),
    _measured(
        "vllm:request_queue_time_seconds",
        "From a request's arrival to the first step that it was part of.",
        lambda own: own.queue_time,
    ),
    _measured(
        "vllm:request_prefill_time_seconds",
        "From the first step that a request was part of to its first token.",
        lambda own: own.prefill_time,
    ),
    _measured(
        "vllm:request_decode_time_seconds",
        "From a request's first token to its last.",
        lambda own: own.decode_time,
    ),
    _measured(
        "vllm:request_inference_time_seconds",
        "From the first step that a request was part of to its last token.",
        lambda own: own.inference_time,
    ),
    _measured(
        "vllm:request_prompt_tokens",
        "Prompt tokens of a request that ended.",
        lambda own: own.prompt_length,
    ),
    _measured(
        "vllm:request_generation_tokens",
        "Output tokens of a request that ended.",
        lambda own: own.output_length,
    ),
    _measured(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that ended whose KV was made, not found in the prefix cache.",
        lambda own: own.computed_prompt,
    ),
    _measured(
        "vllm:request_max_num_generation_tokens",
        "Output tokens of the longest of a prompt's ``n`` choices.",
        lambda own: own.longest_output,
    ),
    _measured(
        "vllm:request_params_n", "The parameter ``n`` of a request.", lambda own: own.choices
    ),
    _measured(
        "vllm:request_params_max_tokens",
        "Output tokens that a request may have at most.",
        lambda own: own.max_tokens,
    ),
)
