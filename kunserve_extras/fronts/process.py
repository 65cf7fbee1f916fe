"""The entry point of a front's process: ``... process NUMBER LINK LISTENER``, two descriptors."""

import asyncio
import gc
import os
import socket
import sys
from dataclasses import replace

import uvloop

from kunserve.cluster.log_format import start_logging
from kunserve.core.config import KunServeConfig
from kunserve.model.source import resolve_model
from kunserve.server.api.front import Front
from kunserve.server.http.limits import FrontLimits
from kunserve.server.start.app import create_app
from kunserve.server.start.launch_parts import load_tokenizer, tracer_of
from kunserve.server.start.serve import Drain, serve
from kunserve.server.telemetry.request_metrics import RecentValues
from kunserve_extras.fronts.remote import RemoteEngine
from kunserve_extras.fronts.tally import counts_of
from kunserve_extras.fronts.wire import Counted, FromController, Link, Welcome

COUNT_PERIOD_S = 0.2
FAMILIES_EVERY = 5
"""Of so many times that it tells, one has all counters: what came since is lost with a front."""
MAX_FRESH = 4096


class _Passed(RecentValues):
    """Remembers what is new until it is told."""

    def __init__(self) -> None:
        super().__init__()
        self._fresh: list[float] = []

    def add(self, now_s: float, value: float) -> None:
        """See ``RecentValues``."""
        super().add(now_s, value)
        if len(self._fresh) < MAX_FRESH:
            self._fresh.append(value)

    def take(self) -> list[float]:
        """What is new."""
        fresh, self._fresh = self._fresh, []
        return fresh


class _Counting:
    """Tells the controller's process what this front counts."""

    def __init__(self, front: Front, engine: RemoteEngine) -> None:
        self._front = front
        self._engine = engine
        self._first_token, self._per_token = _Passed(), _Passed()
        front.metrics.recent_first_token = self._first_token
        front.metrics.recent_per_token = self._per_token

    async def run(self) -> None:
        """For ever; cancelled when the front ends."""
        turn = 0
        loop = asyncio.get_running_loop()
        while True:
            self.tell(with_families=turn % FAMILIES_EVERY == 0)
            turn += 1
            due_s = loop.time() + COUNT_PERIOD_S
            await asyncio.sleep(COUNT_PERIOD_S)
            self._front.metrics.loop_lag.observe(max(0.0, loop.time() - due_s))

    def tell(self, *, with_families: bool) -> None:
        """All of it now."""
        metrics = self._front.metrics
        self._engine.tell(
            Counted(
                metrics.arrivals,
                dict(metrics.refusals),
                metrics.generation_tokens,
                self._front.num_in_flight,
                self._first_token.take(),
                self._per_token.take(),
                counts_of(metrics.collect()) if with_families else None,
            )
        )


async def _run(link_fd: int, listener: socket.socket) -> None:
    drain = Drain()
    counting: list[_Counting] = []

    def count() -> None:
        for one in counting:
            one.tell(with_families=True)

    engine = RemoteEngine(count, drain.request)
    link: Link[FromController] = Link(engine.hear, engine.end)
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: link, sock=socket.socket(fileno=link_fd))
    engine.use(link)
    welcome = await engine.met()
    # A front without its controller answers nobody.
    orphaned = asyncio.create_task(_end_when(engine))
    start_logging(welcome.config.log)
    app_config = _share_of(welcome)
    model = welcome.config.model
    source = resolve_model(model.model, model.load_format)
    tokenizer = await asyncio.to_thread(load_tokenizer, source, welcome.config)
    tracer = tracer_of(welcome.config)
    app = create_app(
        engine,
        tokenizer,
        welcome.model_name,
        app_config,
        _limits(welcome.config.server.api_server_count),
        welcome.defaults,
        tracer,
        engine,
    )
    counter = _Counting(app.state.front, engine)
    counting.append(counter)
    # Who tells counts as up, so connections must find somebody: they wait until ``serve`` reads.
    listener.listen()
    telling = asyncio.create_task(counter.run())
    gc.freeze()
    try:
        await serve(app, app_config, sockets=[listener], drain=drain)
    finally:
        telling.cancel()
        orphaned.cancel()
        counter.tell(with_families=True)
        await asyncio.sleep(0)  # the last words are written
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


async def _end_when(engine: RemoteEngine) -> None:
    await engine.ended.wait()
    os._exit(0)


def _share_of(welcome: Welcome) -> KunServeConfig:
    """The settings with this front's part of what is to be shared."""
    config = welcome.config
    num_fronts = config.server.api_server_count
    most = -(-config.server.max_connections // num_fronts)
    return replace(config, server=replace(config.server, max_connections=most))


def _limits(num_fronts: int) -> FrontLimits:
    """A front's part of the memory that texts and bodies may take."""
    whole = FrontLimits()
    return replace(
        whole,
        max_waiting_chars=whole.max_waiting_chars // num_fronts,
        max_unfinished_bytes=whole.max_unfinished_bytes // num_fronts,
    )


def main() -> None:
    """The process."""
    gc.enable()
    link_fd, listener_fd = int(sys.argv[1]), int(sys.argv[2])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(link_fd, socket.socket(fileno=listener_fd)))


if __name__ == "__main__":
    main()
