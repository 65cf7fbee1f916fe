"""One request from its arrival to its end, for whoever wants to tell of it: the log, traces.

The metrics count every token; this remembers a request as a whole. It costs nothing while nobody
wants to know.
"""

from collections.abc import Sequence
from typing import Protocol

from starlette.types import ASGIApp

from kunserve.cluster.api import EngineClient
from kunserve.core.request import FinishReason, Request
from kunserve.server.api.generation import RequestClock, RequestWatch


class RequestLife:
    """What is known of a request at its end. It wraps the clock of the metrics."""

    __slots__ = (
        "_clock",
        "_observers",
        "ended_s",
        "first_s",
        "last_s",
        "num_tokens",
        "queued_s",
        "reason",
        "request",
    )

    def __init__(
        self, request: Request, clock: RequestClock, observers: Sequence["RequestObserver"]
    ) -> None:
        self._clock = clock
        self._observers = observers
        self.request = request
        self.num_tokens = 0
        self.queued_s: float | None = None
        """From arrival to the first step, as the engine tells it."""
        self.first_s: float | None = None
        """When the first token came."""
        self.last_s: float | None = None
        self.ended_s: float | None = None
        self.reason: FinishReason | None = None

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_s is None else self.first_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first one."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    def accepted(self) -> None:
        """See ``RequestClock``."""
        self._clock.accepted()
        for observer in self._observers:
            observer.began(self)

    def token(
        self, now_s: float, queued_s: float | None = None, num_cached_tokens: int = 0
    ) -> None:
        """See ``RequestClock``."""
        self._clock.token(now_s, queued_s, num_cached_tokens)
        if self.num_tokens == 0:
            self.first_s, self.queued_s = now_s, queued_s
        self.last_s = now_s
        self.num_tokens += 1

    def ended(self, reason: FinishReason, now_s: float) -> None:
        """See ``RequestClock``."""
        self._clock.ended(reason, now_s)
        self.reason, self.ended_s = reason, now_s
        for observer in self._observers:
            observer.ended(self)


class RequestObserver(Protocol):
    """Tells of requests."""

    def began(self, life: RequestLife) -> None:
        """The engine took the request. Called in the context of its HTTP request."""
        ...

    def ended(self, life: RequestLife) -> None:
        """The request is over. Called once for each that began."""
        ...


class Tracer(Protocol):
    """Makes traces, where they are asked for (`tracing.OtlpTracer`, which needs an extra)."""

    def observer(self, engine: EngineClient, model_name: str) -> RequestObserver:
        """Who tells of this engine's requests."""
        ...

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """The application behind something that notes the caller's trace."""
        ...

    def close(self) -> None:
        """Send what is not sent yet. May take seconds."""
        ...


class ObservedRequests:
    """A ``RequestWatch`` before observers."""

    def __init__(self, watch: RequestWatch, observers: Sequence[RequestObserver]) -> None:
        self._watch = watch
        self._observers = observers

    def timing(self, request: Request) -> RequestLife:
        """See ``RequestWatch``."""
        return RequestLife(request, self._watch.timing(request), self._observers)
