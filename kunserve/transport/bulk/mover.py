"""The bulk mover: KV and weights between instances, beside the steps and behind activations.

A thread of its own with sockets (and a ZeroMQ I/O thread) of its own. The receiver drives: it
asks for one chunk at a time, so the bytes in flight are bounded, and writes them in place.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec
import numpy as np
import zmq

from kunserve.core.faults import MachineFailed
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import KvPull, LayerPull
from kunserve.transport.bulk import wire as bulk_wire
from kunserve.transport.bulk.giver import BulkGiver
from kunserve.transport.bulk.granule_server import GranuleServer, open_desk
from kunserve.transport.bulk.movable_memory import Granules, Mapped, MovableMemory
from kunserve.transport.bulk.pacing import BulkPacing
from kunserve.transport.bulk.shared_files import Counts, PeerFiles
from kunserve.transport.bulk.sink import BulkSink, Pulled
from kunserve.transport.bulk.source import BulkSource
from kunserve.transport.bulk.wire import (
    Answer,
    Bytes,
    Int32Array,
    Located,
    SharedGranules,
)
from kunserve.transport.wire import identity
from kunserve.transport.wire.doorkeeper import Doorkeeper, KeyRing, key_of
from kunserve.transport.wire.identity import Identity
from kunserve.transport.wire.network import Network
from kunserve.transport.wire.sockets import (
    PollTarget,
    Rejections,
    Socket,
    address_of,
    bind_router,
    connect_dealer,
    guard_of,
)
from kunserve.transport.wire.wakeup import Wakeup

_SHORTEST_POLL_S = 0.001

_BULK = b"b"


class BulkMover:
    """Implements ``control.instance.body.Mover``. Methods are for the instance's loop thread.

    Memory given to ``pull_kv`` and ``pull_layers`` is the mover's until the pull has ended in
    ``completed``, or ``cancel`` or ``reset`` has returned. A lock keeps the mover's hands off
    all memory while ``quiet`` is held.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        bind: str,
        memory: MovableMemory,
        *,
        link_gbps: float | None = None,
        pacing: BulkPacing | None = None,
        network: Network | None = None,
    ) -> None:
        """Listen at ``bind``, or on a free port of the ``network``'s host.

        ``link_gbps`` is short for ``BulkPacing.for_link``; None is as fast as bytes go. What a
        network's host shares with another process of it is read in memory files all the same.
        """
        self._pacing = pacing or BulkPacing.for_link(link_gbps, is_network=network is not None)
        self._network = network
        self._ring = KeyRing()
        self._near: set[InstanceId] = set()
        self._me = Identity(_BULK, instance_id, identity.new_incarnation())
        self.rejections = Rejections("bulk")
        self._lock = threading.RLock()
        self._counts = Counts()
        places = memory.places
        granules = None if places is None else places.granules
        self._desk = open_desk(bind, granules)
        self._source = BulkSource(memory, self._counts, _shared(self._desk, granules))
        self._peer_files = PeerFiles(granules)
        self._has_file = places is not None and places.shared_fd is not None
        self.maps = granules is not None
        """Whether it takes KV and weights from where they are mapped, once it knows a source."""
        self._mapped: list[tuple[int, Mapped]] = []
        """Tickets of chunks that are to be copied from where they are mapped."""
        self._sink = BulkSink(memory, self._pacing, self._peer_files.has_mapped, self._is_read)
        self._addresses: dict[InstanceId, tuple[str, str]] = {}
        """With keys, which are empty without a network."""
        self._is_closing = False
        self._failure: BaseException | None = None
        self._to_thread = Wakeup()
        self._to_loop = Wakeup()
        # Belongs to the thread from here on.
        self._context = zmq.Context()
        self._doorkeeper = None
        guard = guard_of(network)
        if guard is not None:
            self._doorkeeper = Doorkeeper(self._context, self._ring, "bulk", guard.handshake_s)
        at = bind if network is None else network.any_port
        self._inbox = bind_router(at, context=self._context, guard=guard)
        bound = address_of(self._inbox)
        self._address = bound if network is None else network.advertised(bound)
        self._links: dict[InstanceId, tuple[tuple[str, str], Socket]] = {}
        self._giver = BulkGiver(self._inbox, self._source, self._lock, self._pacing)
        self._watched: set[int] = set()
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._to_thread.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="bulk", daemon=True)
        self._thread.start()

    # Wiring

    @property
    def address(self) -> str:
        """Where peers reach the mover."""
        return self._address

    @property
    def copies_here(self) -> bool:
        """Whether what peers give is copied by this process, out of their memory."""
        return self._pacing.link_gbps is None and self._addresses.keys() <= self._near

    @property
    def poll_sockets(self) -> tuple[PollTarget, ...]:
        """Readable when ``completed`` may have something."""
        return (self._to_loop.fileno(),)

    def connect(
        self,
        addresses: Mapping[InstanceId, str],
        keys: Mapping[InstanceId, str] | None = None,
        near: Collection[InstanceId] | None = None,
    ) -> None:
        """Know these peers and no others; pulls from a peer that is gone end.

        Of the ``near`` ones memory files can be read; None: of all.
        """
        keys = keys or {}
        self._ring.keep({key: peer for peer, key in keys.items()})
        me = self._me.instance_id
        known = {p: (at, keys.get(p, "")) for p, at in addresses.items() if p != me}
        with self._lock:
            self._near = set(known if near is None else near)
            for peer, address in self._addresses.items():
                if known.get(peer) != address:
                    self._sink.lose(peer)
                    self._to_loop.set()
            self._addresses = known
        self._to_thread.set()

    def yield_to(self, activations_pending: Callable[[], bool]) -> None:
        """Pause between chunks while this, called from the thread, is true."""
        self._giver.yield_to(activations_pending)

    # Giving

    @property
    def num_bytes_given(self) -> int:
        """Bulk bytes that peers have been given so far."""
        return self._giver.num_bytes

    def export_kv(self, request_id: RequestId, entries: Int32Array) -> None:
        """Let peers read the request's blocks (one entry each), until ``withdraw_kv``."""
        with self._lock:
            self._source.export(request_id, entries)

    def withdraw_kv(self, request_id: RequestId) -> None:
        """Once this returns, the request's blocks are read no more; peers get a refusal."""
        with self._lock:
            self._source.withdraw(request_id)

    def offer_layers(self, layers: LayerRange | None) -> None:
        """Let peers read these layers' weights and no others (none at first).

        Narrow it before layers are unmapped; widen it once they are filled.
        """
        with self._lock:
            self._source.offer(layers)

    # Taking

    @property
    def num_bytes_taken(self) -> int:
        """Bulk bytes that have been put in place so far."""
        return self._sink.num_bytes

    def pull_kv(self, piece: KvPull, entries: Int32Array) -> None:
        """Fill blocks ``entries`` (one per block of the piece) over ``piece.layers``."""
        with self._lock:
            self._source.saw_transition(piece.transition_id)
            self._sink.pull_kv(piece, entries)
        self._to_thread.set()

    def pull_layers(self, layers: LayerRange, src: InstanceId) -> None:
        """Fill the mapped weights of ``layers`` from a peer that holds them."""
        with self._lock:
            self._sink.pull_layers(LayerPull(layers, src))
        self._to_thread.set()

    def completed(self) -> list[Pulled]:
        """Pulls that ended since the last call. Raises MachineFailed if the thread has died."""
        self._to_loop.clear()
        if self._failure is not None:
            raise MachineFailed("the bulk mover died") from self._failure
        with self._lock:
            return self._sink.drain()

    def cancel(self, request_id: RequestId) -> None:
        """Once this returns, nothing is written for the request, nor will its end be told."""
        with self._lock:
            self._sink.cancel(request_id)

    def cancel_layers(self) -> None:
        """Once this returns, no weights are written, nor will the end of their pulls be told."""
        with self._lock:
            self._sink.cancel(None)

    def reset(self) -> None:
        """Forget every export and every pull (the instance forms a group anew)."""
        with self._lock:
            self._source.withdraw_all()
            self._sink.clear()

    def quiet(self) -> contextlib.AbstractContextManager[bool]:
        """Within, the mover touches no memory: for remapping it."""
        return self._lock

    def check(self) -> None:
        """Assert the invariants."""
        with self._lock:
            self._sink.check()

    def close(self) -> None:
        """Stop the thread and release everything. Callable twice."""
        if self._is_closing:
            return
        self._is_closing = True
        self._to_thread.set()
        self._thread.join()
        self._counts.close()
        self._to_thread.close()
        self._to_loop.close()

    # The thread

    def _run(self) -> None:
        try:
            while True:
                self._to_thread.clear()
                if self._is_closing:
                    return
                self._rewire()
                self._hear_requests()
                self._hear_replies()
                self._share()
                self._giver.give()
                self._ask()
                self._wait()
        except BaseException as failure:
            self._failure = failure
            self._to_loop.set()
        finally:
            for _, link in self._links.values():
                link.close()
            self._peer_files.close()
            if self._desk is not None:
                self._desk.close()
            self._inbox.close()
            if self._doorkeeper is not None:
                self._doorkeeper.close()
            self._context.term()

    def _rewire(self) -> None:
        with self._lock:
            wanted = dict(self._addresses)
        for peer in [p for p, (a, _) in self._links.items() if wanted.get(p) != a]:
            _, link = self._links.pop(peer)
            self._peer_files.lose(peer)
            self._poller.unregister(link)
            link.close()
        for peer, address in wanted.items():
            if peer not in self._links:
                route = identity.pack(self._me)
                guard = guard_of(self._network, address[1])
                link = connect_dealer(address[0], route, context=self._context, guard=guard)
                self._links[peer] = (address, link)
                self._poller.register(link, zmq.POLLIN)
                if self.maps and self._may_read(peer):
                    link.send(bulk_wire.encode(bulk_wire.Where()), zmq.NOBLOCK)

    def _share(self) -> None:
        """Hand out granules of this memory, and map those of others."""
        self._peer_files.turn()
        sockets = self._peer_files.sockets
        if self._desk is not None:
            self._desk.turn()
            sockets += self._desk.sockets
        wanted = {one.fileno() for one in sockets}
        for fd in self._watched - wanted:
            self._poller.unregister(fd)
        for fd in wanted - self._watched:
            self._poller.register(fd, zmq.POLLIN)
        self._watched = wanted

    def _hear_requests(self) -> None:
        for route, *frames in _arrivals(self._inbox):
            chunk = bulk_wire.chunk_in(frames) if self._is_known(route) else None
            if chunk is None:
                self.rejections.note()
            else:
                self._giver.enqueue(route.bytes, chunk)

    def _is_known(self, route: zmq.Frame) -> bool:
        """Whether a peer asks; one that is gone gets nothing, though it is still connected."""
        asker = identity.unpack(route.bytes)
        if asker is None or self._network is None:
            return asker is not None
        return self._ring.owner(key_of(route)) == asker.instance_id

    def _hear_replies(self) -> None:
        for src, (_, link) in self._links.items():
            for head, *rest in _arrivals(link):
                reply = bulk_wire.reply_in(head)
                if reply is None:
                    self.rejections.note()
                    with self._lock:
                        self._sink.lose(src)
                    continue
                if reply.located is not None:
                    self._copy(src, reply.ticket, reply.located)
                    self._hear_requests()  # a peer waits for the word, and copies itself then
                    self._giver.give()
                    continue
                data: Bytes | None = None
                if rest:
                    data = np.frombuffer(rest[0].buffer, dtype=np.uint8)
                    self._peer_files.got_bytes(src)
                with self._lock:
                    self._sink.on_reply(reply.ticket, reply.answer, data, time.monotonic())
            self._copy_mapped()
            # Once for all that had come: the loop's thread would take turns with the copies.
            self._tell_loop()

    def _copy(self, src: InstanceId, ticket: int, located: Located) -> None:
        # Locked, because a remap would move the place that is filled. A chunk of this machine's
        # memory takes less than a millisecond.
        with self._peer_files.find(src, located) as found, self._lock:
            if isinstance(found, Mapped):
                self._mapped.append((ticket, found))
            elif found is None:
                self._sink.ask_again(ticket)
            else:
                self._sink.on_reply(ticket, Answer.DATA, found, time.monotonic())

    def _copy_mapped(self) -> None:
        """All at once, because a device shared by processes does each only in its turn."""
        if self._mapped:
            with self._lock:
                self._sink.on_mapped(self._mapped)
            self._mapped.clear()

    def _ask(self) -> None:
        while True:
            with self._lock:
                ask = self._sink.next_ask(time.monotonic())
            if ask is None:
                return
            src, chunk = ask
            if src not in self._links:
                # Perhaps connected since this turn began; waiting a turn would cost its place.
                self._rewire()
            if src in self._links:
                if self._may_read(src):
                    chunk = msgspec.structs.replace(chunk, may_read=True)
                self._links[src][1].send(bulk_wire.encode(chunk), zmq.NOBLOCK)
                continue
            with self._lock:
                self._sink.lose(src)
                self._tell_loop()

    def _may_read(self, src: InstanceId) -> bool:
        # On one machine a limit of the link's rate is to be felt, though there is no link.
        if self._network is None and self._pacing.link_gbps is not None:
            return False
        return src in self._near and self._peer_files.may_read(src)

    def _is_read(self, src: InstanceId) -> bool:
        """Whether its bytes are read here, or will be as far as is known: sources are alike."""
        return self._peer_files.has_read(src) or (self._has_file and self._may_read(src))

    def _wait(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._sink.expire(now_s)
            self._tell_loop()
            wait_s = self._sink.wait_s(now_s)
        delay_s = self._giver.delay_s(now_s)
        if delay_s is not None:
            wait_s = delay_s if wait_s is None else min(delay_s, wait_s)
        if wait_s is not None and wait_s < _SHORTEST_POLL_S:
            # A poll counts in whole milliseconds, too coarse for pacing.
            time.sleep(wait_s)
            return
        self._poller.poll(None if wait_s is None else int(wait_s * 1000))

    def _tell_loop(self) -> None:
        if self._sink.has_news:
            self._to_loop.set()


def _shared(desk: GranuleServer | None, granules: Granules | None) -> SharedGranules | None:
    if desk is None or granules is None:
        return None
    return SharedGranules(str(desk.path), granules.granule_bytes, granules.num_granules)


def _arrivals(socket: Socket) -> Iterator[list[zmq.Frame]]:
    """The messages waiting on a socket, not copied."""
    while True:
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
