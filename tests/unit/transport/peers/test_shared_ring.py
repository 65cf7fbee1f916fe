"""Messages in shared memory: a ring by itself, and the links that use rings beside sockets."""

import logging
import os
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.ids import GroupId, InstanceId, RequestId, StepId
from kunserve.core.messages import Abort, Activation, Message
from kunserve.core.step import StepPlan
from kunserve.transport.peers import rings as peer_rings
from kunserve.transport.peers import shared_ring
from kunserve.transport.peers.links import LinkFault, PeerLinks, PeerMail
from kunserve.transport.peers.shared_ring import RingReader, RingWriter, SpoiltRing
from kunserve.transport.wire import identity
from kunserve.transport.wire.codec import MalformedMessage
from kunserve.transport.wire.identity import Identity
from kunserve.transport.wire.sockets import connect_dealer
from tests.unit.transport.addresses import fresh_address
from tests.unit.transport.peers.watched_ring import SpoiltMemory, WatchedWriter, watch_writers

ZERO, ONE = InstanceId(0), InstanceId(1)
RING = 1024

pytestmark = pytest.mark.skipif(not shared_ring.keeps_order(), reason="no rings on this processor")


@given(
    st.lists(
        st.one_of(
            st.just("read"),
            st.tuples(st.integers(0, 400), st.one_of(st.none(), st.integers(0, 700))),
        ),
        max_size=60,
    )
)
def test_a_ring_gives_what_was_written_in_order(words: list[str | tuple[int, int | None]]) -> None:
    reader = RingReader(RING)
    writer = RingWriter(reader.fd, RING)
    written: deque[tuple[bytes, bytes | None]] = deque()
    for number, word in enumerate(words):
        if isinstance(word, str):
            record = reader.front()
            if record is None:
                assert not written and not reader.has_more
                continue
            payload = None if record.payload is None else bytes(record.payload)
            assert (bytes(record.data), payload) == written.popleft()
            del record
            reader.pop()
            continue
        data = bytes([number]) * word[0]
        payload = None if word[1] is None else bytes([number ^ 255]) * word[1]
        if writer.write(data, None if payload is None else memoryview(payload)):
            written.append((data, payload))
        else:
            needed = shared_ring.room_of(len(data) + len(payload or b""))
            assert written or needed > RING // 2, "an empty ring takes half of its size at least"
    writer.close()
    reader.close()


def test_small_messages_stay_in_the_first_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_ring, "KEPT_WARM_BYTES", 4096)
    reader = RingReader()
    writer = RingWriter(reader.fd)
    for _ in range(1000):
        assert writer.write(b"x" * 1000, None)
        reader.front()
        reader.pop()
    assert os.fstat(reader.fd).st_blocks * 512 < 64 * 1024
    writer.close()
    reader.close()


@pytest.mark.parametrize("unread", [8, RING + 64, 1 << 63])
def test_counts_that_cannot_be_true(unread: int) -> None:
    reader = RingReader(RING)
    writer = RingWriter(reader.fd, RING)
    SpoiltMemory(reader.fd, RING).set_count(unread)
    with pytest.raises(SpoiltRing):
        reader.front()
    writer.close()
    reader.close()


@pytest.mark.parametrize("sizes", [(RING, 0), (10, RING), (1 << 31, 1 << 31), (0xFFFFFFFF, 0)])
def test_sizes_that_cannot_be_true(sizes: tuple[int, int]) -> None:
    reader = RingReader(RING)
    writer = RingWriter(reader.fd, RING)
    assert writer.write(b"x", None)
    SpoiltMemory(reader.fd, RING).scribble(struct.pack("<II", *sizes), at=0)
    with pytest.raises(SpoiltRing):
        reader.front()
    writer.close()
    reader.close()


def test_nobody_writes_to_a_reader_that_has_left() -> None:
    reader = RingReader(RING)
    writer = RingWriter(reader.fd, RING)
    reader.close()
    assert not writer.write(b"x", None)
    writer.close()


def activation(step: int) -> Activation:
    return Activation(StepPlan(GroupId(1), StepId(step), (), (), ()))


