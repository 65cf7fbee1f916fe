"""KV and weights of a peer on the same host: its granules are mapped once, and copied from."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.engine.memory.pages import Copies, pair_up
from kunserve.transport.bulk import granule_server
from kunserve.transport.bulk.granule_server import GranuleServer, OpenWindow
from kunserve.transport.bulk.movable_memory import Bytes, Mapped, UnitRuns
from kunserve.transport.bulk.mover import BulkMover
from kunserve.transport.bulk.pacing import BulkPacing
from kunserve.transport.bulk.peer_windows import PeerWindows
from kunserve.transport.bulk.sink import BulkSink
from kunserve.transport.bulk.wire import SharedGranules
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.cuda.pages import DevicePages
from tests.conftest import wait_until as eventually
from tests.extras.torch_body.cuda.test_device_memory import MIDDLE, WHOLE, DeviceMemory
from tests.fakecuda.library import FakeCuda
from tests.unit.transport.addresses import FOLDER, fresh_address
from tests.unit.transport.bulk.test_bulk import ended
from tests.unit.transport.bulk_world import entries, piece

PACING = BulkPacing(chunk_timeout_s=30.0, unknown_grace_s=30.0)
ZERO, ONE = InstanceId(0), InstanceId(1)
R = RequestId("r")
BLOCKS = 3


class Watched(DeviceMemory):
    """Counts what is copied out of it to be sent, and into it from elsewhere on the device."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.num_sent_bytes = 0
        self.num_mapped_bytes = 0
        self.before_copy: Callable[[], None] | None = None
        copy = self.arena.pages.copy

        def watch(copies: Copies) -> None:
            if self.before_copy is not None:
                self.before_copy()
            self.num_mapped_bytes += sum(num_bytes for _, _, num_bytes in copies)
            copy(copies)

        self.arena.pages.copy = watch  # type: ignore[method-assign]

    def read_units(self, unit_runs: UnitRuns, into: Bytes) -> None:
        self.num_sent_bytes += into.nbytes
        super().read_units(unit_runs, into)

    def units_at(self, starts: list[int]) -> Bytes:
        """The bytes of blocks of all layers."""
        data = np.empty(len(starts) * 6 * self.unit_bytes, dtype=np.uint8)
        super().read_units([(start, 6) for start in starts], data)
        return data


class World:
    """Two instances of one device."""

    def __init__(self, driver: Driver) -> None:
        self.ours, self.theirs = Watched(driver), Watched(driver)
        self.ours.stamp()
        self.giver = BulkMover(ZERO, fresh_address(), self.ours, pacing=PACING)
        self.taker = BulkMover(ONE, fresh_address(), self.theirs, pacing=PACING)
        self.taker.connect({ZERO: self.giver.address})

    def pull(self, name: str = "r", at_source: tuple[int, ...] = (0, 12, 6)) -> None:
        """One request comes whole and right."""
        self.giver.export_kv(RequestId(name), entries(*at_source))
        self.taker.pull_kv(piece(name, 0, (0, 6), (0, BLOCKS)), entries(18, 0, 6))
        assert [done.refusal for done in ended(self.taker, 1)] == [None]
        want = self.ours.units_at(list(at_source))
        np.testing.assert_array_equal(self.theirs.units_at([18, 0, 6]), want)

    def open_window(self) -> None:
        """Before anything moves."""
        eventually(lambda: self.taker._peer_files.has_mapped(ZERO))

    def close(self) -> None:
        for one in (self.giver, self.taker):
            one.close()
        for memory in (self.ours, self.theirs):
            memory.close()


def descriptors() -> list[str]:
    """That are open still when they have been listed."""
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


@pytest.fixture
def world(driver: Driver) -> Iterator[World]:
    made = World(driver)
    yield made
    made.close()


def test_granules_are_mapped_once_and_copied_from(
    world: World, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(granule_server, "_AT_ONCE", 3)
    world.open_window()
    world.pull()
    assert world.ours.num_sent_bytes == 0 < world.theirs.num_mapped_bytes
    mappings = fake.left()["mappings"]
    world.pull("another", (6, 0, 18))
    assert fake.left()["mappings"] == mappings, "mapped once"
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors()]
    assert sum("fakecuda" in link for link in links) == fake.left()["memories"], "its own only"


