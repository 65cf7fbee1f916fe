"""Several HTTP fronts before one controller, through deaths of all three kinds of processes.

The real ends of the links between fronts and controller, over byte streams that are cut anywhere;
behind them the real controller and instances' brains. Whatever dies, a client whose front and whose
controller live gets its own tokens, each once, and nothing is left of any other request.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.cluster.api import Vitals
from kunserve.control.cluster.commands import Client
from kunserve.core.errors import Overloaded
from kunserve.core.ids import RequestId
from kunserve.core.request import Request
from kunserve_extras.fronts.front_service import FrontService
from kunserve_extras.fronts.remote import RemoteEngine
from kunserve_extras.fronts.wire import FromController, Link
from kunserve_lab.world.account import Account
from kunserve_lab.world.actions import Action
from tests.chaos_cluster import ChaosCluster, play
from tests.chaos_events import Happening, Harm, Setting
from tests.chaos_schedules import by_hand, by_monitor, lives
from tests.property.cluster.test_lasting_faults import BY_ORDER, NUM_LIVES

NUM_FRONTS = 3
REFUSED = 13
"""The controller refuses each request whose number has this remainder."""


class Stream(asyncio.Transport):
    """One direction of a link: bytes on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = bytearray()
        self.reader: Link[Any]
        self.other: Stream
        self._is_closing = False

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return len(self.waiting)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.waiting += data

    def pump(self, num_bytes: int) -> None:
        """So many bytes come."""
        data = bytes(self.waiting[:num_bytes])
        del self.waiting[:num_bytes]
        if data:
            self.reader.data_received(data)

    def end(self) -> None:
        """The reader learns that the writer is gone."""
        self._is_closing = True
        self.other._is_closing = True
        self.reader.connection_lost(None)


class Pair(NamedTuple):
    """An HTTP front and the controller's end of it."""

    remote: RemoteEngine
    service: FrontService
    up: Stream
    """To the controller."""
    down: Stream


