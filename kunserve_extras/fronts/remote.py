"""A front's end: the cluster as it looks from another process."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar

from kunserve.cluster.api import Deliver, ServingLimits, Vitals
from kunserve.core.errors import Unavailable
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.request import Request
from kunserve.core.snapshots import ClusterState
from kunserve_extras.fronts.wire import (
    Abort,
    Answer,
    Call,
    CountNow,
    Drop,
    Failure,
    FromController,
    FromFront,
    Kill,
    Leave,
    Link,
    News,
    Order,
    ReadMetrics,
    ReadTimeline,
    ResetPrefixCache,
    Restore,
    Scale,
    SetPaused,
    Submit,
    Tokens,
    Verdict,
    Welcome,
)

logger = logging.getLogger(__name__)

VERDICT_S = 10.0
"""How long the controller may take to say whether a request is taken."""
READ_S = 10.0
"""How long it may take for what is only read: metrics, the timeline."""
ACT_S = 600.0
"""How long for a drop or a restore by hand: as long as a patient client waits."""
BUSY = "the controller does not answer"
T = TypeVar("T")


class RemoteEngine:
    """Implements ``EngineClient``. Belongs to one event loop."""

    def __init__(self, on_count: Callable[[], None], on_leave: Callable[[], None]) -> None:
        """``on_count``: all counters are wanted now. ``on_leave``: the server ends."""
        self.ended = asyncio.Event()
        """The controller's process is gone."""
        self.welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._on_count = on_count
        self._on_leave = on_leave
        self._link: Link[FromController] | None = None
        self._live: dict[RequestId, Deliver] = {}
        self._verdicts: dict[RequestId, asyncio.Future[None]] = {}
        self._answers: dict[int, asyncio.Future[str | None]] = {}
        self._num_calls = 0
        self._news: News | None = None
        self._first_news = asyncio.Event()
        self._is_admitting = True

    def use(self, link: Link[FromController]) -> None:
        """Speak through this link."""
        self._link = link

    async def met(self) -> Welcome:
        """Once the controller has said who it is, and how the cluster is."""
        welcome = await self.welcome
        await self._first_news.wait()
        return welcome

    def tell(self, message: FromFront) -> bool:
        """Send something; False when it cannot be sent."""
        return self._link is not None and self._link.send(message)

    # What the controller says

    def hear(self, message: FromController) -> None:
        """One message."""
        match message:
            case Tokens():
                self._deliver(message)
            case News():
                self._news = message
                self._first_news.set()
            case Verdict():
                self._take_verdict(message)
            case Answer():
                waiting = self._answers.pop(message.number, None)
                if waiting is not None:
                    _settle(waiting, message.value, message.failure)
            case CountNow():
                self._on_count()
            case Leave():
                self._on_leave()
            case Welcome():
                self.welcome.set_result(message)

    def _take_verdict(self, verdict: Verdict) -> None:
        if verdict.failure is not None:
            self._live.pop(verdict.request_id, None)
        asked = self._verdicts.pop(verdict.request_id, None)
        if asked is not None:
            _settle(asked, None, verdict.failure)

    def _deliver(self, message: Tokens) -> None:
        live = self._live
        for token in message.tokens:
            deliver = live.get(token.request_id)
            if deliver is None:
                continue
            if token.finish_reason is not None:
                del live[token.request_id]
            deliver(token)

    def end(self) -> None:
        """The controller's process is gone: nobody gets an answer any more."""
        self.ended.set()
        failure = Failure.of(Unavailable("the server has ended"))
        for asked in self._verdicts.values():
            _settle(asked, None, failure)
        for waiting in self._answers.values():
            _settle(waiting, None, failure)
        self._verdicts.clear()
        self._answers.clear()

    # EngineClient

    @property
    def limits(self) -> ServingLimits:
        """See ``EngineClient``; as are the others."""
        return self.welcome.result().limits

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Ask for a request. ``admitted`` says what became of it."""
        if not self._is_admitting:
            raise Unavailable("the server is shutting down")
        if not self.tell(Submit(request)):
            raise Unavailable(BUSY)
        self._live[request.request_id] = deliver
        self._verdicts[request.request_id] = asyncio.get_running_loop().create_future()

    async def admitted(self, request_id: RequestId) -> None:
        """Once the controller has taken the request. Raises what it was refused with."""
        asked = self._verdicts.get(request_id)
        if asked is None:
            return
        try:
            async with asyncio.timeout(VERDICT_S):
                await asyncio.shield(asked)
        except TimeoutError:
            self.abort(request_id)
            raise Unavailable(BUSY) from None

    def abort(self, request_id: RequestId) -> None:
        """See ``EngineClient``."""
        self._verdicts.pop(request_id, None)
        if self._live.pop(request_id, None) is not None:
            self.tell(Abort(request_id))

    def state(self) -> ClusterState:
        """As last told."""
        return self._latest.state

    def is_healthy(self) -> bool:
        """See ``EngineClient``."""
        return self._latest.is_healthy and not self.ended.is_set()

    def is_progressing(self) -> bool:
        """See ``EngineClient``."""
        return self._latest.is_progressing

    def vitals(self) -> Vitals:
        """As last told."""
        return self._latest.vitals

    def num_unfinished(self) -> int:
        """Of all fronts, as last told."""
        return self._latest.num_unfinished

    @property
    def _latest(self) -> News:
        assert self._news is not None
        return self._news

    def stop_admission(self) -> None:
        """See ``EngineClient``."""
        self._is_admitting = False

    async def drop(self, num_bytes: int | None) -> str:
        """See ``EngineClient``."""
        return _text(await self.call(Drop(num_bytes), ACT_S))

    async def restore(self) -> str:
        """See ``EngineClient``."""
        return _text(await self.call(Restore(), ACT_S))

    async def scale(self, num_instances: int) -> str:
        """See ``EngineClient``."""
        return _text(await self.call(Scale(num_instances), ACT_S))

    def set_paused(self, paused: bool) -> None:
        """See ``EngineClient``."""
        self._num_calls += 1
        self.tell(Call(self._num_calls, SetPaused(paused)))

    async def reset_prefix_cache(self) -> None:
        """See ``EngineClient``."""
        await self.call(ResetPrefixCache(), READ_S)

    async def kill(self, instance_id: InstanceId) -> None:
        """See ``EngineClient``."""
        await self.call(Kill(instance_id), READ_S)

    async def close(self) -> None:
        """See ``EngineClient``: the cluster is the controller's to close."""
        if self._link is not None:
            self._link.close()

    # What else is asked

    async def call(self, order: Order, timeout_s: float) -> str | None:
        """Ask the controller's process. Raises what it raises, Unavailable without an answer."""
        self._num_calls += 1
        number = self._num_calls
        waiting: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._answers[number] = waiting
        try:
            if not self.tell(Call(number, order)):
                raise Unavailable(BUSY)
            async with asyncio.timeout(timeout_s):
                return await waiting
        except TimeoutError:
            raise Unavailable(BUSY) from None
        finally:
            self._answers.pop(number, None)

    async def metrics(self) -> bytes:
        """The text of ``/metrics``, of the whole server."""
        return _text(await self.call(ReadMetrics(), READ_S)).encode()

    async def timeline(self, since_s: float | None) -> bytes:
        """``/kunserve/timeline``, of the whole server."""
        return _text(await self.call(ReadTimeline(since_s), READ_S)).encode()


def _settle(waiting: "asyncio.Future[T]", value: T, failure: Failure | None) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # whoever waited has left
        if failure is None:
            waiting.set_result(value)
        else:
            waiting.set_exception(failure.to_error())
            waiting.exception()  # it may be that nobody asks any more


def _text(value: str | None) -> str:
    assert isinstance(value, str), value
    return value
