"""How long a request queued: the front's clock alone says when it arrived."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

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
