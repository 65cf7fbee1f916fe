"""Many fake instances in one process: real agents and real wires to the front, light bodies.

A process for each of a thousand instances takes more memory and start-up work than a small machine
has, and what is to be measured is the front. So one process hosts all of them in one thread. What
an instance says to the front goes through a socket of its own, in the real messages, at the real
rate. What instances say to each other, and the KV that they pull, stays inside the process. A step
ends when its time is over, and computes nothing before that.

    launcher = HostLauncher()
    cluster = await LocalCluster.start(Plan(config), vocab_size=..., fake=..., launcher=launcher)
"""

import asyncio
import heapq
import os
import resource
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import zmq

from kunserve.cluster.processes.launch import InstanceOrder, LocalLauncher
from kunserve.cluster.processes.process_mark import mark_of
from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.state import AgentConfig
from kunserve.control.instance.work import Work
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Alive, Connect, Message, Ready
from kunserve.core.python_command import python_command
from kunserve.core.transfer import KvPull, PeerAddress
from kunserve.transport.wire.channel import InstanceChannel
from kunserve_lab.world.fake_body import FakeBody, FakeModel, fake_spec
from kunserve_lab.world.mover import Pull, WorldMover

_NOWHERE = PeerAddress("hosted", "hosted")
_LENGTH = struct.Struct("<I")
_GOLDEN = 0.6180339887498949
MAX_SOCKETS = 8192
BEAT_S = 2.0
"""As instances beat by default."""
ORDERS_PER_TURN = 8


@dataclass(slots=True)
class _Order:
    """To the process: start an instance, or end it."""

    start: InstanceOrder | None = None
    end: InstanceId | None = None


@dataclass(slots=True)
class _Member:
    agent: InstanceAgent
    body: FakeBody
    mover: WorldMover
    channel: InstanceChannel
    order: InstanceOrder
    step_s: float
    work: Work | None = None
    mail: deque[tuple[Message, Any]] = field(default_factory=deque)
    num_turns: int = 0