def test_what_has_been_told_of_is_copied_at_once(driver: Driver) -> None:
    """A chunk of another size ends its pull, and no other one's."""
    memory, copies = Watched(driver), list[int]()
    memory.before_copy = lambda: copies.append(memory.num_mapped_bytes)
    sink = BulkSink(memory, BulkPacing(mapped_chunk_bytes=memory.unit_bytes), lambda _: True)
    pieces = [piece(name, 0, (0, 2), (0, 1)) for name in ("bad", "good")]
    for number, what in enumerate(pieces):
        sink.pull_kv(what, entries(6 * number))
    asked = [sink.next_ask(0.0) for _ in range(4)]
    assert None not in asked and sink.next_ask(0.0) is None
    source, num_bytes = memory.kv_base_address + 12 * memory.unit_bytes, memory.unit_bytes
    found = [(number, Mapped([(source, num_bytes)], lambda: True)) for number in range(4)]
    found[0] = 0, Mapped([(source, num_bytes - 1)], lambda: True)
    sink.on_mapped([*found, (99, found[1][1])])
    sink.check()
    assert [(done.what, done.ok) for done in sink.drain()] == [
        (pieces[0], False),
        (pieces[1], True),
    ]
    assert len(copies) == 1 and memory.num_mapped_bytes == 3 * num_bytes
    memory.close()


def test_weights_come_the_same_way_into_what_was_dropped(world: World) -> None:
    """The giver's granules have changed their places, too, since they were mapped."""
    world.open_window()
    for memory in (world.ours, world.theirs):
        memory.drop(MIDDLE)
    world.theirs.reclaim(LayerRange(1, 2))
    world.ours.reclaim(WHOLE)
    for layer in range(6):
        world.ours.write_layer(layer, 0, np.full(world.ours.layer_bytes, layer + 1, np.uint8))
    world.giver.offer_layers(WHOLE)
    world.taker.pull_layers(LayerRange(1, 2), ZERO)
    assert [done.refusal for done in ended(world.taker, 1)] == [None]
    assert world.theirs.num_mapped_bytes >= world.theirs.layer_bytes
    data = np.empty(world.theirs.layer_bytes, np.uint8)
    world.theirs.read_layer(1, 0, data)
    assert (data == 2).all()


def test_units_of_another_request_by_now_are_asked_for_again(world: World) -> None:
    world.open_window()
    later = entries(12, 18, 0)

    def use_again() -> None:
        world.theirs.before_copy = None
        world.giver.export_kv(R, later)
        units = [(0, 6), (12, 6), (6, 6)]
        world.ours.write_units(units[2:], np.full(6 * world.ours.unit_bytes, 99, np.uint8))

    world.theirs.before_copy = use_again
    world.giver.export_kv(R, entries(0, 12, 6))
    world.taker.pull_kv(piece("r", 0, (0, 6), (0, BLOCKS)), entries(18, 0, 6))
    assert [done.refusal for done in ended(world.taker, 1)] == [None]
    want = world.ours.units_at(later.tolist())
    np.testing.assert_array_equal(world.theirs.units_at([18, 0, 6]), want)
    assert world.ours.num_sent_bytes > 0, "sent, so that it comes to an end"
    world.ours.num_sent_bytes = 0
    world.pull("next")
    assert world.ours.num_sent_bytes == 0


def test_a_request_withdrawn_while_it_is_copied_is_refused(world: World) -> None:
    world.open_window()
    world.theirs.before_copy = lambda: world.giver.withdraw_kv(R)
    world.giver.export_kv(R, entries(0, 12, 6))
    world.taker.pull_kv(piece("r", 0, (0, 6), (0, BLOCKS)), entries(18, 0, 6))
    assert [done.refusal for done in ended(world.taker, 1)] == ["the source has withdrawn it"]


def test_a_device_that_cannot_export_sends(driver: Driver, fake: FakeCuda) -> None:
    fake.describe(can_export=False)
    world = World(Driver(library=driver._library._name))
    assert world.ours.places.granules is None
    for name in ("one", "two"):
        world.pull(name)
    assert world.theirs.num_mapped_bytes == 0
    world.close()


