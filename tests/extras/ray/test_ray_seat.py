"""The seat of a front over Ray: one front at a time, and the next one on any node."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kunserve.cluster.driver.local import LocalCluster
from kunserve.core.config import ServerConfig
from kunserve.core.errors import ConfigError
from kunserve.core.plan import Plan
from kunserve.transport.wire.network import Keys, new_keys
from kunserve_extras.ray import seat_book
from kunserve_extras.ray.seat_book import KEPT_S, SILENT_S, Holder, SeatBook
from tests.extras.ray.fake_ray import FakeRay, Node, installed
from tests.running.live_cluster import FAKE, Client, config, until

A, B = (Holder(name, f"host {name}", f"realm {name}", "1:1") for name in "ab")


class Book:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_left = 0
        self.book = SeatBook(self._leave, lambda: self.now_s)

    def _leave(self) -> None:
        self.num_left += 1

    async def holder_after(self, who: Holder, dead: str | None = None) -> str:
        return (await self.book.take(who, 30.0, dead)).holder.token


def test_the_seat_is_one_front_s_until_it_is_silent() -> None:
    async def story() -> None:
        told = Book()
        assert await told.holder_after(A) == "a"
        await told.book.write("a", b"state")
        told.now_s += SILENT_S
        assert await told.holder_after(B) == "a"
        assert await told.book.hold("a") == "a"
        told.now_s += SILENT_S
        assert await told.holder_after(B) == "a"
        told.now_s += 0.1
        taken = await told.book.take(B, 30.0)
        assert taken.holder == B and taken.state == b"state"
        assert await told.book.hold("a") == "b", "the first one learns that it is none"
        await told.book.write("a", b"of the past")
        await told.book.give_up("a")
        assert (await told.book.take(B, 30.0)).state == b"state" and not told.num_left
        await told.book.give_up("b")
        assert told.num_left == 1

    asyncio.run(story())


def test_whoever_is_seen_to_be_dead_is_replaced_at_once() -> None:
    async def story() -> None:
        told = Book()
        await told.holder_after(A)
        assert await told.holder_after(B, dead="somebody else") == "a"
        assert await told.holder_after(B, dead="a") == "b"

    asyncio.run(story())


def test_a_new_book_knows_nobody() -> None:
    assert asyncio.run(Book().book.hold("a")) is None


def test_a_book_that_everybody_has_forgotten_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        told = Book()
        await told.holder_after(A)
        await asyncio.sleep(0)
        assert not told.num_left
        told.now_s += 30.0 + KEPT_S
        await until(lambda: told.num_left)

    monkeypatch.setattr(seat_book, "LOOK_S", 0.001)
    asyncio.run(story())


def test_a_process_is_seen_to_be_dead_where_its_number_is_seen() -> None:
    me = Holder.me("x", "here")
    assert not me.is_dead_for(me)
    assert replace(me, mark=f"{os.getpid()}:1").is_dead_for(me)
    assert not replace(me, realm="elsewhere", mark=f"{os.getpid()}:1").is_dead_for(me)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    nodes = (Node("127.0.0.1", {"CPU": 2.0}), Node("127.0.0.2", {"CPU": 2.0}))
    with installed(FakeRay(*nodes), monkeypatch) as fake:
        yield fake


async def begin(folder: Path, num_instances: int = 2, **settings: Any) -> LocalCluster:
    from kunserve_extras.ray.launcher import RayLauncher
    from kunserve_extras.ray.session import Session

    return await LocalCluster.start(
        Plan(config(num_instances, **settings)),
        vocab_size=FAKE.vocab_size,
        fake=FAKE,
        launcher=RayLauncher(Session(None), is_detached=True, name="llm"),
        run_folder=folder,
    )


async def vanish(cluster: LocalCluster) -> None:
    """All that a front's death is to others: it says nothing any more."""
    seat: Any = cluster._succession and cluster._succession._seat
    seat._holding.cancel()
    await cluster._background.close()
    await cluster._channel.close()


