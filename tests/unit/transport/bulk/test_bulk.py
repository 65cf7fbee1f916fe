"""Whole movers over loopback sockets, each with its thread."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq

from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import LayerPull
from kunserve.transport.bulk.mover import BulkMover
from kunserve.transport.bulk.pacing import BulkPacing
from kunserve.transport.bulk.sink import Pulled
from kunserve.transport.bulk.wire import Bytes, KvChunk, encode
from kunserve.transport.wire import identity
from kunserve.transport.wire.sockets import address_of, bind_router, connect_dealer
from tests.unit.transport.addresses import fresh_address
from tests.unit.transport.bulk_world import (
    LAYER_BYTES,
    NUM_LAYERS,
    UNIT_BYTES,
    Memory,
    entries,
    piece,
)

PACING = BulkPacing(chunk_bytes=4 * UNIT_BYTES, chunk_timeout_s=5.0, unknown_grace_s=5.0)
ZERO, ONE = InstanceId(0), InstanceId(1)
R = RequestId("r")


class World:
    """Two instances that know each other."""

    def __init__(self, pacing: BulkPacing = PACING) -> None:
        self.memories = [Memory(3000, seed=1), Memory(3000)]
        self.movers = [
            BulkMover(InstanceId(i), fresh_address(), memory, pacing=pacing)
            for i, memory in enumerate(self.memories)
        ]
        self.connect()

    def connect(self) -> None:
        addresses = {InstanceId(i): mover.address for i, mover in enumerate(self.movers)}
        for i, mover in enumerate(self.movers):
            mover.connect({peer: a for peer, a in addresses.items() if peer != i})

    def close(self) -> None:
        for mover in self.movers:
            mover.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def ended(mover: BulkMover, count: int, timeout_s: float = 20.0) -> list[Pulled]:
    """Wait, as an instance's loop does, for pulls to end."""
    poller = zmq.Poller()
    for target in mover.poll_sockets:
        poller.register(target, zmq.POLLIN)
    done: list[Pulled] = []
    deadline = time.monotonic() + timeout_s
    while len(done) < count:
        assert time.monotonic() < deadline, f"{len(done)} of {count} pulls ended"
        poller.poll(1000)
        done += mover.completed()
        mover.check()
    return done


def test_kv_and_weights_arrive_in_place(world: World) -> None:
    giver, taker = world.movers
    ours, theirs = world.memories
    layers = LayerRange(2, 5)
    at_source, here = entries(-2, 90, 41, 7), entries(300, 30, 60, 3)
    giver.export_kv(R, at_source)
    giver.offer_layers(LayerRange(0, NUM_LAYERS))
    pieces = [piece("r", 0, layers, (0, 3)), piece("r", 0, layers, (3, 4))]
    taker.pull_kv(pieces[0], here[:3])
    taker.pull_layers(LayerRange(1, 4), ZERO)
    taker.pull_kv(pieces[1], here[3:])
    done = ended(taker, 3)
    assert all(d.ok for d in done)
    assert done[0].what is pieces[0] and done[2].what is pieces[1]
    assert done[1].what == LayerPull(LayerRange(1, 4), ZERO)
    untouched = theirs.kv.copy()
    for source_entry, entry in zip(at_source, here, strict=True):
        got = theirs.block(int(entry), layers)
        np.testing.assert_array_equal(got, ours.block(int(source_entry), layers))
        start = (int(entry) + layers.first) * UNIT_BYTES
        untouched[start : start + layers.num_layers * UNIT_BYTES] = 0
    assert not untouched.any(), "nothing else was written"
    for layer in range(NUM_LAYERS):
        want = ours.layer_view(layer) if 1 <= layer < 4 else 0
        np.testing.assert_array_equal(theirs.layer_view(layer), want)
    assert giver.num_bytes_given == taker.num_bytes_taken > 0


def test_an_exchange_both_ways_of_many_requests(world: World) -> None:
    zero, one = world.movers
    lower, upper = LayerRange(0, 3), LayerRange(3, 6)
    want = [world.memories[0].block(60 * i, upper).copy() for i in range(20)]
    world.memories[1].kv[:] = np.arange(world.memories[1].kv.size) % 251
    back = [world.memories[1].block(60 * i + 30, lower).copy() for i in range(20)]
    for i in range(20):
        zero.export_kv(RequestId(f"a{i}"), entries(60 * i))
        one.export_kv(RequestId(f"b{i}"), entries(60 * i + 30))
        one.pull_kv(piece(f"a{i}", 0, tuple(upper), (0, 1)), entries(60 * i))
        zero.pull_kv(piece(f"b{i}", 1, tuple(lower), (0, 1)), entries(60 * i + 30))
    names = [d.what.request_id for d in ended(one, 20) if not isinstance(d.what, LayerPull)]
    assert names == [f"a{i}" for i in range(20)], "in the order asked"
    ended(zero, 20)
    for i in range(20):
        np.testing.assert_array_equal(world.memories[1].block(60 * i, upper), want[i])
        np.testing.assert_array_equal(world.memories[0].block(60 * i + 30, lower), back[i])