class FakeHost:
    """The process's one loop."""

    def __init__(self) -> None:
        self._members: dict[InstanceId, _Member] = {}
        self._by_socket: dict[Any, InstanceId] = {}
        self._due: list[tuple[float, int, str, InstanceId]] = []
        self._number = 0
        self._touched: dict[InstanceId, None] = {}
        self._poller = zmq.Poller()
        self._orders = bytearray()
        os.set_blocking(0, False)
        self._poller.register(0, zmq.POLLIN)

    def run(self) -> None:
        """Until standard input is closed."""
        while True:
            wait_s = 0.05 if not self._due else max(0.0, self._due[0][0] - time.monotonic())
            for source, _ in self._poller.poll(
                0 if self._touched or self._orders else int(wait_s * 1e3)
            ):
                if source == 0:
                    if not self._read_orders():
                        return
                else:
                    self._read_front(self._by_socket[source])
            self._follow_orders()
            self._let_pass(time.monotonic())
            touched, self._touched = self._touched, {}
            for instance_id in touched:
                member = self._members.get(instance_id)
                if member is not None:
                    self._advance(instance_id, member)

    # Orders

    def _read_orders(self) -> bool:
        while True:
            try:
                data = os.read(0, 1 << 20)
            except BlockingIOError:
                break
            if not data:
                return False
            self._orders += data
        return True

    def _follow_orders(self) -> None:
        for _ in range(ORDERS_PER_TURN):
            if len(self._orders) < _LENGTH.size:
                return
            (size,) = _LENGTH.unpack_from(self._orders)
            if len(self._orders) < _LENGTH.size + size:
                return
            data = bytes(self._orders[_LENGTH.size : _LENGTH.size + size])
            del self._orders[: _LENGTH.size + size]
            order = msgspec.json.decode(data, type=_Order)
            if order.start is not None:
                self._start(order.start)
            elif order.end is not None:
                self._end(order.end)

    def _start(self, order: InstanceOrder) -> None:
        instance_id, config, fake = order.instance_id, order.plan.config, order.fake
        assert fake is not None
        spec = fake_spec(
            instance_id,
            num_layers=fake.num_layers,
            kv_units=fake.kv_blocks * fake.num_layers,
            block_size=config.instance.block_size,
            layer_bytes=fake.layer_bytes,
            granule_bytes=fake.granule_bytes,
        )
        body, mover = FakeBody(spec, FakeModel(fake.num_layers, fake.vocab_size)), WorldMover()
        longest = fake.kv_blocks * config.instance.block_size
        settings = AgentConfig(
            instance_id, config.scheduler, order.plan.measured, frozenset(), longest
        )
        agent = InstanceAgent(settings, body, mover)
        channel = InstanceChannel(order.front_address, instance_id)
        member = _Member(agent, body, mover, channel, order, fake.step_s)
        self._members[instance_id] = member
        (socket,) = channel.poll_sockets
        self._by_socket[socket] = instance_id
        self._poller.register(socket, zmq.POLLIN)
        ready = Ready(replace(spec, place=order.place), _NOWHERE, longest, "hosted fake")
        channel.send(ready)
        offset_s = instance_id * _GOLDEN % 1.0
        now_s = time.monotonic()
        self._at(now_s + config.cluster.report_period_s * offset_s, "report", instance_id)
        self._at(now_s, "beat", instance_id)

    def _end(self, instance_id: InstanceId) -> None:
        member = self._members.pop(instance_id, None)
        if member is not None:
            (socket,) = member.channel.poll_sockets
            self._poller.unregister(socket)
            del self._by_socket[socket]
            member.channel.close()
        sys.stdout.write(f"{instance_id}\n")
        sys.stdout.flush()

    # Time

    def _at(self, time_s: float, what: str, instance_id: InstanceId) -> None:
        self._number += 1
        heapq.heappush(self._due, (time_s, self._number, what, instance_id))

    def _let_pass(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            due_s, _, what, instance_id = heapq.heappop(self._due)
            member = self._members.get(instance_id)
            if member is None:
                continue
            self._touched[instance_id] = None
            cluster = member.order.plan.config.cluster
            if what == "report":
                member.agent.report(now_s)
                self._at(max(now_s, due_s + cluster.report_period_s), what, instance_id)
            elif what == "beat":
                member.num_turns += 1
                member.channel.send(Alive(instance_id, member.num_turns))
                self._at(now_s + BEAT_S, what, instance_id)
            else:
                work, member.work = member.work, None
                assert work is not None
                member.agent.finished(work, work.run(member.body), now_s)

    # What instances do

    def _read_front(self, instance_id: InstanceId) -> None:
        member = self._members[instance_id]
        self._touched[instance_id] = None
        for message in member.channel.receive():
            if not isinstance(message, Connect):
                member.agent.on(message, time.monotonic())

    def _advance(self, instance_id: InstanceId, member: _Member) -> None:
        now_s = time.monotonic()
        while member.mail:
            message, hidden = member.mail.popleft()
            member.agent.on(message, now_s, hidden)
        pulls, member.mover.pulls = member.mover.pulls, []
        for pull in pulls:
            self._complete(member, pull, now_s)
            self._touched[instance_id] = None
        if member.work is None and member.agent.has_ready_work():
            member.work = member.agent.next_work(now_s)
            if member.work is not None:
                self._at(now_s + member.step_s, "step", instance_id)
        for dst, message, hidden in member.agent.drain():
            if dst is None:
                member.channel.send(message)
            elif dst in self._members:
                self._members[dst].mail.append((message, hidden))
                self._touched[dst] = None
        member.agent.drain_preemptions()
        if member.agent.is_stopping:
            self._end(instance_id)

    def _complete(self, member: _Member, pull: Pull, now_s: float) -> None:
        what = pull.what
        if not isinstance(what, KvPull):
            member.body.load_layers(what.layers)
            member.agent.pulled_layers(what.layers, what.src, True, now_s)
            return
        source = self._members.get(what.src)
        ok = source is not None and source.mover.can_give(what)
        if ok and source is not None and pull.entries is not None:
            given = source.mover.given(what)
            member.body.fill_kv(what.layers, pull.entries, source.body, given)
        member.agent.pulled_kv(what, ok, now_s)


class HostedInstance:
    """Implements ``InstanceProcess`` for one instance of a ``FakeHost``."""

    said = b""
    exit_code: int | None = None

    def __init__(self, launcher: "HostLauncher", instance_id: InstanceId, pid: int) -> None:
        self._launcher = launcher
        self._instance_id = instance_id
        self.ended = asyncio.Event()
        self.pid = pid
        self.mark = mark_of(pid) or f"{pid}:gone"

    async def wait(self) -> str:
        """See ``InstanceProcess``."""
        await self.ended.wait()
        return "it ended"

    def kill(self) -> None:
        """End this instance; the others of its process go on."""
        if not self.ended.is_set():
            self._launcher.tell(_Order(end=self._instance_id))

    def follow(self, front_address: str) -> None:
        """See ``InstanceProcess``: its front stays where it is."""


class HostLauncher(LocalLauncher):
    """All instances in one process. None outlives its front."""

    def __init__(self) -> None:
        super().__init__()
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._instances: dict[InstanceId, HostedInstance] = {}
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    async def start(self, order: InstanceOrder) -> HostedInstance:
        """See ``Launcher``."""
        async with self._starting:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    *python_command(),
                    "-m",
                    "benchmarks.fake_host",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
                self._reading = asyncio.create_task(self._read())
        assert self._process is not None and self._process.stdin is not None
        instance = HostedInstance(self, order.instance_id, self._process.pid)
        self._instances[order.instance_id] = instance
        self.tell(_Order(start=order))
        await self._process.stdin.drain()
        return instance

    def tell(self, order: _Order) -> None:
        """Write an order."""
        assert self._process is not None and self._process.stdin is not None
        data = msgspec.json.encode(order)
        self._process.stdin.write(_LENGTH.pack(len(data)) + data)

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._instances[InstanceId(int(line))].ended.set()
        for instance in self._instances.values():
            instance.ended.set()

    async def end(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()
        if self._reading is not None:
            await self._reading


def host() -> None:
    """The process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    zmq.Context.instance().set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    FakeHost().run()


if __name__ == "__main__":
    host()
