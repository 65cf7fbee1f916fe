"""Bulk that is read in the source's memory file instead of being sent."""

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import LayerPull
from kunserve.transport.bulk.movable_memory import Extents, InFile, UnitRuns
from kunserve.transport.bulk.mover import BulkMover
from kunserve.transport.bulk.pacing import BulkPacing
from kunserve.transport.bulk.shared_files import Counts, PeerFiles
from kunserve.transport.bulk.wire import Bytes, Located, SharedFile
from tests.unit.transport.addresses import fresh_address
from tests.unit.transport.bulk.test_bulk import ended
from tests.unit.transport.bulk_world import (
    LAYER_BYTES,
    NUM_LAYERS,
    UNIT_BYTES,
    Memory,
    entries,
    piece,
)

PACING = BulkPacing(chunk_bytes=4 * UNIT_BYTES, chunk_timeout_s=30.0, unknown_grace_s=30.0)
ZERO, ONE = InstanceId(0), InstanceId(1)
R, OTHER = RequestId("r"), RequestId("other")


class FileMemory(Memory):
    """A memory that lies in a file, and counts what is copied out of it to be sent."""

    def __init__(self, num_units: int, seed: int | None = None) -> None:
        super().__init__(num_units, seed)
        kv, weights = self.kv, self.weights
        self.fd = os.memfd_create("kunserve-test")
        os.ftruncate(self.fd, kv.nbytes + weights.nbytes)
        whole = np.frombuffer(mmap.mmap(self.fd, kv.nbytes + weights.nbytes), dtype=np.uint8)
        self.kv, self.weights = whole[: kv.nbytes], whole[kv.nbytes :]
        self.kv[:], self.weights[:] = kv, weights
        self.num_read_bytes = 0
        self.places = self
        self.shared_fd, self.granules = self.fd, None

    def locate_units(self, unit_runs: UnitRuns) -> Extents:
        return [(unit * UNIT_BYTES, num * UNIT_BYTES) for unit, num in unit_runs]

    def locate_layer(self, layer: int, offset: int, num_bytes: int) -> Extents:
        return [(self.kv.nbytes + layer * LAYER_BYTES + offset, num_bytes)]

    def read_units(self, unit_runs: UnitRuns, into: Bytes) -> None:
        self.num_read_bytes += into.nbytes
        super().read_units(unit_runs, into)


class World:
    """A source whose memory is a file, and a taker."""

    def __init__(self, pacing: BulkPacing = PACING) -> None:
        self.ours, self.theirs = FileMemory(3000, seed=1), Memory(3000)
        self.giver = BulkMover(ZERO, fresh_address(), self.ours, pacing=pacing)
        self.taker = BulkMover(ONE, fresh_address(), self.theirs, pacing=pacing)
        self.taker.connect({ZERO: self.giver.address})

    def pull_some(self, blocks: int = 4) -> None:
        """One request comes whole and right."""
        at_source, here = entries(*range(0, 60 * blocks, 60)), entries(*range(7, 40 * blocks, 40))
        self.giver.export_kv(R, at_source)
        self.taker.pull_kv(piece("r", 0, (2, 5), (0, blocks)), here)
        assert [done.refusal for done in ended(self.taker, 1)] == [None]
        for source, target in zip(at_source, here, strict=False):
            layers = LayerRange(2, 5)
            got, want = (
                memory.block(int(entry), layers)
                for memory, entry in ((self.theirs, target), (self.ours, source))
            )
            np.testing.assert_array_equal(got, want)

    def close(self) -> None:
        self.giver.close()
        self.taker.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_bytes_are_read_in_the_file_and_not_sent(world: World) -> None:
    world.pull_some()
    assert world.ours.num_read_bytes == 0, "the source has copied nothing"
    assert world.giver.num_bytes_given == 4 * 3 * UNIT_BYTES
    world.giver.offer_layers(LayerRange(0, NUM_LAYERS))
    world.taker.pull_layers(LayerRange(1, 4), ZERO)
    assert [done.ok for done in ended(world.taker, 1)] == [True]
    for layer in range(1, 4):
        np.testing.assert_array_equal(world.theirs.layer_view(layer), world.ours.layer_view(layer))


def test_every_read_waits_for_activations_too() -> None:
    size = 3 * UNIT_BYTES
    pacing = BulkPacing(chunk_bytes=size, read_chunk_bytes=size, max_yield_s=0.01)
    world = World(pacing)
    world.giver.yield_to(lambda: True)
    at_source = entries(*range(0, 600, 60))
    world.giver.export_kv(R, at_source)
    began_s = time.monotonic()
    world.taker.pull_kv(piece("r", 0, (2, 5), (0, 10)), at_source)
    (done,) = ended(world.taker, 1)
    assert done.ok and time.monotonic() - began_s >= 10 * 0.01 * 0.9
    assert world.ours.num_read_bytes == 0
    world.close()


def test_a_link_of_limited_rate_carries_the_bytes() -> None:
    world = World(replace(PACING, link_gbps=10.0))
    world.pull_some()
    assert world.ours.num_read_bytes == 4 * 3 * UNIT_BYTES
    world.close()


def test_what_cannot_be_opened_is_sent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedFile, "opened", lambda *_: nullcontext(None))
    world.pull_some()
    assert world.ours.num_read_bytes == 4 * 3 * UNIT_BYTES
    monkeypatch.undo()
    world.pull_some()
    assert world.ours.num_read_bytes == 2 * 4 * 3 * UNIT_BYTES, "refused once is refused"