def test_a_source_that_is_late(world: World) -> None:
    giver, taker = world.movers
    taker.pull_kv(piece("r", 0, (0, 6), (0, 1)), entries(50))
    taker.pull_kv(piece("s", 0, (0, 6), (0, 1)), entries(60))
    giver.export_kv(RequestId("s"), entries(0))
    assert [d.what.request_id for d in ended(taker, 1)] == ["s"]  # type: ignore[union-attr]
    giver.export_kv(R, entries(0))
    assert [d.ok for d in ended(taker, 1)] == [True]


def test_refusals(world: World) -> None:
    giver, taker = world.movers
    giver.export_kv(R, entries(0))
    taker.pull_kv(piece("r", 0, (0, 6), (0, 1)), entries(50))
    ended(taker, 1)
    giver.withdraw_kv(R)
    taker.pull_kv(piece("r", 0, (0, 6), (0, 1)), entries(60))
    taker.pull_layers(LayerRange(0, 1), ZERO)
    taker.pull_layers(LayerRange(0, 1), InstanceId(9))
    done = ended(taker, 3)
    assert {d.refusal for d in done} == {"the source has withdrawn it", "the source is gone"}
    assert not world.memories[1].weights.any()


def test_a_source_that_dies(world: World) -> None:
    giver, taker = world.movers
    for name in ("r", "s"):
        taker.pull_kv(piece(name, 0, (0, 6), (0, 1)), entries(50))
    giver.close()
    taker.connect({})
    assert [d.refusal for d in ended(taker, 2)] == ["the source is gone"] * 2
    successor = BulkMover(ZERO, fresh_address(), world.memories[0], pacing=PACING)
    successor.export_kv(R, entries(0))
    taker.connect({ZERO: successor.address})
    taker.pull_kv(piece("r", 0, (0, 6), (0, 1), transition=2), entries(50))
    assert [d.ok for d in ended(taker, 1)] == [True]
    successor.close()


def test_a_silent_source() -> None:
    quick = BulkPacing(chunk_timeout_s=0.05)
    taker = BulkMover(ONE, fresh_address(), Memory(100), pacing=quick)
    taker.connect({ZERO: fresh_address()})
    taker.pull_kv(piece("r", 0, (0, 6), (0, 1)), entries(0))
    assert [d.refusal for d in ended(taker, 1)] == ["the source was silent for 0.05 s"]
    taker.close()


def test_after_cancel_or_reset_nothing_is_written(world: World) -> None:
    giver, taker = world.movers
    for name in ("r", "s", "t"):
        giver.export_kv(RequestId(name), entries(*range(0, 600, 6)))
    for forget in (lambda: taker.cancel(R), taker.reset):
        target = entries(*range(0, 600, 6))
        taker.pull_kv(piece("r", 0, (0, 6), (0, 100)), target)
        forget()
        world.memories[1].kv[:] = 0
        taker.pull_kv(piece("s", 0, (0, 6), (0, 100)), target + 1000)
        assert [d.what.request_id for d in ended(taker, 1)] == ["s"]  # type: ignore[union-attr]
        assert not world.memories[1].kv[: 1000 * UNIT_BYTES].any()
    giver.reset()
    taker.pull_kv(piece("t", 0, (0, 6), (0, 1)), entries(0))
    assert [d.ok for d in ended(taker, 1)] == [False]


def test_after_weights_are_called_off_none_are_written(world: World) -> None:
    taker, weights = world.movers[1], world.memories[1].weights
    world.movers[0].offer_layers(LayerRange(0, 6))
    for _ in range(20):
        taker.pull_layers(LayerRange(0, 5), ZERO)
        taker.cancel_layers()
        weights[:] = 0
        taker.pull_layers(LayerRange(5, 6), ZERO)
        assert [d.what for d in ended(taker, 1)] == [LayerPull(LayerRange(5, 6), ZERO)]
        assert not weights[: 5 * LAYER_BYTES].any()


def test_quiet_keeps_the_mover_off_the_memory(world: World) -> None:
    giver, taker = world.movers
    giver.export_kv(R, entries(0))
    with giver.quiet():
        taker.pull_kv(piece("r", 0, (0, 6), (0, 1)), entries(0))
        poller = zmq.Poller()
        poller.register(*taker.poll_sockets, zmq.POLLIN)
        assert poller.poll(50) == []
        giver.withdraw_kv(R)
        giver.export_kv(R, entries(6))
    ended(taker, 1)
    layers = LayerRange(0, 6)
    np.testing.assert_array_equal(
        world.memories[1].block(0, layers), world.memories[0].block(6, layers)
    )


