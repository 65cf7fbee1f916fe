"""A call may be interrupted at any moment: nothing of it runs on, and others are served."""

import asyncio
import contextlib
from typing import Any

import pytest

from kunserve_extras.offline.loop_thread import LoopThread, Tell


async def nothing() -> None: ...


@pytest.mark.parametrize("is_asked", [False, True])
def test_an_interrupt_while_a_call_is_asked_for(
    is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = LoopThread()
    ended: list[str] = []
    ask = thread._loop.call_soon_threadsafe
    num_asked = 0

    def interrupted(*args: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            return ask(*args)
        if is_asked:
            ask(*args)
        raise KeyboardInterrupt

    async def work(_: Tell) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60.0)
        ended.append("ended")

    async def answer(_: Tell) -> int:
        return 7

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.call(work)
    assert thread.call(answer) == 7
    assert not thread._calls
    assert len(ended) <= is_asked, "one that was never asked for never begins"
    thread.close(nothing)