def test_a_front_comes_back_on_another_host(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kunserve_extras.ray import seat

    monkeypatch.setattr(seat, "HOLD_S", 0.05)
    monkeypatch.setattr("kunserve_extras.ray.seat_book.SILENT_S", 0.2)

    async def story() -> None:
        first = await begin(tmp_path)
        client = Client(first)
        client.submit("early", max_tokens=2000)
        await client.all_flow()
        assert "groups=1+1->2" in await first.drop(None)
        pids, address = first.vitals().pids, first._channel.address
        await vanish(first)
        ray.front_ip = "127.0.0.2"  # loopback has many addresses
        second = await begin(tmp_path)
        assert second.vitals().pids == pids and second._channel.address != address
        assert "127.0.0.2" in second._channel.address
        client = Client(second)
        for i in range(3):
            client.submit(f"late {i}", max_tokens=60)
        await client.all_done()
        assert [len(group.stages) for group in second.state().groups] == [2]
        await until(lambda: not sum(load.used_blocks for load in second.state().loads))
        assert not second.vitals().num_errors
        await vanish(second)
        ray.front_ip = "127.0.0.1"
        third = await begin(tmp_path, heartbeat_timeout_s=11.0)
        assert not set(third.vitals().pids) & set(pids), "of other settings"
        await third.close()

    asyncio.run(story())
    assert not ray.living


def test_nothing_secret_goes_through_ray(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its channels are in clear unless Ray itself has TLS: they see public keys only."""
    from kunserve_extras.ray import seat

    monkeypatch.setattr(seat, "HOLD_S", 0.05)
    pairs: list[Keys] = []

    def noted() -> Keys:
        pairs.append(new_keys())
        return pairs[-1]

    monkeypatch.setattr("kunserve.cluster.processes.front_wires.new_keys", noted)
    monkeypatch.setattr("kunserve_extras.ray.node_agent.new_keys", noted)

    async def story() -> None:
        from kunserve_extras.ray.launcher import RayLauncher
        from kunserve_extras.ray.session import Session

        settings = replace(config(2), server=ServerConfig(api_key="sesame"))
        cluster = await LocalCluster.start(
            Plan(settings),
            vocab_size=FAKE.vocab_size,
            fake=FAKE,
            launcher=RayLauncher(Session(None), is_detached=True, name="llm"),
            run_folder=tmp_path,
        )
        client = Client(cluster)
        for i in range(3):
            client.submit(f"r{i}", max_tokens=20)
        await cluster.drop(None)  # instances believe each other's keys, too
        await client.all_done()
        await cluster.close()

    asyncio.run(story())
    carried = repr(ray.carried)
    assert {"begin", "take", "write"} <= {name for name, _ in ray.carried}
    assert len(pairs) >= 5 and any(pair.public in carried for pair in pairs)
    assert not any(pair.secret in carried for pair in pairs)
    assert "sesame" not in carried
    assert not ray.living


def test_two_fronts_of_one_name(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kunserve_extras.ray import seat

    monkeypatch.setattr(seat, "HOLD_S", 0.02)
    monkeypatch.setattr(seat, "SILENT_S", 0.1)

    async def story() -> None:
        first = await begin(tmp_path, 1)
        ray.front_ip = "127.0.0.2"
        # 1.0: how much longer than a silence the second one tries
        with pytest.raises(ConfigError, match=r"'llm' runs in this Ray cluster already, .*0\.0\.1"):
            await begin(tmp_path, 1)
        assert len(ray.living) == 1 + 1 and not first.vitals().num_errors
        await first.close()

    asyncio.run(story())
    assert not ray.living


def test_a_front_whose_seat_is_taken_is_told(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    from kunserve_extras.ray import seat

    monkeypatch.setattr(seat, "HOLD_S", 0.02)
    monkeypatch.setattr("kunserve_extras.ray.seat_book.SILENT_S", -1.0)
    told: list[str] = []

    async def story() -> None:
        first = await seat.RaySeat.take("llm", "a", 30.0, lambda: told.append("first"))
        second = await seat.RaySeat.take("llm", "b", 30.0, lambda: told.append("second"))
        await until(lambda: told)
        first.remove()
        assert ray.living, "a front that has lost the seat removes nothing"
        second.remove()

    asyncio.run(story())
    assert told == ["first"] and not ray.living


def test_a_seat_is_held_whatever_ray_raises(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kunserve_extras.ray import seat

    monkeypatch.setattr(seat, "HOLD_S", 0.01)
    told: list[str] = []
    awaited = seat.awaited
    num_asked = 0

    async def refused(answer: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        if 2 < num_asked < 6:
            raise ValueError("the actor's name is another one's")
        return await awaited(answer)

    monkeypatch.setattr(seat, "awaited", refused)

    async def story() -> None:
        await seat.RaySeat.take("llm", "a", 30.0, lambda: told.append("first"))
        await until(lambda: num_asked > 8)
        monkeypatch.setattr("kunserve_extras.ray.seat_book.SILENT_S", -1.0)
        second = await seat.RaySeat.take("llm", "b", 30.0, lambda: told.append("second"))
        await until(lambda: told)
        second.remove()

    asyncio.run(story())
    assert told == ["first"], "it has gone on to ask"
    assert "the seat cannot be asked count=2" in caplog.text


def test_a_seat_that_is_lost_is_made_again(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    from kunserve_extras.ray import seat

    monkeypatch.setattr(seat, "HOLD_S", 0.02)

    async def story() -> None:
        first = await seat.RaySeat.take("llm", "a", 30.0)
        first._state = b"what it has left"
        ray.actors[0].die()
        await until(lambda: ray.living and ray.living[0].body._state)
        assert ray.living[0].body._state == b"what it has left"
        first.remove()

    asyncio.run(story())
