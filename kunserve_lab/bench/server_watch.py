"""Looks at the servers' ``/metrics`` while a run goes on."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from kunserve_lab.bench.client import authorization
from kunserve_lab.bench.records import ServerSample
from kunserve_lab.bench.samples import server_sample

PERIOD_S = 0.5
_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Sampling:
    """What the sampler has seen. ``num_missed`` looks got no answer."""

    samples: list[ServerSample] = field(default_factory=list)
    num_missed: int = 0


async def sample_servers(
    session: aiohttp.ClientSession,
    urls: Sequence[str],
    start_s: float,
    sampling: Sampling,
    api_key: str | None = None,
    period_s: float = PERIOD_S,
) -> None:
    """Appends a sample to ``sampling`` every ``period_s`` until cancelled.

    A look that not every server answers is missed rather than summed wrongly; a server that
    is too busy to answer is no reason to end the run.
    """
    due_s = time.perf_counter()
    while True:
        texts = await asyncio.gather(*(_fetch(session, url, api_key) for url in urls))
        answered = [text for text in texts if text is not None]
        if len(answered) == len(urls):
            moment_s = time.perf_counter() - start_s
            sampling.samples.append(server_sample(moment_s, answered))
        else:
            sampling.num_missed += 1
        due_s = max(due_s + period_s, time.perf_counter() + period_s / 2)
        await asyncio.sleep(due_s - time.perf_counter())


async def _fetch(session: aiohttp.ClientSession, url: str, api_key: str | None) -> str | None:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with session.get(url, timeout=timeout, headers=authorization(api_key)) as response:
            return await response.text() if response.status == 200 else None
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        return None