def test_the_link_rate_holds() -> None:
    """1,000 units of 96 bytes at 1.6 MB/s take 60 ms."""
    world = World(BulkPacing(chunk_bytes=40 * UNIT_BYTES, link_gbps=0.0128))
    giver, taker = world.movers
    giver.export_kv(R, entries(*range(0, 1000, 5)))
    began_s = time.monotonic()
    taker.pull_kv(piece("r", 0, (0, 5), (0, 200)), entries(*range(0, 1000, 5)))
    (done,) = ended(taker, 1)
    assert done.ok and time.monotonic() - began_s > 0.045
    world.close()


def test_bulk_waits_for_activations_but_not_for_ever() -> None:
    world = World(BulkPacing(chunk_bytes=6 * UNIT_BYTES, max_yield_s=0.01))
    giver, taker = world.movers
    looked = threading.Event()

    def pending() -> bool:
        looked.set()
        return True

    giver.yield_to(pending)
    giver.export_kv(R, entries(*range(0, 60, 6)))
    began_s = time.monotonic()
    taker.pull_kv(piece("r", 0, (0, 6), (0, 10)), entries(*range(0, 60, 6)))
    (done,) = ended(taker, 1)
    assert done.ok and looked.is_set()
    assert time.monotonic() - began_s >= 10 * 0.01 * 0.9
    world.close()


def test_strangers_get_nothing(world: World, eventually: Callable[..., object]) -> None:
    giver = world.movers[0]
    giver.export_kv(R, entries(0))
    chunk = KvChunk(0, 1, "r", (0, 6), (0, 1), 0, 6)
    for route in (b"somebody", identity.pack(identity.Identity(b"b", ONE, b"12345678")) + b"x"):
        stranger = connect_dealer(giver.address, route)
        stranger.send(encode(chunk))
        eventually(lambda: giver.rejections.num > 0)
        giver.rejections.num = 0
        stranger.close()
    assert giver.num_bytes_given == 0


def test_nonsense_of_a_peer_ends_no_mover(world: World, eventually: Callable[..., object]) -> None:
    giver, taker = world.movers
    liar = connect_dealer(giver.address, identity.pack(identity.Identity(b"b", ONE, b"12345678")))
    for frames in ([b"\xff"], [b""]):
        liar.send_multipart(frames)
        eventually(lambda: giver.rejections.num > 0)
        giver.rejections.num = 0
    liar.close()
    giver.export_kv(R, entries(0))
    taker.pull_kv(piece("r", 0, (0, 6), (0, 1)), entries(0))
    (done,) = ended(taker, 1)
    assert done.ok


def test_nonsense_of_a_source_ends_its_pulls(world: World) -> None:
    taker = world.movers[1]
    liar = bind_router(fresh_address())
    taker.connect({ZERO: world.movers[0].address, InstanceId(2): address_of(liar)})
    taker.pull_kv(piece("r", 2, (0, 6), (0, 1)), entries(0))
    assert liar.poll(5000)
    asker, *_ = liar.recv_multipart()
    liar.send_multipart([asker, b"\xff"])
    (lost,) = ended(taker, 1)
    assert lost.refusal == "the source is gone"
    world.movers[0].export_kv(R, entries(0))
    taker.pull_kv(piece("r", 0, (0, 6), (0, 1)), entries(0))
    (done,) = ended(taker, 1)
    assert done.ok
    liar.close()


def test_a_dead_thread_is_told(world: World) -> None:
    giver, taker = world.movers

    def fail() -> bool:
        raise OSError("no more of it")

    giver.yield_to(fail)
    giver.export_kv(R, entries(0))
    taker.pull_kv(piece("r", 0, (0, 6), (0, 1)), entries(0))
    poller = zmq.Poller()
    poller.register(*giver.poll_sockets, zmq.POLLIN)
    assert poller.poll(5000)
    with pytest.raises(RuntimeError, match="died"):
        giver.completed()


def test_memory_is_never_touched_outside_the_lock(world: World) -> None:
    """Views are taken by the bulk thread only while it holds the lock that ``quiet`` takes."""
    taker = world.movers[1]
    is_quiet = threading.Event()
    touched: list[str] = []

    class Watched(Memory):
        def unit_view(self, unit: int, num_units: int) -> Bytes:
            if is_quiet.is_set():
                touched.append("unit")
            return super().unit_view(unit, num_units)

    watched = BulkMover(InstanceId(2), fresh_address(), Watched(3000, seed=2), pacing=PACING)
    watched.export_kv(R, entries(*range(0, 600, 6)))
    taker.connect({InstanceId(2): watched.address})
    taker.pull_kv(piece("r", 2, (0, 6), (0, 100)), entries(*range(0, 600, 6)))
    while not taker.completed():
        with watched.quiet():
            is_quiet.set()
            taker.check()
            is_quiet.clear()
    assert touched == []
    watched.close()


def test_closing_at_once_does_not_hang() -> None:
    for _ in range(30):
        mover = BulkMover(ZERO, fresh_address(), Memory(10))
        mover.close()
        mover.close()
