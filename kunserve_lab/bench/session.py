"""One run from start to end: wait for the servers, warm up, replay, sample, measure."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from kunserve.core.errors import ConfigError
from kunserve_lab.bench.client import CallSettings, authorization, network_error
from kunserve_lab.bench.prompts import PromptSource
from kunserve_lab.bench.records import RequestRecord, ServerSample
from kunserve_lab.bench.replay import Bodies, Observer, open_session, replay
from kunserve_lab.bench.server_watch import Sampling, sample_servers
from kunserve_lab.workload.workload import Workload, WorkloadRequest

_READY_PERIOD_S = 0.5


class ServerUnreachable(ConfigError):
    """No server answers at the address given, or it refuses to talk to us."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the requests go and how they are made."""

    servers: tuple[str, ...]
    """Base URLs; they take turns."""
    settings: CallSettings
    metrics_urls: tuple[str, ...]
    """Empty: the servers are not sampled."""
    max_concurrency: int | None = None
    num_warmups: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run measured."""

    records: tuple[RequestRecord, ...]
    samples: tuple[ServerSample, ...]
    num_missed_samples: int
    duration_s: float
    """From the start to the end of the last response."""


async def find_model(
    servers: Sequence[str],
    model: str | None,
    api_key: str | None,
    timeout_s: float,
    waiting: Callable[[str], None] = lambda reason: None,
) -> str:
    """Waits until every server answers ``GET /v1/models`` and returns the model to ask for.

    That is ``model`` if given, else the first that the first server lists. A server that is not
    there after ``timeout_s`` is a `ServerUnreachable`; ``waiting`` is told once why we wait.
    """
    deadline_s = time.perf_counter() + timeout_s
    found: list[str | None] = []
    async with open_session(max(timeout_s, 5.0)) as session:
        for server in servers:
            found.append(await _first_model(session, server, api_key, deadline_s, waiting))
    chosen = model or found[0]
    if chosen is None:
        raise ConfigError(f"{servers[0]} lists no model: name one with --model")
    return chosen


async def measure(
    target: Target,
    workload: Workload,
    prompts: PromptSource,
    observer: Observer | None = None,
    stop: asyncio.Event | None = None,
) -> Outcome:
    """Warms up, then replays ``workload`` against ``target`` while sampling its servers.

    ``stop`` ends either; while it warms up nothing has been measured yet.
    """
    settings, servers = target.settings, target.servers
    async with (
        open_session(settings.timeout_s) as session,
        open_session(settings.timeout_s) as side,
    ):
        if target.num_warmups:
            await _warm_up(session, target, workload, prompts, stop)
        if stop is not None and stop.is_set():
            return Outcome((), (), 0, 0.0)
        requests = workload.requests()
        bodies = Bodies(settings, prompts, requests)
        start_s = time.perf_counter()
        sampling = Sampling()
        sampler = asyncio.create_task(
            sample_servers(side, target.metrics_urls, start_s, sampling, settings.api_key)
            if target.metrics_urls
            else asyncio.sleep(0)
        )
        try:
            records = await replay(
                session,
                settings,
                servers,
                requests,
                bodies,
                start_s,
                target.max_concurrency,
                observer,
                stop,
            )
            duration_s = time.perf_counter() - start_s
        finally:
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)
    return Outcome(tuple(records), tuple(sampling.samples), sampling.num_missed, duration_s)


async def _warm_up(
    session: aiohttp.ClientSession,
    target: Target,
    workload: Workload,
    prompts: PromptSource,
    stop: asyncio.Event | None,
) -> None:
    """Sends copies of the first request, with prompts of their own."""
    pattern = workload.requests()[0]
    warmups = [
        WorkloadRequest(len(workload) + number, 0.0, pattern.input_tokens, pattern.output_tokens)
        for number in range(target.num_warmups)
    ]
    await replay(
        session,
        target.settings,
        target.servers,
        warmups,
        Bodies(target.settings, prompts, warmups),
        time.perf_counter(),
        target.max_concurrency,
        stop=stop,
    )


async def _first_model(
    session: aiohttp.ClientSession,
    server: str,
    api_key: str | None,
    deadline_s: float,
    waiting: Callable[[str], None],
) -> str | None:
    """The first model that ``server`` lists, once it answers; None if it cannot list models."""
    told = False
    while True:
        try:
            url = f"{server}/v1/models"
            async with session.get(url, headers=authorization(api_key)) as response:
                status, body = response.status, await response.read()
            if status in (401, 403):
                raise ServerUnreachable(
                    f"{server} refuses our key (HTTP {status}): give the right --api-key"
                )
            if status < 500:
                return _listed(body) if status == 200 else None
            reason = f"HTTP {status}"
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            reason = network_error(error)
            if isinstance(error, aiohttp.InvalidURL):
                raise ServerUnreachable(reason) from None
        if time.perf_counter() >= deadline_s:
            raise ServerUnreachable(
                f"no server at {server}: {reason}. Start one (kunserve serve), or give its "
                "address with --base-url or --host and --port."
            )
        if not told:
            waiting(f"{server} does not answer yet ({reason})")
            told = True
        await asyncio.sleep(_READY_PERIOD_S)


def _listed(body: bytes) -> str | None:
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError):
        return None