def test_a_refused_export_or_mapping_is_no_end(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that forbids it, or where two devices cannot reach each other."""

    def refuse(*_: object) -> int:
        raise OSError("refused")

    for owner, name in ((DevicePages, "export"), (Driver, "import_")):
        monkeypatch.setattr(owner, name, refuse)  # before they meet: they map at once
        world = World(driver)
        for request in ("one", "two"):
            world.pull(request)
            eventually(lambda world=world: not world.taker._peer_files._windows.sockets)  # type: ignore[misc]
        assert world.theirs.num_mapped_bytes == 0
        world.close()
        monkeypatch.undo()


def test_whatever_the_driver_refuses_nothing_is_left(
    driver: Driver, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either all is mapped in the end, or nothing is."""
    monkeypatch.setattr(granule_server, "_AT_ONCE", 3)
    giver, taker = (DevicePages(driver, 5 * 4096, 4096) for _ in range(2))
    desk, before = GranuleServer(path_of_a_desk(), giver), fake.left()
    shared = SharedGranules(str(desk.path), 4096, 5)
    outcomes = set()
    for after in range(40):
        windows = PeerWindows(taker)
        fake.refuse(after)
        try:
            windows.spans(ZERO, shared, [(0, 5 * 4096)])
            while windows.is_opening(ZERO):
                desk.turn()
                windows.turn()
            outcomes.add(windows.is_open(ZERO))
        except OSError:
            outcomes.add(None)
        windows.close()
        windows.turn()
        desk.turn()
        fake.refuse_nothing()
        assert fake.left() == before, after
    assert outcomes == {True, False, None}
    desk.close()
    giver.close()
    taker.close()


def test_a_dead_sources_memory_is_let_go_of(driver: Driver, fake: FakeCuda) -> None:
    """Although nobody has told the taker: its successor needs as much."""
    theirs = Watched(driver)
    taker = BulkMover(ONE, fresh_address(), theirs, pacing=PACING)
    own = fake.left()
    address = fresh_address()
    code = f"""
import numpy as np, signal
from kunserve.transport.bulk.mover import BulkMover
from kunserve_extras.torch_body.cuda.driver import Driver
from tests.fakecuda.library import FakeCuda, build
from tests.extras.torch_body.cuda.test_device_memory import DeviceMemory
FakeCuda()
memory = DeviceMemory(Driver(library=build()))
memory.stamp()
mover = BulkMover(0, {address!r}, memory)
mover.export_kv("r", np.arange(3, dtype=np.int32) * 6)
print("ready", flush=True)
signal.pause()
"""
    source = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[4], stdout=subprocess.PIPE
    )
    assert source.stdout is not None and source.stdout.readline() == b"ready\n"
    taker.connect({ZERO: address})
    eventually(lambda: taker._peer_files.has_mapped(ZERO))
    taker.pull_kv(piece("r", 0, (0, 6), (0, BLOCKS)), entries(0, 6, 12))
    assert [done.refusal for done in ended(taker, 1)] == [None]
    assert theirs.num_mapped_bytes == 18 * theirs.unit_bytes
    starts = np.arange(18, dtype=np.uint8).repeat(theirs.unit_bytes)
    np.testing.assert_array_equal(theirs.units_at([0, 6, 12]), starts)
    assert fake.left() != own
    source.send_signal(signal.SIGKILL)
    source.wait()
    source.stdout.close()
    eventually(lambda: fake.left() == own)
    taker.close()
    theirs.close()


class TwoGranules:
    granule_bytes, num_granules = 4096, 2

    def export(self, granule: int) -> int:
        return os.memfd_create(str(granule))

    def open_window(self, granule_bytes: int, num_granules: int) -> "Room":
        return Room()


class Room:
    address, num_granules, most = 0, 0, 9

    def add(self, fd: int) -> None:
        os.fstat(fd)
        self.num_granules += 1

    def close(self) -> None:
        self.num_granules = 0


def path_of_a_desk() -> Path:
    return FOLDER.path / fresh_address().rpartition("/")[2]


def test_strangers_at_the_desk_are_sent_away() -> None:
    desk = GranuleServer(path_of_a_desk(), TwoGranules())
    for words in (b"\x02" + bytes(7), b"\xff" * 8, b"x"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(desk.path))
            stranger.send(words)
            desk.turn()
            assert stranger.recv(1) == b""
            assert len(desk.sockets) == 1
    desk.close()
    assert not desk.path.exists()


def test_a_full_desk_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(granule_server, "_MOST_TAKERS", 1)
    desk = GranuleServer(path_of_a_desk(), TwoGranules())
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for one in (first, second):
            one.connect(str(desk.path))
            desk.turn()
        (taker,) = desk.sockets
        second.send(bytes(8))
        assert not select.select(desk.sockets, [], [], 0.0)[0], "nothing to do, and no wakeup"
        first.close()
        desk.turn()
        assert len(desk.sockets) == 1 and taker not in desk.sockets
        desk.turn()
        assert len(desk.sockets) == 1 and second.recv(1) == b"g"
    desk.close()


def test_a_window_takes_no_more_than_it_was_told() -> None:
    desk, room = GranuleServer(path_of_a_desk(), TwoGranules()), Room()
    before = descriptors()
    window = OpenWindow(str(desk.path), room, 1)
    assert window.turn(), "nothing has come yet"
    desk.turn()
    assert not window.turn() and room.num_granules == 0
    window.end()
    desk.turn()
    assert descriptors() == before
    desk.close()
    with pytest.raises(OSError):
        OpenWindow(str(desk.path), room, 2)


def test_stretches_are_paired_byte_for_byte() -> None:
    assert pair_up([(100, 5), (200, 3)], [(0, 2), (50, 6)]) == [
        (100, 0, 2), (102, 50, 3), (200, 53, 3),
    ]  # fmt: skip
    with pytest.raises(AssertionError):
        pair_up([(100, 5)], [(0, 6)])