class FrontsCluster(ChaosCluster):
    """Chaos whose clients speak to one of several fronts."""

    def __init__(self, setting: Setting, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_inside = False
        self._draw = random.Random(0)
        self.pairs: list[Pair] = []
        self.front_of: dict[RequestId, Pair] = {}
        self.refused: set[RequestId] = set()
        self._asked: dict[RequestId, Client] = {}
        super().__init__(setting)
        self.pairs = [self.open() for _ in range(NUM_FRONTS)]

    def inside(self, call: Callable[[], None]) -> None:
        """Call something in the event loop, and what it has left for later."""
        if self._is_inside:
            call()
            return

        async def turn() -> None:
            call()
            await asyncio.sleep(0)

        self._is_inside = True
        try:
            self._loop.run_until_complete(turn())
        finally:
            self._is_inside = False

    def open(self) -> Pair:
        """A front starts."""
        pairs: list[Pair] = []

        def begin() -> None:
            remote = RemoteEngine(lambda: None, lambda: None)
            link: Link[FromController] = Link(remote.hear, remote.end)
            service = FrontService(0, Engine(self), None, lambda: None)  # type: ignore[arg-type]
            up, down = Stream(), Stream()
            up.reader, up.other, down.reader, down.other = service.link, down, link, up
            link.connection_made(up)
            service.link.connection_made(down)
            remote.use(link)
            pairs.append(Pair(remote, service, up, down))

        self.inside(begin)
        return pairs[0]

    # Clients

    def submit(self, request: Request) -> None:
        """A client asks one of the fronts."""
        request_id = request.request_id
        pair = self.pairs[self._draw.randrange(len(self.pairs))]
        account = self.accounts[request_id] = Account(request)
        self.front_of[request_id] = pair
        self.inside(lambda: pair.remote.submit(request, account.take))

    def take_in(self, request: Request, deliver: Client) -> None:
        """The controller has read of it."""
        if int(request.request_id[1:]) % REFUSED == REFUSED - 1:
            self.refused.add(request.request_id)
            self.accounts[request.request_id].is_cancelled = True
            raise Overloaded("full", 1)
        self._asked[request.request_id] = deliver
        super().submit(request)

    def client_of(self, request: Request) -> Client:
        deliver = self._asked[request.request_id]
        return lambda token: self.inside(lambda: deliver(token))

    def cancel(self, request_id: RequestId) -> None:
        """A client goes away."""
        self.accounts[request_id].is_cancelled = True
        self.inside(lambda: self.front_of[request_id].remote.abort(request_id))

    # Bytes

    def pump(self) -> None:
        """Some bytes come, on some stream."""
        streams = [one for pair in self.pairs for one in (pair.up, pair.down) if one.waiting]
        if streams:
            stream = self._draw.choice(streams)
            num_bytes = self._draw.choice([1, 7, 300, 1 << 20])
            self.inside(lambda: stream.pump(num_bytes))

    def perform(self, action: Action) -> None:
        if self._draw.random() < 0.5:
            self.pump()
        super().perform(action)

    def pass_time(self, seconds: float) -> None:
        for pair in self.pairs:
            for stream in (pair.up, pair.down):
                self.inside(lambda stream=stream: stream.pump(1 << 20))  # type: ignore[misc]
        super().pass_time(seconds)

    # Deaths

    def harm(self, kind: str, which: int) -> None:
        if kind == "http front":
            self.lose_http_front(which % len(self.pairs), comes=bool(which % 2))
            return
        super().harm(kind, which)

    def lose_http_front(self, number: int, *, comes: bool) -> None:
        """A front dies. What it has said comes, or is lost with it; another takes its place."""
        pair = self.pairs[number]
        for request_id, front in self.front_of.items():
            account = self.accounts[request_id]
            if front is pair and account.end is None:
                account.is_cancelled = True

        def end() -> None:
            if comes:
                pair.up.pump(1 << 20)
            pair.up.end()

        self.inside(end)
        self.pairs[number] = self.open()

    def restart_front(self, **how: Any) -> None:
        """The controller's process dies: no front answers anybody without it."""
        for pair in self.pairs:
            self.inside(pair.down.end)
            assert pair.remote.ended.is_set()
        super().restart_front(**how)
        self.pairs = [self.open() for _ in range(NUM_FRONTS)]

    def check(self) -> None:
        """What the controller has is what its fronts wait for."""
        super().check()
        waiting = sum(pair.service.num_live for pair in self.pairs)
        assert self.controller.num_unfinished == waiting, waiting

    def check_empty(self) -> None:
        super().check_empty()
        assert self.controller.num_unfinished == 0
        assert not any(pair.remote._live or pair.service.num_live for pair in self.pairs)


class Engine:
    """The controller, as its end of a link sees it."""

    def __init__(self, cluster: FrontsCluster) -> None:
        self._cluster = cluster
        self._controller = cluster.controller if hasattr(cluster, "controller") else None

    def submit(self, request: Request, deliver: Client) -> None:
        self._cluster.take_in(request, deliver)

    def abort(self, request_id: RequestId) -> None:
        if self._controller is self._cluster.controller:  # else it has died
            self._cluster.controller.cancel(request_id)
            self._cluster.carry_out()

    def vitals(self) -> Vitals:
        return Vitals(len(self._cluster.members), len(self._cluster.dead), 0)


HARMS = (*BY_ORDER, *["http front"] * 12)


@pytest.mark.timeout(600 + 4 * NUM_LIVES)  # a failure takes minutes to shrink
@settings(max_examples=NUM_LIVES // 2)
@given(st.one_of(by_hand(), by_monitor()), lives(HARMS), st.integers(0, 2**16))
def test_clients_of_living_fronts_get_their_tokens(
    setting: Setting, life: list[Happening], seed: int
) -> None:
    with asyncio.Runner() as runner:
        cluster = FrontsCluster(setting, runner.get_loop())
        cluster._draw.seed(seed)
        play(cluster, life)
        cluster.heal()
        cluster.pass_time(0.1)
        cluster.finish()
        for request_id in cluster.refused:
            assert not cluster.accounts[request_id].token_ids, request_id


def test_a_request_of_a_dead_front_is_nobodys() -> None:
    with asyncio.Runner() as runner:
        cluster = FrontsCluster(Setting(2), runner.get_loop())
        for _ in range(6):
            cluster.request(5, 10)
        for _ in range(200):
            cluster.pump()
        assert cluster.controller.num_unfinished == 6
        cluster.harm("http front", 0)
        left = [i for i, one in cluster.accounts.items() if not one.is_cancelled]
        assert 0 < len(left) < 6
        assert cluster.controller.num_unfinished == len(left)
        play(cluster, [Harm("front", 0)])
        assert cluster.controller.num_unfinished == 0
        cluster.request(5, 10)
        cluster.pass_time(0.1)
        cluster.finish()
        assert [one.end is not None for one in cluster.accounts.values()] == 6 * [False] + [True]
