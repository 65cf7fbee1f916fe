"""Shared memory beside the sockets between instances of one host: messages that wake one thread.

A socket's message wakes two threads of ZeroMQ and then the loop, and its bytes are copied four
times. Between stages of a pipeline that is a part of every token. So an instance that gets
activations offers their sender a ring (``shared_ring``), and whatever the sender says from then on
goes there, as long as there is room. The sockets stay: they carry the first message of an epoch,
what does not fit, and everything where memory cannot be shared. Numbers tell the order of both.

Nothing has to be agreed. A ring is read from before it is offered, and who cannot open it goes on
with the socket.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import msgspec

from kunserve.core.ids import InstanceId
from kunserve.transport.bulk.wire import SharedFile
from kunserve.transport.peers.doorbell import BellRope, Doorbell
from kunserve.transport.peers.shared_ring import (
    RING_BYTES,
    RingReader,
    RingWriter,
    SpoiltRing,
    keeps_order,
)
from kunserve.transport.wire.codec import Codec, MalformedMessage

logger = logging.getLogger(__name__)


Take: TypeAlias = Callable[[bytes, InstanceId, memoryview, memoryview | None], bool]
"""Gets route, sender, message and payload; False leaves the message in the ring."""


class RingOffer(msgspec.Struct, frozen=True, array_like=True):
    """From the process that reads a ring to the one that may write there."""

    reader_address: str
    """Of the reader's links: nobody else is spoken to by this ring."""
    ring: SharedFile
    num_bytes: int
    bell: SharedFile


class _Reading(NamedTuple):
    peer: InstanceId
    ring: RingReader


class _Writing(NamedTuple):
    reader_address: str
    ring: RingWriter
    rope: BellRope


OFFERS = Codec((RingOffer,))


class PeerRings:
    """All rings of one instance, to and from it. Belongs to the instance's loop thread."""

    def __init__(self, address: str, num_bytes: int) -> None:
        """``address`` is that of the instance's links. Only processes of this host can reach it."""
        self._address = address
        self._num_bytes = num_bytes
        self.bell = Doorbell()
        self._readings: dict[bytes, _Reading] = {}
        """By the route of the process that writes."""
        self._refused: set[bytes] = set()
        """Routes of those that no ring can be made for."""
        self._writings: dict[InstanceId, _Writing] = {}

    # Reading

    def offer(self, peer: InstanceId, route: bytes) -> bytearray | None:
        """A ring for a process that has no ring to here yet, as bytes for it; None if it has."""
        if route in self._readings or route in self._refused:
            return None
        try:
            ring = RingReader(self._num_bytes)
        except OSError as error:
            logger.warning("no shared memory for messages of instance=%d: %s", peer, error)
            self._refused.add(route)
            return None
        self._readings[route] = _Reading(peer, ring)
        file = SharedFile.of(ring.fd)
        offer = RingOffer(self._address, file, self._num_bytes, self.bell.file)
        return OFFERS.encode(offer)

    @property
    def has_readings(self) -> bool:
        """Whether any process has a ring to here."""
        return bool(self._readings)

    def drain_all(self, take: Take) -> None:
        """``drain`` of every process that has written something."""
        for route, (_, ring) in self._readings.items():
            if ring.has_more:
                self.drain(route, take)

    def drain(self, route: bytes, take: Take) -> None:
        """Give every message of a process to ``take``, until that leaves one where it is.

        Raises MalformedMessage where the memory holds what no writer writes.
        """
        reading = self._readings.get(route)
        if reading is None:
            return
        peer, ring = reading
        try:
            while (record := ring.front()) is not None and take(route, peer, *record):
                ring.pop()
        except SpoiltRing as error:
            raise MalformedMessage(f"shared memory of instance={peer}: {error}") from error

    # Writing

    def accept(self, peer: InstanceId, data: memoryview) -> None:
        """A peer offers a ring. Raises MalformedMessage."""
        offer = OFFERS.decode(data)
        self._end_writing(peer)
        with contextlib.ExitStack() as stack:
            ring_fd = stack.enter_context(offer.ring.opened(os.O_RDWR))
            bell_fd = stack.enter_context(offer.bell.opened(os.O_WRONLY))
            if ring_fd is None or bell_fd is None:
                logger.info("messages to instance=%d go by sockets: no shared memory", peer)
                return
            try:
                ring = RingWriter(ring_fd, offer.num_bytes)
            except (OSError, ValueError) as error:
                logger.info("messages to instance=%d go by sockets: %s", peer, error)
                return
            self._writings[peer] = _Writing(offer.reader_address, ring, BellRope(bell_fd))

    def write(
        self, peer: InstanceId, address: str, data: bytes | bytearray, payload: memoryview | None
    ) -> bool:
        """Say it to the process that listens at this address; False: by the socket instead."""
        writing = self._writings.get(peer)
        if writing is None or writing.reader_address != address:
            return False
        if not writing.ring.write(data, payload):
            return False
        writing.rope.pull()
        return True

    # Peers come and go

    def lose(self, peer: InstanceId) -> None:
        """The peer's process is another one from now on, or gone."""
        self._end_writing(peer)
        for route in [route for route, reading in self._readings.items() if reading.peer == peer]:
            self._readings.pop(route).ring.close()

    def _end_writing(self, peer: InstanceId) -> None:
        writing = self._writings.pop(peer, None)
        if writing is not None:
            writing.ring.close()
            writing.rope.close()

    def close(self) -> None:
        """The instance leaves."""
        for peer in {*self._writings, *(reading.peer for reading in self._readings.values())}:
            self.lose(peer)
        self.bell.close()


def open_rings(address: str) -> PeerRings | None:
    """Rings where all processes that reach the address are on this host, and may share memory."""
    if not address.startswith("ipc://") or not keeps_order():
        return None
    return PeerRings(address, RING_BYTES)
