"""How long a request queued: the front's clock alone says when it arrived."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kunserve.core.errors import Unavailable
from kunserve.core.messages import TokenOutput
from kunserve.core.request import Request
from kunserve.server.generation import Generation


class Clock:
    def __init__(self) -> None:
        self.queued_s: list[float | None] = []

    def token(self, now_s: float, queued_s: float | None = None, num_cached: int = 0) -> None:
        self.queued_s.append(queued_s)

    def ended(self, reason: object, now_s: float) -> None: ...


@pytest.mark.parametrize(("computed_s", "queued_s"), [(2.0, 8.0), (10.5, 0.0), (None, None)])
def test_the_queue_is_what_was_not_computing(
    computed_s: float | None, queued_s: float | None
) -> None:
    deliver: list[Any] = []
    clock: Any = Clock()
    request = Request("r", (1,), None, time.monotonic() - 10.0)  # type: ignore[arg-type]
    choice: Any = SimpleNamespace(index=0, request=request)

    async def admitted(_: str) -> None:
        """At once."""

    engine: Any = SimpleNamespace(submit=lambda _, done: deliver.append(done), admitted=admitted)
    watch: Any = SimpleNamespace(timing=lambda _: clock, accepted=lambda: None)
    asyncio.run(Generation(engine, [choice], watch, True, 1).start())
    deliver[0](TokenOutput(request.request_id, 0, 7, None, None, computed_s))
    assert clock.queued_s == [pytest.approx(queued_s, abs=0.5)]


@pytest.mark.parametrize("is_refused", [False, True])
def test_who_leaves_before_the_answer_is_aborted_and_who_is_refused_is_not(
    is_refused: bool,
) -> None:
    aborted: list[str] = []
    request = Request("r", (1,), None, time.monotonic())  # type: ignore[arg-type]
    choice: Any = SimpleNamespace(index=0, request=request)

    async def admitted(_: str) -> None:
        if is_refused:
            raise Unavailable("too much waits")
        await asyncio.sleep(60.0)

    engine: Any = SimpleNamespace(submit=lambda *_: None, admitted=admitted, abort=aborted.append)
    watch: Any = SimpleNamespace(timing=lambda _: Clock(), accepted=lambda: None)

    async def main() -> None:
        start = asyncio.create_task(Generation(engine, [choice], watch, True, 1).start())
        await asyncio.sleep(0)
        if not is_refused:
            start.cancel()
        with pytest.raises(Unavailable if is_refused else asyncio.CancelledError):
            await start

    asyncio.run(main())
    assert aborted == ([] if is_refused else ["r"])