def test_a_file_that_was_cut_is_not_believed(world: World) -> None:
    world.giver.export_kv(R, entries(0))
    os.ftruncate(world.ours.fd, mmap.PAGESIZE)
    world.ours.kv = np.full(3000 * UNIT_BYTES, 9, np.uint8)
    world.taker.pull_kv(piece("r", 0, (0, 6), (0, 1)), entries(60))
    assert [done.ok for done in ended(world.taker, 1)] == [True]


def test_a_source_that_died_leaves_its_taker_whole(world: World) -> None:
    """Its pulls end as ever, and what its successor gives is read again."""
    world.pull_some()
    world.giver.export_kv(R, entries(0))
    world.giver.close()
    os.close(world.ours.fd)
    world.taker.pull_kv(piece("r", 0, (0, 6), (0, 1)), entries(60))
    world.taker.connect({})
    assert [done.refusal for done in ended(world.taker, 1)] == ["the source is gone"]
    successor = World()
    world.taker.connect({ZERO: successor.giver.address})
    successor.giver.export_kv(R, entries(0))
    world.taker.pull_kv(piece("r", 0, (0, 6), (0, 1), transition=2), entries(90))
    assert [done.ok for done in ended(world.taker, 1)] == [True]
    np.testing.assert_array_equal(
        world.theirs.block(90, LayerRange(0, 6)), successor.ours.block(0, LayerRange(0, 6))
    )
    assert successor.ours.num_read_bytes == 0
    successor.close()


def read(files: PeerFiles, where: Located, src: InstanceId = ZERO) -> Bytes | None:
    """What a taker finds there; None if it is to be sent."""
    with files.find(src, where) as found:
        if found is None:
            return None
        assert isinstance(found, InFile)
        data = np.zeros(found.nbytes, np.uint8)
        cut = len(data) // 3
        found.fill([data[:cut], data[cut:]])
        return data if found.holds() else None


def located(memory: FileMemory, counts: Counts, *extents: tuple[int, int]) -> Located:
    return Located(SharedFile.of(memory.fd), counts.file, counts.of(R), extents)


def test_what_was_withdrawn_meanwhile_is_asked_for_again() -> None:
    memory, counts, files = FileMemory(10, seed=3), Counts(), PeerFiles()
    where = located(memory, counts, (0, 100), (300, 50))
    data = read(files, where)
    assert data is not None
    np.testing.assert_array_equal(data, np.concatenate((memory.kv[:100], memory.kv[300:350])))
    counts.add(OTHER)
    counts.add(None)
    assert read(files, where) is not None, "others were withdrawn"
    counts.add(R)
    assert read(files, where) is None, "its bytes may be another request's"
    assert not files.may_read(ZERO), "so that it comes to an end"
    files.got_bytes(ZERO)
    assert files.may_read(ZERO)
    assert read(files, located(memory, counts, (0, 100))) is not None
    counts.close()


def test_nothing_stays_open_that_would_keep_a_dead_sources_memory() -> None:
    memory, counts, files = FileMemory(10, seed=3), Counts(), PeerFiles()
    for wrong in ({}, {"inode": 0}):
        where = located(memory, counts, (0, 100))
        where = msgspec.structs.replace(
            where, memory=msgspec.structs.replace(where.memory, **wrong)
        )
        before = sorted(os.listdir("/proc/self/fd"))
        read(files, where)
        assert sorted(os.listdir("/proc/self/fd")) == before
    counts.close()


def test_a_file_that_is_not_the_one_named_is_not_read() -> None:
    memory, counts, files = FileMemory(10, seed=3), Counts(), PeerFiles()
    true = located(memory, counts, (0, 100))
    other = msgspec.structs.replace(true.memory, inode=true.memory.inode + 1)
    gone = msgspec.structs.replace(true.memory, fd=1 << 20)
    for number, wrong in enumerate((other, gone)):
        src = InstanceId(number)
        assert read(files, msgspec.structs.replace(true, memory=wrong), src) is None
        assert not files.may_read(src)
        files.lose(src)
        assert files.may_read(src), "another process may be there now"
        assert read(files, true, src) is not None
    counts.close()


def test_places_are_void_before_a_withdrawal_returns(world: World) -> None:
    counts = world.giver._counts
    world.giver.export_kv(R, entries(0))
    for what, change in (
        (R, lambda: world.giver.export_kv(R, entries(60))),
        (R, lambda: world.giver.withdraw_kv(R)),
        (None, lambda: world.giver.offer_layers(LayerRange(0, 2))),
        (None, lambda: world.giver.offer_layers(None)),
    ):
        before = counts.of(what)
        change()
        assert counts.of(what) > before
    world.giver.export_kv(R, entries(0))
    before = counts.of(R)
    world.giver.reset()
    assert counts.of(R) > before


def test_whoever_was_moved_keeps_nobody_from_reading_the_rest(world: World) -> None:
    """As in an exchange: each request is withdrawn when its taker has all of it."""
    num_requests, num_blocks = 40, 2
    names = [f"r{number}" for number in range(num_requests)]
    for number, name in enumerate(names):
        first = number * 12
        world.giver.export_kv(RequestId(name), entries(first, first + 6))
        world.taker.pull_kv(piece(name, 0, (0, 6), (0, num_blocks)), entries(first, first + 6))
    moved = 0
    while moved < num_requests:
        for done in ended(world.taker, 1):
            assert done.ok and not isinstance(done.what, LayerPull)
            world.giver.withdraw_kv(done.what.request_id)
            moved += 1
    assert world.ours.num_read_bytes == 0, "nothing had to be sent"
    np.testing.assert_array_equal(
        world.theirs.kv[: 480 * UNIT_BYTES], world.ours.kv[: 480 * UNIT_BYTES]
    )
