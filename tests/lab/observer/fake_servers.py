"""Servers of ``/metrics`` pages on loopback, and a Prometheus server: they answer as told."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from tests.lab.conftest import clean_up

Page = Callable[[], str | int | None]
"""A page, a status, or None: no answer at all."""


class FakeServers:
    """One for each page, in a thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runners: list[web.AppRunner] = []
        self.num_asked = 0

    def serve(self, page: Page) -> str:
        """The address of a new server."""

        async def answer(request: web.Request) -> web.Response:
            self.num_asked += 1
            found = page()
            while found is None:
                await asyncio.sleep(3600)
            return (
                web.Response(status=found) if isinstance(found, int) else web.Response(text=found)
            )

        return self._start([web.get("/metrics", answer)])

    def prometheus(self, scraped: dict[str, Sequence[tuple[float, str]]]) -> str:
        """The address of one that has scraped these pages of these instances."""

        async def query_range(request: web.Request) -> web.Response:
            name = request.query["query"].partition("{")[0]
            start_s, end_s = float(request.query["start"]), float(request.query["end"])
            return web.json_response(
                {"status": "success", "data": {"resultType": "matrix",
                 "result": _matrix(scraped, name, start_s, end_s)}}
            )  # fmt: skip

        return self._start([web.get("/api/v1/query_range", query_range)])

    def stop(self) -> None:
        """All of them."""
        for runner in self._runners:
            asyncio.run_coroutine_threadsafe(clean_up(runner), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _start(self, routes: list[web.RouteDef]) -> str:
        async def start() -> str:
            app = web.Application()
            app.add_routes(routes)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._runners.append(runner)
            return f"http://127.0.0.1:{runner.addresses[0][1]}"

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result(10)


def _matrix(
    scraped: dict[str, Sequence[tuple[float, str]]], name: str, start_s: float, end_s: float
) -> list[dict[str, Any]]:
    rows: dict[tuple[tuple[str, str], ...], list[list[Any]]] = {}
    for instance, pages in scraped.items():
        for moment_s, page in pages:
            if not start_s <= moment_s <= end_s:
                continue
            lines = "".join(f"{line}\n" for line in page.splitlines() if line.startswith(name))
            for family in text_string_to_metric_families(lines):
                for sample in family.samples:
                    if sample.name == name:
                        key = (*sample.labels.items(), ("instance", instance))
                        rows.setdefault(key, []).append([moment_s, str(sample.value)])
    return [{"metric": {"__name__": name} | dict(key), "values": v} for key, v in rows.items()]
