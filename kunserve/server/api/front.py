"""What every endpoint shares: the engine, the text codec, the limits, and what is in flight."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from starlette.responses import Response

from kunserve.cluster.api import EngineClient
from kunserve.core.config import KunServeConfig
from kunserve.core.errors import ModelNotFound, Unavailable
from kunserve.model.generation_config import SamplingDefaults
from kunserve.server.api.chat_format import ChatFormats
from kunserve.server.api.forms.checker import FormChecker
from kunserve.server.api.forms.child import Order
from kunserve.server.api.generation import Generation, Interrupted, RequestWatch
from kunserve.server.api.sampling import SeedSource
from kunserve.server.api.text import TextCodec
from kunserve.server.http.api_keys import ApiKeys
from kunserve.server.http.body import BodyReader
from kunserve.server.http.errors import error_answer
from kunserve.server.http.limits import FrontLimits
from kunserve.server.telemetry.accounts import Accounts, OwnAccounts
from kunserve.server.telemetry.metrics import FrontMetrics
from kunserve.server.telemetry.request_life import ObservedRequests, RequestObserver
from kunserve.server.telemetry.request_log import RequestLog
from kunserve.server.telemetry.sampler import Sampler

_SHUT_DOWN = "The server shut down before this request was finished."


class Front:
    """One per application."""

    def __init__(
        self,
        engine: EngineClient,
        codec: TextCodec,
        model_name: str,
        config: KunServeConfig,
        limits: FrontLimits,
        defaults: SamplingDefaults,
        observers: Sequence[RequestObserver] = (),
        accounts: Accounts | None = None,
    ) -> None:
        """``accounts`` None: this front is the only one."""
        self.engine = engine
        self.codec = codec
        self.formats = ChatFormats(config.chat)
        self.model_name = model_name
        self.model_names = tuple(dict.fromkeys((model_name, *config.model.served_model_name)))
        """The first one is in answers and metrics."""
        self.keys = ApiKeys.of(config.server)
        self.config = config
        self.limits = limits
        self.defaults = defaults
        self.bodies = BodyReader(limits, engine.limits.max_model_len)
        self.metrics = FrontMetrics(engine, model_name)
        self.request_log: RequestLog | None = None
        if config.log.enable_log_requests:
            self.request_log = RequestLog(codec, config.log.max_log_len)
            observers = (*observers, self.request_log)
        self.watch: RequestWatch = self.metrics
        """Whoever wants to know of requests."""
        if observers:
            self.watch = ObservedRequests(self.metrics, observers)
        self.sampler = Sampler(self.metrics)
        self.accounts: Accounts = accounts or OwnAccounts(self.metrics)
        self.forms = FormChecker(self._vocabulary, self.metrics.forms)
        self.seeds = SeedSource(config.model.seed)
        self.error_shapes: dict[str, Callable[[Exception], Response]] = {}
        """By the beginning of a path: errors of endpoints that have a shape of their own."""
        self.draining = False
        self.is_paused = False
        """An operator lets nobody in for now."""
        self._in_flight: set[Generation] = set()
        self._num_entering = 0
        """Requests between ``admission`` and ``enter``."""
        self._is_interrupted = False

    def _vocabulary(self) -> Order:
        return Order(*self.codec.vocabulary, self.engine.limits.vocab_size)

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Those that were started, and whose answer is not complete."""
        return tuple(self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """HTTP requests that were admitted, and whose answer is not complete."""
        return len(self._in_flight) + self._num_entering

    def error_answer(self, path: str, error: Exception) -> Response:
        """What a client is told of a request that failed before its answer began."""
        own = (shape for prefix, shape in self.error_shapes.items() if path.startswith(prefix))
        return next(own, error_answer)(error)

    def check_model(self, model: str | None) -> None:
        """Raise ModelNotFound unless ``model`` is one of our names, or none at all."""
        if model is not None and model not in self.model_names:
            served = ", ".join(f"`{name}`" for name in self.model_names)
            raise ModelNotFound(f"The model `{model[:200]}` does not exist. Here is {served}.")

    @contextlib.contextmanager
    def admission(self, model: str | None) -> Iterator[float]:
        """A request for ``model`` counts as in flight while it becomes a generation, or is refused.

        Called once its body has been read. Gives when it arrived, which is now: had it arrived with
        its headers, a client that sends slowly would pass those who came meanwhile.
        Raises ModelNotFound or Unavailable unless it may enter.
        """
        self.check_model(model)
        if self.draining:
            raise Unavailable("The server is shutting down.")
        if self.is_paused:
            raise Unavailable("The server is paused.")
        self._num_entering += 1
        try:
            yield time.monotonic()
        finally:
            self._num_entering -= 1

    async def enter(self, generation: Generation) -> None:
        """Start a generation and keep it until ``leave``. Raises what ``submit`` raises."""
        await generation.start()
        self._in_flight.add(generation)
        if self._is_interrupted:
            generation.stop(Interrupted(_SHUT_DOWN))

    def leave(self, generation: Generation, reason: Exception) -> None:
        """The answer is over; whatever still runs for it is aborted."""
        generation.stop(reason)
        self._in_flight.discard(generation)
        for lengths in generation.lengths_by_prompt:
            self.metrics.answered(lengths)

    def stop_admission(self) -> None:
        """First step of a drain: new requests get 503 from now on."""
        self.draining = True
        self.engine.stop_admission()

    def interrupt(self) -> None:
        """Last step of a drain: what is still in flight, or gets there, ends with an error."""
        self._is_interrupted = True
        for generation in list(self._in_flight):
            generation.stop(Interrupted(_SHUT_DOWN))
