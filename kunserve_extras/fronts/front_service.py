"""The controller's end: who asked for which request, and what each front is told."""

import asyncio
import logging
import time
from collections.abc import Callable

from kunserve.cluster.api import EngineClient
from kunserve.core.errors import KunServeError
from kunserve.core.ids import RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import Request
from kunserve_extras.fronts.accounts import ServerAccounts
from kunserve_extras.fronts.wire import (
    Abort,
    Answer,
    Call,
    Counted,
    Drop,
    Failure,
    FromController,
    FromFront,
    Kill,
    Link,
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
    frame_of,
)

logger = logging.getLogger(__name__)

SLOW_S = 10.0
"""A front that leaves much unread for so long is given up."""
SILENT_S = 30.0
"""So is one that says nothing for so long: it tells what it counts several times a second."""
SILENT_LOOKS = 5
"""And meanwhile was looked at so often. This process may have stood still itself."""


class FrontService:
    """Serves one front process, from its start to its end."""

    def __init__(
        self,
        number: int,
        engine: EngineClient,
        accounts: ServerAccounts,
        on_end: Callable[[], None],
    ) -> None:
        """``on_end`` is called once, when the front is gone."""
        self._number = number
        self._engine = engine
        self._accounts = accounts
        self._on_end = on_end
        self._heard_s: float | None = None
        """When the front last said anything."""
        self._num_looks = 0
        """Since then."""
        self._live: set[RequestId] = set()
        self._tokens: list[TokenOutput] = []
        """To be sent when this turn of the event loop is over."""
        self._calls: set[asyncio.Task[None]] = set()
        self.link: Link[FromFront] = Link(self._hear, self._end)

    @property
    def has_spoken(self) -> bool:
        """Whether the front serves, because it counts."""
        return self._heard_s is not None

    @property
    def num_live(self) -> int:
        """Requests that the front waits for."""
        return len(self._live)

    def tell(self, message: FromController) -> None:
        """Send something; a front that does not read is cut off."""
        if self.link.is_open:
            self._tell_frame(frame_of(message))

    def _tell_frame(self, frame: bytes) -> None:
        if self.link.is_open and not self.link.send_frame(frame):
            self._give_up("too much waits for it")

    def tell_news(self, news: bytes) -> None:
        """How the cluster is, as a frame. Also looks whether the front still reads and speaks."""
        self._num_looks += 1
        silent_s = 0.0 if self._heard_s is None else time.monotonic() - self._heard_s
        if self.link.slow_s > SLOW_S:
            self._give_up(f"it has not read for {self.link.slow_s:.0f} s")
        elif silent_s > SILENT_S and self._num_looks > SILENT_LOOKS:
            self._give_up(f"it has said nothing for {silent_s:.0f} s")
        elif self.link.slow_s == 0.0:
            self._tell_frame(news)

    def _give_up(self, reason: str) -> None:
        logger.error("front is cut off front=%d reason=%r", self._number, reason)
        self.link.close()

    # What the front says

    def _hear(self, message: FromFront) -> None:
        self._heard_s, self._num_looks = time.monotonic(), 0
        match message:
            case Submit(request):
                self._submit(request)
            case Abort(request_id):
                self._live.discard(request_id)
                self._engine.abort(request_id)
            case Call():
                task = asyncio.create_task(self._answer(message))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
            case Counted():
                self._accounts.told(self._number, message)

    def _submit(self, request: Request) -> None:
        request_id = request.request_id
        failure = None
        # Before the call: a request may end inside it.
        self._live.add(request_id)
        try:
            self._engine.submit(request, self._deliver)
        except KunServeError as error:
            self._live.discard(request_id)
            failure = Failure.of(error)
        self.tell(Verdict(request_id, failure))

    def _deliver(self, token: TokenOutput) -> None:
        if not self._tokens:
            asyncio.get_running_loop().call_soon(self._flush)
        self._tokens.append(token)
        if token.finish_reason is not None:
            self._live.discard(token.request_id)

    def _flush(self) -> None:
        tokens, self._tokens = self._tokens, []
        self.tell(Tokens(tokens))

    async def _answer(self, call: Call) -> None:
        try:
            answer = Answer(call.number, await self._carry_out(call.order))
        except KunServeError as error:
            answer = Answer(call.number, None, Failure.of(error))
        except Exception:
            logger.exception("a front's call failed front=%d what=%s", self._number, call.order)
            answer = Answer(call.number, None, Failure("Unavailable", "an internal error"))
        self.tell(self._accounts.news())  # whoever asked looks for the effect
        self.tell(answer)

    async def _carry_out(self, order: Order) -> str | None:
        engine = self._engine
        match order:
            case Drop(num_bytes):
                return await engine.drop(num_bytes)
            case Restore():
                return await engine.restore()
            case Scale(num_instances):
                return await engine.scale(num_instances)
            case SetPaused(paused):
                engine.set_paused(paused)
            case ResetPrefixCache():
                await engine.reset_prefix_cache()
            case Kill(instance_id):
                await engine.kill(instance_id)
            case ReadMetrics():
                return (await self._accounts.metrics()).decode()
            case ReadTimeline(since_s):
                return self._accounts.timeline_view(since_s).decode()
        return None

    def _end(self) -> None:
        """The front is gone: nobody waits for its requests any more."""
        for task in self._calls:
            task.cancel()
        for request_id in tuple(self._live):
            self._engine.abort(request_id)
        self._live.clear()
        self._tokens.clear()
        self._on_end()
