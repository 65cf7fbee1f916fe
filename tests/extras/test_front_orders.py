"""What a front may ask of the controller's process: each order arrives as it was given."""

import asyncio
from typing import Any

import pytest

from kunserve.core.errors import InvalidRequest
from kunserve.core.ids import InstanceId
from kunserve_extras.fronts.front_service import FrontService
from kunserve_extras.fronts.remote import RemoteEngine
from kunserve_extras.fronts.wire import Answer, Link


class Pipe:
    """A transport whose other end is a link."""

    def __init__(self) -> None:
        self.other: Link[Any] | None = None

    def write(self, frame: bytes) -> None:
        assert self.other is not None
        asyncio.get_running_loop().call_soon(self.other.data_received, frame)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None:
        pass


class Cluster:
    """Writes down what is asked of it, as the engine and as the accounts."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []

    def __getattr__(self, name: str) -> Any:
        async def asked(argument: object = None) -> str:
            self.asked.append((name, argument))
            if argument == -1:
                raise InvalidRequest("there are no fewer than none")
            return name

        return asked

    def set_paused(self, paused: bool) -> None:
        self.asked.append(("set_paused", paused))

    async def metrics(self) -> bytes:
        return b"m 1"

    def timeline_view(self, since_s: float | None) -> bytes:
        return f"since {since_s}".encode()

    def news(self) -> Answer:
        return Answer(-1, None)  # some word that nobody waits for


def joined(cluster: Cluster) -> RemoteEngine:
    """A front's engine, whose orders go to a desk before the cluster."""
    remote = RemoteEngine(lambda: None, lambda: None)
    desk = FrontService(1, cluster, cluster, lambda: None)  # type: ignore[arg-type]
    link: Link[Any] = Link(remote.hear, lambda: None)
    there, back = Pipe(), Pipe()
    there.other, back.other = desk.link, link
    link.connection_made(there)  # type: ignore[arg-type]
    desk.link.connection_made(back)  # type: ignore[arg-type]
    remote.use(link)
    return remote


def test_every_order_is_carried_out_as_it_was_given() -> None:
    cluster = Cluster()

    async def story() -> list[object]:
        remote = joined(cluster)
        remote.set_paused(True)
        return [
            await remote.drop(None),
            await remote.drop(1 << 40),
            await remote.restore(),
            await remote.scale(3),
            await remote.reset_prefix_cache(),
            await remote.kill(InstanceId(2)),
            await remote.metrics(),
            await remote.timeline(None),
            await remote.timeline(0.5),
        ]

    answers = asyncio.run(story())
    assert cluster.asked == [
        ("set_paused", True),
        ("drop", None),
        ("drop", 1 << 40),
        ("restore", None),
        ("scale", 3),
        ("reset_prefix_cache", None),
        ("kill", 2),
    ]
    assert answers[:4] == ["drop", "drop", "restore", "scale"]
    assert answers[4:] == [None, None, b"m 1", b"since None", b"since 0.5"]


def test_what_an_order_is_refused_with_comes_back() -> None:
    async def story() -> None:
        await joined(Cluster()).scale(-1)

    with pytest.raises(InvalidRequest, match="no fewer than none"):
        asyncio.run(story())