def abort(number: int) -> Abort:
    return Abort(RequestId(f"r{number}"))


@pytest.fixture(autouse=True)
def writers(monkeypatch: pytest.MonkeyPatch) -> list[WatchedWriter]:
    """Of every ring that links write to."""
    return watch_writers(monkeypatch)


@pytest.fixture
def links() -> Iterator[list[PeerLinks]]:
    made = [PeerLinks(InstanceId(i), fresh_address()) for i in range(2)]
    addresses = {InstanceId(i): each.address for i, each in enumerate(made)}
    for each in made:
        each.connect(addresses)
    yield made
    for each in made:
        each.close()


def receive(links: PeerLinks, count: int) -> list[PeerMail]:
    mail: list[PeerMail] = []
    while len(mail) < count:
        more = links.poll(10.0)
        assert more or not links.faults(), f"{len(mail)} of {count}"
        mail += more
    return mail


def shake_hands(links: list[PeerLinks], eventually: Callable[..., object]) -> WatchedWriter:
    """An activation from the first one has it write to a ring from then on: to this one."""
    before = len(WatchedWriter.made)
    links[0].send(ONE, activation(0), memoryview(b"first"))
    receive(links[1], 1)

    def has_ring() -> bool:
        assert not links[0].poll(0.0)
        return len(WatchedWriter.made) > before

    eventually(has_ring)
    return WatchedWriter.made[-1]


def test_after_an_activation_nothing_goes_by_the_socket(
    links: list[PeerLinks], eventually: Callable[..., object]
) -> None:
    ring = shake_hands(links, eventually)
    for number in range(1, 200):
        hidden = np.full(number * 100, number, dtype=np.uint16)
        assert links[0].send(ONE, activation(number), hidden.data)
        assert links[0].send(ONE, abort(number))
        (first, payload), (second, nothing) = receive(links[1], 2)
        assert (first, second, nothing) == (activation(number), abort(number), None)
        assert payload is not None
        got = np.frombuffer(payload, dtype=np.uint16)
        assert len(got) == number * 100 and (got == number).all()
    assert ring.took == [True] * 398


def test_what_does_not_fit_goes_by_the_socket_in_its_order(
    monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., object]
) -> None:
    monkeypatch.setattr(peer_rings, "RING_BYTES", 4096)
    pair = [PeerLinks(InstanceId(i), fresh_address()) for i in range(2)]
    for each in pair:
        each.connect({ZERO: pair[0].address, ONE: pair[1].address})
    by_ring = shake_hands(pair, eventually).took
    numbers = np.random.default_rng(0)
    due: deque[tuple[Message, bytes]] = deque()
    for number in range(1, 400):
        payload = bytes([number % 256]) * int(numbers.integers(0, 5000))
        pair[0].send(ONE, activation(number), memoryview(payload))
        pair[0].tell_counts()
        due.append((activation(number), payload))
        for message, got in pair[1].receive() if numbers.integers(3) == 0 else ():
            assert (message, bytes(got or b"")) == due.popleft()
    for message, got in receive(pair[1], len(due)):
        assert (message, bytes(got or b"")) == due.popleft()
    assert not due and pair[1].faults() == []
    # How many go by the ring is chance: it is full while its reader waits for the socket.
    assert 0 < sum(by_ring) < len(by_ring), "both ways were used"
    for each in pair:
        each.close()


def test_what_is_lost_beside_shared_memory_is_a_fault(
    links: list[PeerLinks], eventually: Callable[..., object]
) -> None:
    shake_hands(links, eventually).loses_next = True
    links[0].send(ONE, abort(1))
    links[0].send(ONE, abort(2))
    faults: list[LinkFault] = []
    while not faults:
        links[0].tell_counts()
        assert links[1].poll(10.0) == []
        faults += links[1].faults()
    assert faults == [LinkFault(ZERO, "message 3 has come, but 1 was due")]
    links[0].begin_anew()
    for number in range(3, 6):
        links[0].send(ONE, abort(number))
    assert receive(links[1], 3) == [PeerMail(abort(number), None) for number in range(3, 6)]
    assert links[1].faults() == []


