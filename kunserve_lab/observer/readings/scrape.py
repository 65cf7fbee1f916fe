"""Reads the ``/metrics`` of every server once a period. One that hangs or dies stops no other."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from kunserve_lab.bench.client import authorization
from kunserve_lab.observer.readings.clock import now_s
from kunserve_lab.observer.readings.page import PageError, Reading, parse_page

LEAST_DEADLINE_S = 2.0
MAX_PAGE_BYTES = 16 << 20
MOST_KEPT = 1000
"""Readings that nobody has taken yet, of one server; the oldest go."""


@dataclass(slots=True)
class Target:
    """One server, and what became of the looks at it."""

    url: str
    fresh: list[Reading] = field(default_factory=list)
    """Not taken yet."""
    error: str | None = None
    """Of the last look; None if it was answered."""
    answered: bool = False
    """Whether it ever was."""


class Scraper:
    """Looks at each server in a task of its own."""

    def __init__(self, urls: Sequence[str], period_s: float, api_key: str | None = None) -> None:
        self.targets = [Target(url) for url in urls]
        self._period_s = period_s
        self._deadline_s = max(LEAST_DEADLINE_S, 2 * period_s)
        self._api_key = api_key
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, session: aiohttp.ClientSession) -> None:
        """From now on, until ``stop``."""
        self._tasks = [
            asyncio.create_task(self._follow(session, target)) for target in self.targets
        ]

    async def stop(self) -> None:
        """End all looks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def take(self) -> list[Reading]:
        """What was read since the last call."""
        readings: list[Reading] = []
        for target in self.targets:
            readings += target.fresh
            target.fresh = []
        return readings

    @property
    def errors(self) -> dict[str, str]:
        """Of servers whose last look failed: why."""
        return {one.url: one.error for one in self.targets if one.error is not None}

    async def _follow(self, session: aiohttp.ClientSession, target: Target) -> None:
        due_s = time.monotonic()
        while True:
            await self.look(session, target)
            due_s = max(due_s + self._period_s, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())

    async def look(self, session: aiohttp.ClientSession, target: Target) -> None:
        """Once. What goes wrong is in ``target.error``."""
        timeout = aiohttp.ClientTimeout(total=self._deadline_s)
        url = f"{target.url}/metrics"
        began_s = now_s()
        try:
            async with session.get(
                url, timeout=timeout, headers=authorization(self._api_key)
            ) as answer:
                if answer.status != 200:
                    target.error = _refusal(url, answer.status)
                    return
                body = await answer.content.read(MAX_PAGE_BYTES + 1)
                while len(body) <= MAX_PAGE_BYTES and not answer.content.at_eof():
                    body += await answer.content.read(MAX_PAGE_BYTES)
        except TimeoutError:
            target.error = f"{url} gave no answer in {self._deadline_s:g} s"
            return
        except (aiohttp.ClientError, OSError, ValueError) as error:
            target.error = f"no server at {target.url}: {error or type(error).__name__}"
            return
        if len(body) > MAX_PAGE_BYTES:
            target.error = f"{url} is larger than {MAX_PAGE_BYTES >> 20} MiB"
            return
        moment_s = (began_s + now_s()) / 2
        try:
            readings = parse_page(body.decode(errors="replace"), _name(target.url), moment_s)
        except PageError as error:
            target.error = str(error)
            return
        except Exception as error:  # whatever one server says, the others are watched
            target.error = f"{url} cannot be read: {type(error).__name__}: {error}"
            return
        target.error, target.answered = None, True
        target.fresh = [*target.fresh, *readings][-MOST_KEPT:]


def _name(url: str) -> str:
    return url.removeprefix("http://").removeprefix("https://")


def _refusal(url: str, status: int) -> str:
    if status in (401, 403):
        return f"{url} answers {status}: give --api-key"
    hint = "; an SGLang server must be started with --enable-metrics" if status == 404 else ""
    return f"{url} answers {status}: expected 200 and Prometheus text{hint}"
