"""The real server over an ``EchoEngine``: a thread, an ephemeral port, a drained end."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import uvloop

from kunserve.core.config import (
    ChatConfig,
    KunServeConfig,
    LogConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from kunserve.server.api.front import Front
from kunserve.server.http.limits import FrontLimits
from kunserve.server.start.app import create_app
from kunserve.server.start.serve import Drain, serve
from kunserve.server.telemetry.request_life import Tracer
from tests.conftest import wait_until
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.tiny_tokenizer import tiny_tokenizer

T = TypeVar("T")
MODEL = "tiny"


@dataclass
class LiveServer:
    """A running server and the engine behind it."""

    engine: EchoEngine
    port: int
    loop: asyncio.AbstractEventLoop
    drain: Drain
    front: Front
    thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx.Client:
        options.setdefault("timeout", 20.0)
        # Loading certificates would take longer than most tests.
        return httpx.Client(base_url=self.url, trust_env=False, verify=False, **options)

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the server's event loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def configure(self, **fields: Any) -> None:
        """Set fields of the engine."""
        self.call(lambda: [setattr(self.engine, name, value) for name, value in fields.items()])

    def renew_engine(self) -> None:
        """Give every field of the engine its default, once what ran has ended."""
        wait_until(lambda: not self.engine.tasks)
        fresh = EchoEngine()
        self.configure(**{name: getattr(fresh, name) for name in EchoEngine.__dataclass_fields__})

    def request_drain(self) -> None:
        """What a SIGTERM does."""
        self.loop.call_soon_threadsafe(self.drain.request)

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=20.0)


@contextlib.contextmanager
def live_server(
    engine: EchoEngine | None = None,
    server: ServerConfig | None = None,
    limits: FrontLimits | None = None,
    listener: socket.socket | None = None,
    model: ModelConfig | None = None,
    log: LogConfig | None = None,
    tracer: Tracer | None = None,
    chat: ChatConfig | None = None,
    scheduler: SchedulerConfig | None = None,
) -> Generator[LiveServer, None, None]:
    """Start a server, on an ephemeral port unless told; at the end it is drained and joined."""
    engine = engine or EchoEngine()
    config = KunServeConfig(
        model=model or ModelConfig(),
        server=server or ServerConfig(shutdown_timeout_s=5.0),
        log=log or LogConfig(),
        chat=chat or ChatConfig(),
        scheduler=scheduler or SchedulerConfig(),
    )
    listener = listener or socket.create_server(("127.0.0.1", 0), backlog=2048)
    port = listener.getsockname()[1]
    started = threading.Event()
    made: dict[str, Any] = {}

    async def main() -> None:
        app = create_app(engine, tiny_tokenizer(), MODEL, config, limits, tracer=tracer)
        made.update(loop=asyncio.get_running_loop(), drain=Drain(), front=app.state.front)
        started.set()
        await serve(app, config, sockets=[listener], drain=made["drain"])
        await engine.close()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        finally:
            started.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    assert started.wait(20)
    live = LiveServer(engine, port, made["loop"], made["drain"], made["front"], thread)
    try:
        yield live
    finally:
        with contextlib.suppress(RuntimeError):  # the test may have drained it already
            live.request_drain()
            live.request_drain()
        thread.join(20)
        assert not thread.is_alive()


def run_async(main: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function on a fresh loop."""

    async def wrapped() -> T:
        return await main()

    return asyncio.run(wrapped())