def test_a_successor_gets_a_ring_of_its_own(
    links: list[PeerLinks], eventually: Callable[..., object]
) -> None:
    shake_hands(links, eventually)
    links[0].send(ONE, abort(1))  # lies in the memory of a process that has died
    successor = PeerLinks(ONE, fresh_address())
    successor.connect({ZERO: links[0].address})
    links[0].connect({ONE: successor.address})
    links[0].send(ONE, abort(2))
    assert receive(successor, 1) == [PeerMail(abort(2), None)]
    shake_hands([links[0], successor], eventually)
    links[0].send(ONE, abort(3))
    assert receive(successor, 1) == [PeerMail(abort(3), None)]
    successor.close()


def test_the_one_who_reads_forgets_the_other_for_a_while(
    links: list[PeerLinks], eventually: Callable[..., object]
) -> None:
    shake_hands(links, eventually)
    links[1].connect({})
    links[1].connect({ZERO: links[0].address})
    links[0].send(ONE, abort(1))
    assert receive(links[1], 1) == [PeerMail(abort(1), None)]
    shake_hands(links, eventually)


def test_memory_that_no_writer_writes_is_refused(
    links: list[PeerLinks], eventually: Callable[..., object]
) -> None:
    shake_hands(links, eventually).memory.set_count(1 << 40)
    with pytest.raises(MalformedMessage, match="shared memory of instance=0"):
        links[1].receive()


WRITE_AND_DIE = """
import sys
from kunserve.core.ids import GroupId, InstanceId, RequestId, StepId
from kunserve.core.messages import Abort, Activation
from kunserve.core.step import StepPlan
from kunserve.transport.peers import rings
from kunserve.transport.peers.links import PeerLinks
from tests.unit.transport.peers.watched_ring import WatchedWriter, die_while_writing
rings.RingWriter = WatchedWriter
links = PeerLinks(InstanceId(0), sys.argv[1])
links.connect({InstanceId(1): sys.argv[2]})
first = Activation(StepPlan(GroupId(1), StepId(0), (), (), ()))
links.send(InstanceId(1), first, memoryview(b"first"))
while not WatchedWriter.made:
    links.poll(0.05)
for number in range(1, 50):
    links.send(InstanceId(1), Abort(RequestId(f"r{number}")))
die_while_writing()
"""


def test_a_process_dies_while_it_writes() -> None:
    address = fresh_address()
    reader = PeerLinks(ONE, fresh_address())
    reader.connect({ZERO: address})
    process = subprocess.Popen([sys.executable, "-c", WRITE_AND_DIE, address, reader.address])
    messages = [message for message, _ in receive(reader, 50)]
    assert messages == [activation(0), *(abort(number) for number in range(1, 50))]
    assert process.wait() == 0
    assert reader.receive() == [] and reader.faults() == []
    reader.connect({})
    reader.close()


def test_sockets_alone_where_memory_cannot_be_shared(
    links: list[PeerLinks],
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(shared_ring.platform, "machine", lambda: "aarch64")
    assert peer_rings.open_rings("ipc:///somewhere") is None
    assert peer_rings.open_rings("tcp://host:1") is None
    offer = peer_rings.RingOffer(
        links[1].address,
        peer_rings.SharedFile(os.getpid(), 10_000, 0, 0),
        RING,
        peer_rings.SharedFile(os.getpid(), 10_001, 0, 0),
    )
    speaker = identity.pack(Identity(b"p", ONE, identity.new_incarnation()))
    socket = connect_dealer(links[0].address, speaker)
    socket.send_multipart((b"", peer_rings.OFFERS.encode(offer)))
    eventually(lambda: links[0].poll(0.01) == [] and "go by sockets" in caplog.text)
    socket.close()
    links[0].send(ONE, activation(1), memoryview(b"hidden"))
    links[0].send(ONE, abort(2))
    assert [message for message, _ in receive(links[1], 2)] == [activation(1), abort(2)]
