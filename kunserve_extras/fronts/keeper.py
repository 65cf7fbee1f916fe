"""The fronts' processes: started, restarted when they die, drained at the end."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kunserve.cluster.api import EngineClient
from kunserve.core.config import KunServeConfig
from kunserve.core.errors import ConfigError
from kunserve.model.generation_config import SamplingDefaults
from kunserve.server.start.launch import Launched
from kunserve.server.start.serve import Drain, caught_signals
from kunserve.server.telemetry.stats_log import StatsLog
from kunserve.transport.children.child import LEAVE_S, START_S, Child, Pauses, ended
from kunserve_extras.fronts.accounts import ServerAccounts
from kunserve_extras.fronts.front_service import FrontService
from kunserve_extras.fronts.wire import CountNow, Leave, Welcome, frame_of

logger = logging.getLogger("kunserve.server")

NEWS_PERIOD_S = 0.2
NEWS_SHARE = 0.05
"""Of this process's time that telling news may take, in a large cluster."""
PROGRAM = ("-m", "kunserve_extras.fronts.process")


@dataclass(slots=True)
class _Seat:
    """One front's place: the process in it, and who serves it."""

    listener: socket.socket
    process: Child | None = None
    desk: FrontService | None = None


class FrontKeeper:
    """Keeps ``api_server_count`` fronts before a started cluster. Belongs to one event loop."""

    def __init__(
        self,
        engine: EngineClient,
        model_name: str,
        config: KunServeConfig,
        defaults: SamplingDefaults,
        listeners: Sequence[socket.socket],
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """``program`` is what Python runs as a front."""
        self._engine = engine
        self._model_name = model_name
        self._config = config
        self._defaults = defaults
        self._program = program
        self._seats = [_Seat(listener) for listener in listeners]
        self._accounts = ServerAccounts(engine, model_name, self._ask_all)
        self._are_up = asyncio.Event()
        self._leaving = asyncio.Event()
        self.num_restarts = 0

    @property
    def pids(self) -> list[int]:
        """Of all fronts that run."""
        return [seat.process.pid for seat in self._seats if seat.process is not None]

    @property
    def busy_pids(self) -> list[int]:
        """Of fronts that wait for requests."""
        return [
            seat.process.pid
            for seat in self._seats
            if seat.process is not None and seat.desk is not None and seat.desk.num_live
        ]

    async def run(self, drain: Drain | None = None, *, catches_signals: bool = True) -> None:
        """Serve until a signal (or ``drain.request()``), then drain and return.

        Raises ConfigError when a front cannot start. The engine is the caller's to close.
        """
        drain = drain or Drain()
        keepers = [
            asyncio.create_task(self._keep(number, seat)) for number, seat in enumerate(self._seats)
        ]
        background: list[asyncio.Task[Any]] = [
            asyncio.create_task(work)
            for work in (
                self._tell_news(),
                self._accounts.sampler.run(),
                StatsLog(self._accounts.cluster).run(),
            )
        ]
        requested: asyncio.Task[Any] = asyncio.create_task(drain.requested.wait())
        signals = (
            caught_signals(drain, self._reload_keys)
            if catches_signals
            else contextlib.nullcontext()
        )
        with signals:
            try:
                ends: set[asyncio.Task[Any]] = {requested, *keepers, *background}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if drain.requested.is_set():
                    await self._drain(drain, keepers)
                for task in (*keepers, *background):
                    if task.done() and not task.cancelled():
                        task.result()  # an error is the server's end
            finally:
                for task in (requested, *background, *keepers):
                    task.cancel()
                await asyncio.gather(*keepers, *background, return_exceptions=True)

    async def until_up(self) -> None:
        """Until every front has served once."""
        await self._are_up.wait()

    # Processes

    async def _keep(self, number: int, seat: _Seat) -> None:
        """One front after the other, until the server ends."""
        pauses = Pauses()
        while True:
            began_s = time.monotonic()
            try:
                reason = await self._run_one(number, seat)
            except OSError as error:  # no process, memory or descriptor is left, for now
                reason = f"it could not be started: {error}"
            if self._leaving.is_set():
                return
            if not self._are_up.is_set():
                raise ConfigError(f"front {number} did not start: {reason}")
            pause_s = pauses.after(time.monotonic() - began_s)
            self.num_restarts += 1
            logger.error(
                "front is over front=%d reason=%r next_start_s=%.2f", number, reason, pause_s
            )
            if any(one.desk is not None and one.desk.has_spoken for one in self._seats):
                # New connections go to that one: the next front here listens again.
                with contextlib.suppress(OSError):  # it may never have listened
                    seat.listener.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._leaving.wait()
                    return

    async def _run_one(self, number: int, seat: _Seat) -> str:
        """A front from its start to its end; why it ended. Raises OSError if it does not start."""
        silent = asyncio.Event()
        desk = FrontService(number, self._engine, self._accounts, silent.set)
        ours, process = self._spawn(seat)
        seat.process, seat.desk = process, desk
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: desk.link, sock=ours)
            desk.tell(
                Welcome(number, self._config, self._model_name, self._defaults, self._engine.limits)
            )
            desk.tell(self._accounts.news())
            if self._leaving.is_set():
                desk.tell(Leave())
            await silent.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    return await process.wait()
            return "it said nothing more"
        finally:
            desk.link.close()
            self._accounts.ended(number)
            seat.process = seat.desk = None
            await ended(process)

    def _spawn(self, seat: _Seat) -> tuple[socket.socket, Child]:
        """Our end of the link to a new process, and the process."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                descriptors = theirs.fileno(), seat.listener.fileno()
                program = *self._program, *map(str, descriptors)
                return ours, Child(program, fds=descriptors).watched()
        except BaseException:
            ours.close()
            raise

    # What fronts are told

    def _desks(self) -> dict[int, FrontService]:
        return {
            number: seat.desk
            for number, seat in enumerate(self._seats)
            if seat.desk is not None and seat.desk.link.is_open
        }

    def _ask_all(self) -> set[int]:
        desks = self._desks()
        for desk in desks.values():
            desk.tell(CountNow())
        return set(desks)

    async def _tell_news(self) -> None:
        started_s = time.monotonic()
        while True:
            began_s = time.monotonic()
            if self._desks():
                # Of a large cluster this is much, and the same for all: it is written once.
                news = frame_of(self._accounts.news())
                for desk in self._desks().values():
                    desk.tell_news(news)
            if not self._are_up.is_set():
                if self._accounts.num_counting == len(self._seats):
                    self._are_up.set()
                elif began_s - started_s > START_S:
                    raise ConfigError(f"not all fronts have started within {START_S:.0f} s")
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(NEWS_PERIOD_S, took_s / NEWS_SHARE))

    def _reload_keys(self) -> None:
        for seat in self._seats:
            if seat.process is not None:
                seat.process.send_signal(signal.SIGHUP)

    # The end

    async def _drain(self, drain: Drain, keepers: Sequence["asyncio.Task[None]"]) -> None:
        self._leaving.set()
        self._engine.stop_admission()
        num_in_flight = self._accounts.num_in_flight
        timeout_s = self._config.server.shutdown_timeout_s
        logger.info("drain started in_flight=%d timeout_s=%g", num_in_flight, timeout_s)
        for desk in self._desks().values():
            desk.tell(Leave())
        forced: asyncio.Task[Any] = asyncio.create_task(drain.forced.wait())
        ending: asyncio.Task[Any] = asyncio.create_task(asyncio.wait(keepers))
        try:
            await asyncio.wait(
                {forced, ending},
                timeout=timeout_s + LEAVE_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not ending.done():
                for desk in self._desks().values():
                    desk.tell(Leave())
                await asyncio.wait({ending}, timeout=LEAVE_S)
        finally:
            forced.cancel()
            ending.cancel()


def listeners_of(first: socket.socket, count: int) -> list[socket.socket]:
    """Sockets at the address of a bound one, which is closed: the system deals connections out.

    They stay open here. So while no front is there at all, connections wait for the first that is.
    """
    address = first.getsockname()
    family = first.family
    first.close()
    found = []
    for _ in range(count):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.set_inheritable(True)
        found.append(listener)
    return found


async def serve_by_several(
    launched: Launched, listener: socket.socket, tell_ready: Callable[[], None]
) -> None:
    """Keep ``--api-server-count`` fronts before a started cluster until a signal ends them."""
    config = launched.config
    listeners = listeners_of(listener, config.server.api_server_count)
    keeper = FrontKeeper(
        launched.cluster, launched.model_name, config, launched.defaults, listeners
    )

    async def tell() -> None:
        await keeper.until_up()
        tell_ready()

    telling = asyncio.create_task(tell())
    try:
        await keeper.run()
    finally:
        telling.cancel()
        for one in listeners:
            one.close()
