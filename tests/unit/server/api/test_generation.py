"""What a generation tells of its requests, and whom it aborts."""

import asyncio
import time
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

from kunserve.core.errors import Unavailable
from kunserve.core.ids import RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import FinishReason, Request
from kunserve.server.api.generation import Generation
from kunserve.server.telemetry.request_metrics import RequestMetrics


class Clock:
    def __init__(self) -> None:
        self.queued_s: list[float | None] = []

    def accepted(self) -> None: ...

    def token(self, now_s: float, queued_s: float | None = None, num_cached: int = 0) -> None:
        self.queued_s.append(queued_s)

    def ended(self, reason: object, now_s: float) -> None: ...


@pytest.mark.parametrize(("computed_s", "queued_s"), [(2.0, 8.0), (10.5, 0.0), (None, None)])
def test_the_queue_is_what_was_not_computing(
    computed_s: float | None, queued_s: float | None
) -> None:
    began_s = time.monotonic()
    deliver: list[Any] = []
    clock: Any = Clock()
    request = Request("r", (1,), None, began_s - 10.0)  # type: ignore[arg-type]
    choice: Any = SimpleNamespace(index=0, request=request)

    async def admitted(_: str) -> None:
        """At once."""

    engine: Any = SimpleNamespace(submit=lambda _, done: deliver.append(done), admitted=admitted)
    watch: Any = SimpleNamespace(timing=lambda _: clock)
    asyncio.run(Generation(engine, [choice], watch, True, 1).start())
    deliver[0](TokenOutput(request.request_id, 0, 7, None, None, computed_s))
    (found_s,) = clock.queued_s
    if queued_s is None or found_s is None:
        assert found_s is queued_s
    else:
        assert queued_s <= found_s <= queued_s + time.monotonic() - began_s


@pytest.mark.parametrize("is_refused", [False, True])
def test_who_leaves_before_the_answer_is_aborted_and_who_is_refused_is_not(
    is_refused: bool,
) -> None:
    aborted: list[str] = []
    request = Request("r", (1,), None, time.monotonic())  # type: ignore[arg-type]
    choice: Any = SimpleNamespace(index=0, request=request)
    metrics = RequestMetrics(512)

    async def admitted(_: str) -> None:
        if is_refused:
            raise Unavailable("too much waits")
        await asyncio.sleep(60.0)

    engine: Any = SimpleNamespace(submit=lambda *_: None, admitted=admitted, abort=aborted.append)

    async def main() -> None:
        start = asyncio.create_task(Generation(engine, [choice], metrics, True, 1).start())
        await asyncio.sleep(0)
        if not is_refused:
            start.cancel()
        with pytest.raises(Unavailable if is_refused else asyncio.CancelledError):
            await start

    asyncio.run(main())
    assert aborted == ([] if is_refused else ["r"])
    assert metrics.arrivals == metrics.finished.total() == 0, "what was not taken does not end"


ANSWERED: ContextVar[str] = ContextVar("answered")


@pytest.mark.parametrize("comes", ["token first", "answer first", "end first"])
def test_each_request_is_taken_once_by_its_own_clock_in_its_own_context(comes: str) -> None:
    """Two at a time, whose answers come the other way round; tokens may come in between."""
    told: list[tuple[str, str]] = []
    delivers: dict[str, Any] = {}
    answers: dict[str, asyncio.Event] = {}

    class Named(Clock):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def accepted(self) -> None:
            assert ANSWERED.get() == self.name
            told.append((self.name, "accepted"))

        def token(self, *_: object) -> None:
            told.append((self.name, "token"))

        def ended(self, reason: FinishReason, now_s: float) -> None:
            told.append((self.name, reason.value))

    def submit(request: Request, deliver: Any) -> None:
        delivers[request.request_id] = deliver
        answers[request.request_id] = asyncio.Event()

    async def admitted(request_id: str) -> None:
        await answers[request_id].wait()

    engine: Any = SimpleNamespace(submit=submit, admitted=admitted, abort=lambda _: None)
    watch: Any = SimpleNamespace(timing=lambda request: Named(request.request_id))

    async def ask(name: str) -> None:
        ANSWERED.set(name)
        request: Any = SimpleNamespace(request_id=name, arrival_s=0.0)
        choice: Any = SimpleNamespace(index=0, request=request)
        await Generation(engine, [choice], watch, True, 1).start()

    async def main() -> None:
        asked = [asyncio.create_task(ask(name)) for name in "ab"]
        await asyncio.sleep(0)
        for name in "ba":
            end = FinishReason.LENGTH if comes == "end first" else None
            if comes == "answer first":
                answers[name].set()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            delivers[name](TokenOutput(RequestId(name), 0, 7, None, end))
            answers[name].set()
        await asyncio.gather(*asked)

    asyncio.run(main())
    more = ["length"] if comes == "end first" else []
    assert told == [(name, what) for name in "ba" for what in ("accepted", "token", *more)]
