"""Open-loop replay: every request goes out when the workload says, whatever the server does."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp

from kunserve_lab.bench.client import Call, CallSettings, stream
from kunserve_lab.bench.prompts import PromptSource, prompt_of
from kunserve_lab.bench.records import RequestRecord
from kunserve_lab.workload.workload import WorkloadRequest

AHEAD_BYTES = 64 * 2**20
_KEEPALIVE_S = 4.0
"""Below uvicorn's 5 s, so that no request goes out on a connection that is being closed."""


class Observer(Protocol):
    """Told of each request as it goes, for people who watch."""

    def sent(self) -> None:
        """A request went out."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """A request completed or failed."""
        ...


class Silent:
    """Nobody watches."""

    def sent(self) -> None:
        """Nothing."""

    def ended(self, record: RequestRecord) -> None:
        """Nothing."""


class Bodies:
    """The requests' JSON bodies: the first ``ahead_bytes`` of them are built before the clock
    starts, the others as they are needed, so that bursts leave on time and memory is bounded.
    """

    def __init__(
        self,
        settings: CallSettings,
        prompts: PromptSource,
        requests: Sequence[WorkloadRequest],
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._settings = settings
        self._prompts = prompts
        self._ahead: dict[int, bytes] = {}
        num_bytes = 0
        for request in requests:
            if num_bytes >= ahead_bytes:
                break
            body = self._built(request)
            self._ahead[request.number] = body
            num_bytes += len(body)

    def take(self, request: WorkloadRequest) -> bytes:
        """The body of ``request``; it is forgotten afterwards."""
        ready = self._ahead.pop(request.number, None)
        return self._built(request) if ready is None else ready

    def _built(self, request: WorkloadRequest) -> bytes:
        prompt = prompt_of(self._prompts, request)
        return self._settings.body(prompt, request.output_tokens, request.priority)


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    """A session without a limit on connections: a limit would add waiting to the measurement."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, connect=None, sock_connect=timeout_s),
        read_bufsize=2**18,
    )


async def replay(
    session: aiohttp.ClientSession,
    settings: CallSettings,
    servers: Sequence[str],
    requests: Sequence[WorkloadRequest],
    bodies: Bodies,
    start_s: float,
    max_concurrency: int | None = None,
    observer: Observer | None = None,
    stop: asyncio.Event | None = None,
) -> list[RequestRecord]:
    """Sends each request at ``start_s + arrival_s`` and returns a record for each one sent.

    ``start_s`` is on `time.perf_counter`. Servers take turns. With ``max_concurrency`` a request
    may leave late; its latency counts from when it left (as in vLLM) and ``planned_s`` tells.
    Setting ``stop`` ends the run: requests in flight are cut off and recorded as interrupted.
    """
    watcher: Observer = Silent() if observer is None else observer
    stopped = asyncio.Event() if stop is None else stop
    gate = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    calls: list[Call] = []
    tasks: list[asyncio.Task[RequestRecord]] = []

    async def follow(call: Call, body: bytes) -> RequestRecord:
        async with gate or contextlib.nullcontext():
            watcher.sent()
            record = await stream(session, settings, call, body, start_s)
        watcher.ended(record)
        return record

    for request in requests:
        body = bodies.take(request)
        await _until(start_s + request.arrival_s, stopped)
        if stopped.is_set():
            break
        call = Call(
            number=request.number,
            server=servers[request.number % len(servers)],
            planned_s=request.arrival_s,
            input_tokens=request.input_tokens,
            asked_output_tokens=request.output_tokens,
            sent_s=time.perf_counter() - start_s,
            token_times_s=[],
        )
        calls.append(call)
        tasks.append(asyncio.create_task(follow(call, body)))
    await _all_or_stopped(tasks, stopped)
    ended_s = time.perf_counter() - start_s
    return [
        call.record(ended_s, "interrupted") if task.cancelled() else task.result()
        for call, task in zip(calls, tasks, strict=True)
    ]


async def _until(moment_s: float, stopped: asyncio.Event) -> None:
    """Waits for a moment on `time.perf_counter`, or less if stopped; yields in any case."""
    wait_s = moment_s - time.perf_counter()
    if wait_s <= 0:
        await asyncio.sleep(0)
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await stopped.wait()


async def _all_or_stopped(
    tasks: Sequence[asyncio.Task[RequestRecord]], stopped: asyncio.Event
) -> None:
    """Waits for all tasks; once ``stopped`` is set, cancels those that are left."""
    watch: asyncio.Future[Any] = asyncio.ensure_future(stopped.wait())
    everything: asyncio.Future[Any] = asyncio.gather(*tasks, return_exceptions=True)
    try:
        await asyncio.wait({everything, watch}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await everything
    finally:
        watch.cancel()
