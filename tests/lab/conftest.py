"""A small OpenAI server on loopback that answers as it is told to."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

METRICS = """# HELP vllm:num_requests_running Running.
vllm:num_requests_running{model_name="fake",engine="0"} 2.0
vllm:num_requests_running{model_name="fake",engine="1"} 1.0
vllm:num_requests_waiting{model_name="fake",engine="0"} 4
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.3
vllm:num_preemptions_total{engine="0"} 7.0
kunserve:kv_capacity_blocks{group="0"} 100
kunserve:kv_used_blocks{group="0"} 25
"""


ACCEPT_TURNS = 5
"""Turns of the loop in which a connection is accepted and told to the server: three, and some."""


async def clean_up(runner: web.AppRunner) -> None:
    """Close the server and all its connections, also one whose client is gone by now.

    A connection that the loop is just accepting when its server closes stays open (Python
    3.11), and is an error of whichever test collects it.
    """
    for _ in range(ACCEPT_TURNS):
        await asyncio.sleep(0)
    await runner.cleanup()


@dataclass
class Behaviour:
    """What the fake server does. Tests change it between requests."""

    status: int = 200
    gap_s: float = 0.0
    tokens_per_chunk: int = 1
    usage: bool = True
    cut_after: int | None = None
    hang: bool = False
    raw: bytes | None = None
    error_after: int | None = None
    metrics: str | None = METRICS
    models: list[str] = field(default_factory=lambda: ["fake-model"])
    api_key: str | None = None


class FakeServer:
    """Runs in a thread of its own; `url` is its address, `bodies` what it was sent."""

    def __init__(self) -> None:
        self.behaviour = Behaviour()
        self.bodies: list[dict[str, Any]] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._open())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(clean_up(runner))
        hanging = asyncio.all_tasks(self._loop)
        for task in hanging:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*hanging, return_exceptions=True))
        self._loop.close()

    async def _open(self) -> web.AppRunner:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._completions)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        return runner

    def _refused(self, request: web.Request) -> bool:
        key = self.behaviour.api_key
        return key is not None and request.headers.get("Authorization") != f"Bearer {key}"

    async def _models(self, request: web.Request) -> web.Response:
        if self._refused(request):
            return web.json_response({"error": {"message": "no"}}, status=401)
        return web.json_response({"data": [{"id": name} for name in self.behaviour.models]})

    async def _metrics(self, request: web.Request) -> web.Response:
        text = self.behaviour.metrics
        return web.Response(status=404) if text is None else web.Response(text=text)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        told = self.behaviour
        if told.status != 200:
            error = {
                "error": {"message": "as told", "type": "x", "param": None, "code": told.status}
            }
            return web.json_response(error, status=told.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if told.raw is not None:
            await response.write(told.raw)
            return response
        if told.hang:
            await asyncio.sleep(30)
        await self._stream(request, response, body, told)
        return response

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        told: Behaviour,
    ) -> None:
        chat = "messages" in body
        wanted = body["max_completion_tokens"] if chat else body["max_tokens"]
        if chat:
            await self._send(
                response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
            )
        left, chunks = wanted, 0
        while left > 0:
            if told.cut_after == chunks:
                assert request.transport is not None
                request.transport.abort()
                return
            if told.error_after == chunks:
                await self._send(response, {"error": {"message": "engine died", "code": 500}})
                break
            if told.gap_s:
                await asyncio.sleep(told.gap_s)
            count = min(told.tokens_per_chunk, left)
            left -= count
            chunks += 1
            reason = None if left else "length"
            text = " tok" * count
            choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            await self._send(response, {"id": "cmpl-1", "choices": [choice]})
        if told.usage:
            prompt = body.get("prompt", "one two")
            usage = {"prompt_tokens": len(prompt), "completion_tokens": wanted - left}
            await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def second_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.start()
    yield fake
    fake.stop()
