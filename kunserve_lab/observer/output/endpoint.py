"""The observer's own address: ``/metrics`` for Prometheus and autoscalers, and the report as a
page.
"""

import asyncio
import json
import time
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from kunserve.core.errors import ConfigError
from kunserve_lab.observer.episodes.story import Cause, cause_of
from kunserve_lab.observer.episodes.what_if import Judged
from kunserve_lab.observer.output.show import view_json
from kunserve_lab.observer.watch import FleetView

PAGE_AGE_S = 10.0
"""A page younger than this is given again: drawing one takes a second."""
NEVER_S = 1e9
"""What a forecast says when nothing runs out: a gauge has no word for it."""


class OwnMetrics:
    """Gauges of the newest view, under ``kunserve_observe_``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._by_replica = {
            field: self._gauge(name, text, ["replica"])
            for field, name, text in (
                ("kv_usage", "kv_usage_ratio", "Share of the KV memory in use."),
                ("demand", "kv_demand_ratio", "What runs, will grow and waits, over KV memory."),
                ("num_waiting", "requests_waiting", "Requests that wait."),
                ("num_running", "requests_running", "Requests that run."),
                ("memory_short", "memory_short", "1 while memory holds requests up."),
                ("compute_short", "compute_short", "1 while compute holds requests up."),
                ("age_s", "reading_age_seconds", "Age of the newest reading."),
            )
        }
        self._full = self._gauge("memory_full_in_seconds", "Until memory is short, if it goes on "
                                 f"so; {NEVER_S:g}: not soon.")  # fmt: skip
        self._busy = self._gauge("compute_full_in_seconds", "Until prompts take all compute of a "
                                 f"replica, if it goes on so; {NEVER_S:g}: not soon.")  # fmt: skip
        self._more = self._gauge("drop_admits_requests", "Requests that would run after a drop.")
        self._drops = self._gauge("drops_decided", "Drops that would have been made.")
        self._last = self._gauge("last_episode_ttft_p99_seconds", "Of the last episode, "
                                 "simulated.", ["way"])  # fmt: skip
        self._episodes = Counter(
            "kunserve_observe_episodes",
            "Bursts that were too much for a replica, by what was short.",
            ["cause"],
            registry=self.registry,
        )
        for cause in Cause:
            self._episodes.labels(cause.value)

    def show(self, view: FleetView) -> None:
        """Take the view's numbers."""
        for one in view.replicas:
            for field, gauge in self._by_replica.items():
                gauge.labels(one.name).set(float(getattr(one, field)))
        self._full.set(NEVER_S if view.full_in_s is None else view.full_in_s)
        self._busy.set(NEVER_S if view.busy_in_s is None else view.busy_in_s)
        self._more.set(view.drops.num_requests_now)
        self._drops.set(view.drops.num_drops)

    def tell(self, judged: Judged) -> None:
        """An episode that is over."""
        self._episodes.labels(cause_of(judged).value).inc()
        for way, one in judged.outcomes.items():
            self._last.labels(way.replace(" ", "_")).set(one.ttft_p99_s)

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(f"kunserve_observe_{name}", text, labels or [], registry=self.registry)


class Endpoint:
    """Serves ``/metrics``, ``/state`` and the report at ``/``."""

    def __init__(self, page: Callable[[], str]) -> None:
        """``page`` draws the report; it is called in a thread."""
        self.metrics = OwnMetrics()
        self._view: FleetView | None = None
        self._draw = page
        self._page, self._drawn_s = "", -PAGE_AGE_S
        self._drawing = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """The port, also where 0 was asked for. Raises ConfigError."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/state", self._state)
        app.router.add_get("/", self._report)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"--port {port}: {error.strerror or error}") from None
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def stop(self) -> None:
        """Close the address."""
        if self._runner is not None:
            await self._runner.cleanup()

    def show(self, view: FleetView) -> None:
        """The fleet now."""
        self._view = view
        self.metrics.show(view)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.metrics.registry), content_type="text/plain")

    async def _state(self, request: web.Request) -> web.Response:
        state = None if self._view is None else view_json(self._view)
        return web.Response(text=json.dumps(state), content_type="application/json")

    async def _report(self, request: web.Request) -> web.Response:
        async with self._drawing:
            if time.monotonic() - self._drawn_s >= PAGE_AGE_S:
                self._page = await asyncio.to_thread(self._draw)
                self._drawn_s = time.monotonic()
        return web.Response(text=self._page, content_type="text/html")
