"""Run the application until a signal, then drain."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Generator

import uvicorn
from starlette.applications import Starlette

from kunserve.core.config import KunServeConfig
from kunserve.server.api.front import Front
from kunserve.server.http.connection import limited_protocol

logger = logging.getLogger("kunserve.server")

SPARE_FILES = 512
"""Descriptors left for everything that is not a client's connection."""
MAX_OVERFLOW = 16384
LAST_WRITES_S = 2
"""How long interrupted requests have to write their error."""
KEEP_ALIVE_S = 65


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signals: ours drain before it closes anything."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


class Drain:
    """Counts the wishes to stop: the first drains, the second cuts the drain short."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()

    def request(self) -> None:
        """Called for each SIGTERM or SIGINT."""
        if self.requested.is_set():
            self.forced.set()
        self.requested.set()


async def serve(
    app: Starlette,
    config: KunServeConfig,
    sockets: list[socket.socket] | None = None,
    drain: Drain | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (or ``drain.request()``), then drain and return.

    The engine is still running afterwards: closing it is the caller's. ``sockets`` are bound
    sockets to listen on instead of ``config.server``'s host and port.
    """
    drain = drain or Drain()
    front: Front = app.state.front
    server = _Uvicorn(_uvicorn_config(app, config))
    keys = front.keys
    reload = keys.reload if keys is not None and keys.has_file else None
    with caught_signals(drain, reload):
        serving = asyncio.create_task(server.serve(sockets))
        requested = asyncio.create_task(drain.requested.wait())
        try:
            await asyncio.wait({serving, requested}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await _drain(front, drain, config.server.shutdown_timeout_s)
        finally:
            requested.cancel()
            server.should_exit = True
            await serving


async def _drain(front: Front, drain: Drain, timeout_s: float) -> None:
    front.stop_admission()
    logger.info("drain started in_flight=%d timeout_s=%g", front.num_in_flight, timeout_s)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while front.num_in_flight and not drain.forced.is_set() and loop.time() < deadline_s:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(drain.forced.wait(), 0.05)
    logger.info("drain ended interrupted=%d", front.num_in_flight)
    front.interrupt()


def _uvicorn_config(app: Starlette, config: KunServeConfig) -> uvicorn.Config:
    front: Front = app.state.front
    max_connections = config.server.max_connections
    overflow = min(MAX_OVERFLOW, _raise_file_limit() - SPARE_FILES - max_connections)
    if overflow < 0:
        logger.warning("max_connections=%d exceeds the open file limit", max_connections)
        max_connections, overflow = max(1, max_connections + overflow), 0
    made = uvicorn.Config(
        app,
        host=config.server.host,
        port=config.server.port,
        http=limited_protocol(max_connections, overflow, front.limits, front.metrics),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level=config.log.uvicorn_log_level,
        access_log=config.log.uvicorn_access_log,
        proxy_headers=False,
        ssl_certfile=config.server.ssl_certfile,
        ssl_keyfile=config.server.ssl_keyfile,
        ssl_ca_certs=config.server.ssl_ca_certs,
        ssl_cert_reqs=config.server.ssl_cert_reqs,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WRITES_S,
    )
    if config.log.uvicorn_access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)  # whatever the others' level
    return made


def _raise_file_limit() -> int:
    """Take all the descriptors the system grants; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


@contextlib.contextmanager
def caught_signals(drain: Drain, reload: Callable[[], None] | None) -> Generator[None, None, None]:
    """SIGTERM and SIGINT go to ``drain``, SIGHUP to ``reload``; only a main thread may ask."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    caught = [signal.SIGTERM, signal.SIGINT]
    for number in caught:
        loop.add_signal_handler(number, drain.request)
    if reload is not None:
        caught.append(signal.SIGHUP)
        loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
