"""The actor beside one instance: it runs on the node that Ray chose, and owns the process there."""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

import kunserve
from kunserve.cluster.processes.launch import InstanceOrder, LocalProcess
from kunserve.transport.wire.network import FrontPlace, new_keys

IDLE_S = 60.0
"""A warden without a process, that nobody asks for anything, leaves."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a warden is."""

    ip: str
    host: str
    labels: dict[str, str]
    version: str
    """Of KunServe there."""


@dataclass(frozen=True, slots=True)
class Birth:
    """A process that a warden has started."""

    pid: int
    mark: str
    host: str
    public_key: str | None = None
    """Of its pair, whose secret one never leaves the node; None: none are used."""


@dataclass(frozen=True, slots=True)
class End:
    """How it ended; see ``InstanceProcess``."""

    reason: str
    exit_code: int | None
    said: bytes


class NodeAgent:
    """Starts the instance's process as ``LocalLauncher`` does, so that it is the same one anywhere.

    The process dies with the actor: nobody would watch it. Every method is asynchronous, because
    one call waits for the end while others ask.
    """

    def __init__(self, ip: str, labels: dict[str, str], leave: Callable[[], None]) -> None:
        """``leave`` ends the actor."""
        self._site = Site(ip, socket.gethostname(), labels, kunserve.__version__)
        self._leave = leave
        self._process: LocalProcess | None = None
        self._public_key: str | None = None
        self._epoch = 0
        """Of the front that may command it."""
        self._watch: asyncio.Task[None] | None = None

    async def site(self) -> Site:
        """The first question: where the order is to be carried out."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._leave_when_idle())
        return self._site

    async def begin(self, order: bytes, program: Sequence[str] | None) -> Birth:
        """Start the process. Raises OSError when the system refuses."""
        told = msgspec.json.decode(order, type=InstanceOrder)
        # Whatever becomes of the front, the process must not outlive its warden.
        mine = replace(told, parent_pid=os.getpid())
        if mine.network is not None:
            self._public_key, secret_key = new_keys()
            keys = replace(mine.network, public_key=self._public_key, secret_key=secret_key)
            mine = replace(mine, network=keys)
        self._epoch = 0 if told.lease is None else told.lease.epoch
        self._process = LocalProcess(mine, program, tells_moves=True)
        return self._birth(self._process)

    def _birth(self, process: LocalProcess) -> Birth:
        return Birth(process.pid, process.mark, self._site.host, self._public_key)

    async def find(self, epoch: int) -> Birth | None:
        """The process, for a front that did not start it, and that alone may end it from now on.

        None if it has ended.
        """
        self._epoch = max(epoch, self._epoch)
        process = self._process
        return None if process is None or process.exit_code is not None else self._birth(process)

    async def follow(self, front: FrontPlace, epoch: int) -> None:
        """The front of this epoch is called there."""
        if self._process is not None and epoch >= self._epoch:
            self._process.follow(front)

    async def end(self) -> End:
        """Wait for the process's end."""
        assert self._process is not None, "nothing was begun"
        reason = await self._process.wait()
        return End(reason, self._process.exit_code, self._process.said)

    async def kill(self, epoch: int) -> bool:
        """End the process at once; False if that is no longer for this front to say."""
        if epoch < self._epoch:
            return False
        if self._process is not None:
            self._process.kill()
        return True

    async def _leave_when_idle(self) -> None:
        """A front that died has ended no actor; its instances end by themselves, and then this."""
        await asyncio.sleep(IDLE_S)
        if self._process is not None:
            await self._process.wait()
            await asyncio.sleep(IDLE_S)
        self._leave()
