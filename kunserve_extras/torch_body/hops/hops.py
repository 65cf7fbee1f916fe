"""Both ends of an instance's hops: what it writes into peers' lanes, and what comes into its own.

A ticket goes by the links, as a message that may come before the rows. Whatever cannot be done
(no lane yet, no free slot, too many rows, a refusal) goes as bytes, as between machines. Behind
them is a note of the tickets sent before, because the links may have lost some: their slots are
given back then, so the next microbatch has room again. Who is refused a lane asks again.

A ticket may go while its sender's device still computes the rows, so the host's part of a hop is
over when they come. A stream that waits for a word has no deadline, and a sender may die between
its ticket and its rows. So a thread looks after what is awaited: where a word does not come it is
written here, from another stream, and then the step is void, because its rows are nobody's. Nobody
tells of rows before all of which they are computed are there, so a void step ends with its stage.
"""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kunserve.core.ids import GroupId, StepId
from kunserve.engine.cpu.hidden_rows import HiddenRows
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.hops.lanes import (
    TICKET_BYTES,
    Lane,
    Ticket,
    parted,
)
from kunserve_extras.torch_body.hops.reads import Read, Reads
from kunserve_extras.torch_body.hops.rows import LostRows, with_behind
from kunserve_extras.torch_body.hops.tokens import TokenSource, TokensToCome
from kunserve_extras.torch_body.hops.ways import Way

logger = logging.getLogger(__name__)

LINGER_S = 10.0
"""A lane outlives its sender so long: what it sent before may still be read."""
RETRY_S = 30.0
"""So long after a refusal, or a way's end, nobody is asked for a lane again."""
LOOK_GAP_S = 0.1
MOST_LANES = 4
_IPC = "ipc://"


def desk_of(address: str) -> str | None:
    """Where an instance hands out lanes, by its address for links; None across machines."""
    return address.removeprefix(_IPC) + ".h" if address.startswith(_IPC) else None


class LandedRows(HiddenRows):
    """Hidden states in a slot of this instance's lane, perhaps on their way there."""

    may_come_later = True

    def __init__(self, hops: "Hops", lane: Lane, ticket: Ticket, row_bytes: int) -> None:
        super().__init__(memoryview(b""), 0)
        self.num_rows = ticket.num_rows
        self._hops, self._lane, self._ticket = hops, lane, ticket
        self._row_bytes = row_bytes
        self._read: Read | None = None

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """A copy on the device, [rows, hidden], behind a wait of the stream. Called once."""
        assert self._read is None, self._ticket
        num_bytes = self.num_rows * self._row_bytes
        self._read, rows = self._hops.read(self._lane, self._ticket.number, num_bytes)
        return rows.view(dtype).view(self.num_rows, -1)

    def await_all(self, look_up: Callable[[], None] | None = None) -> bool:
        """See ``HiddenRows``. Between ``tensor`` and the end of the step that reads it."""
        assert self._read is not None, self._ticket
        return self._hops.reads.await_one(self._read, look_up)

    def __del__(self) -> None:
        if self._read is None:  # its group is no more
            self._hops.give_up(self._lane, self._ticket.number)


class Hops:
    """Of one instance. The loop's thread calls; another one of its own serves peers."""

    def __init__(
        self, driver: Driver, device: torch.device, address: str, slot_bytes: int, row_bytes: int
    ) -> None:
        """Raises OSError where this cannot be: then all goes as bytes."""
        desk = desk_of(address)
        if desk is None or not driver.can_export or row_bytes <= TICKET_BYTES:
            raise OSError("other processes cannot write into this instance's memory")
        self._driver, self._device = driver, device
        self._slot_bytes, self._row_bytes = slot_bytes, row_bytes
        self._lock = threading.RLock()  # rows may be given up in the middle of anything
        self._ways: dict[str, Way] = {}
        """By address."""
        self._not_before_s: dict[str, float] = {}
        """When each address may be asked again."""
        self._lanes: dict[int, Lane] = {}
        self._takers: dict[socket.socket, Lane] = {}
        self._left: list[Way] = []
        """To be closed."""
        self._source: TokenSource | None = None
        self._fed_group: GroupId | None = None
        """The last one of which a step has fed on tokens."""
        self._own_stream, self._thread_stream = driver.stream(), driver.stream()
        self.reads = Reads(driver, self._lock, self._thread_stream)
        try:  # the device's word is not enough
            Lane(driver, device, 0, slot_bytes, self._thread_stream).close()
            self._path = Path(desk)
            self._listener = _listen(self._path)
        except OSError:
            self._free_streams()
            raise
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="hops", daemon=True)
        self._is_closing = False
        self._thread.start()

    # The loop's thread

    def give(self, hidden: torch.Tensor, to: str) -> memoryview | None:
        """Write hidden states [T, hidden] into the peer's lane, and give their ticket.

        Where there is no room it is their bytes with a note; None where they go as bytes alone.
        """
        ticket = self._write(hidden, to)
        if ticket is None or not ticket.is_note:
            return None if ticket is None else ticket.to_bytes()
        return with_behind(hidden, ticket.to_bytes())

    def give_ahead(self, hidden: torch.Tensor, to: str) -> memoryview | None:
        """The same of hidden states that the device has only been asked for. Never waits for it.

        None where they would be bytes.
        """
        ticket = self._write(hidden, to)
        return None if ticket is None or ticket.is_note else ticket.to_bytes()

    def _write(self, hidden: torch.Tensor, to: str) -> Ticket | None:
        """Their ticket, or a note where there is no room; None where there is no lane."""
        with self._lock:
            way = self._ways.get(to)
            if way is None:
                self._ask(to)
                return None
            try:
                ticket = way.write(hidden, self._stream)
            except OSError as error:
                logger.warning("hidden states go as bytes to %s for a while: %s", to, error)
                self._leave(to)
                return None
            if ticket is None:
                return way.note()
        self._catch_up()
        return ticket

    def take(self, data: bytes | bytearray | memoryview) -> HiddenRows | None:
        """What a ticket tells of, or the rows before a note; None for rows alone.

        Of a ticket whose rows may be others' by now they are lost.
        """
        rows, ticket = parted(data, self._row_bytes)
        if ticket is None:
            return None
        with self._lock:
            lane = self._lanes.get(ticket.lane)
            if ticket.is_note:
                if lane is not None:
                    lane.pass_over(ticket.number)
                return HiddenRows.of_bytes(rows, self._row_bytes)
            if lane is None:
                return LostRows(ticket.num_rows, f"their lane is gone: {ticket}")
            if not lane.has_come(ticket.number):
                return LostRows(ticket.num_rows, f"they come after later ones: {ticket}")
            lane.num_open += 1
        return LandedRows(self, lane, ticket, self._row_bytes)

    def read(self, lane: Lane, number: int, num_bytes: int) -> tuple[Read, torch.Tensor]:
        """A copy of the rows, behind a wait of the stream for them."""
        read = self.reads.open(lane, number, self._stream)
        self._catch_up()
        return read, lane.slots.rows(number, num_bytes).clone()

    def write_tokens(
        self, parts: Sequence[torch.Tensor], to: str, group_id: GroupId, step_id: StepId
    ) -> memoryview | None:
        """Write what a step samples into the first stage's memory, for steps that feed on it.

        What tells where goes with the tokens. None where they are not written: not before some are.
        """
        with self._lock:
            way = self._ways.get(to)
            if way is None:
                self._ask(to)
                return None
            try:
                ticket = way.write_tokens(parts, group_id, step_id, self._stream)
            except OSError as error:
                logger.warning("tokens go through hosts to %s for a while: %s", to, error)
                self._leave(to)
                return None
        self._catch_up()
        return None if ticket is None else ticket.to_bytes()

    def tokens_come(self, data: memoryview, group_id: GroupId, step_id: StepId) -> None:
        """What was written of this step told where: so will be what later ones sample."""
        ticket = Ticket.of_bytes(data)
        with self._lock:
            lane = None if ticket is None else self._lanes.get(ticket.lane)
            if ticket is None or lane is None:
                return
            self._source = TokenSource(group_id, lane, ticket.number - step_id)

    def feeds_from(self, group_id: GroupId) -> bool:
        """Whether steps of that group can feed on what its last stage samples."""
        source = self._source
        return source is not None and source.group_id == group_id and source.lane.left_s is None

    def read_tokens(self, step_id: StepId, num_tokens: int) -> TokensToCome:
        """A copy of a step's first tokens, behind a wait of the stream for them."""
        assert self._source is not None, step_id
        group_id, lane, first_number = self._source
        if group_id != self._fed_group:
            self._fed_group = group_id
            logger.info("steps of the group feed on its last stage's device group=%d", group_id)
        number = first_number + step_id
        with self._lock:
            lane.num_open += 1
        read = self.reads.open(lane, number, self._stream, are_tokens=True)
        self._catch_up()
        tokens = lane.slots.tokens(number)[:num_tokens].clone()
        return TokensToCome(self.reads, read, tokens)

    def stop_waiting(self) -> None:
        """Nobody wants steps that feed on tokens: those that have not come make them void."""
        self.reads.give_up_tokens()

    def give_up(self, lane: Lane, number: int) -> None:
        """Nobody will read these rows."""
        with self._lock:
            lane.num_open -= 1
            lane.slots.give_back(number)

    @property
    def _stream(self) -> int:
        """On which torch computes."""
        if self._device.type != "cuda":
            return self._own_stream
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _catch_up(self) -> None:
        """Where torch computes at once, the stream has to, too."""
        if self._device.type != "cuda":
            self._driver.synchronize(self._own_stream)

    def _ask(self, to: str) -> None:
        desk, now_s = desk_of(to), time.monotonic()
        if desk is None or now_s < self._not_before_s.get(to, 0.0):
            return
        self._not_before_s[to] = now_s + RETRY_S
        try:
            self._ways[to] = Way(self._driver, desk)
        except OSError as error:
            logger.info("hidden states go as bytes to %s for a while: %s", to, error)
        self._wake.send(b"w")

    # The other thread

    def _serve(self) -> None:
        self._driver.enter()
        while not self._is_closing:
            with self._lock:
                ways = {way.socket: to for to, way in self._ways.items()}
                sockets = [self._listener, self._woken, *self._takers, *ways]
                is_calm = not (self._lanes or self._left)
            poll, by_fd = select.poll(), {one.fileno(): one for one in sockets}
            for fd in by_fd:
                poll.register(fd, select.POLLIN)
            ready = poll.poll(None if is_calm else LOOK_GAP_S * 1e3)
            with self._lock:
                for fd, _ in ready:
                    one = by_fd[fd]
                    if one is self._listener:
                        self._let_in()
                    elif one is self._woken:
                        self._woken.recv(64)
                    elif one in ways:
                        self._turn_way(ways[one])
                    elif one in self._takers:
                        self._takers.pop(one).left_s = time.monotonic()
                        one.close()
                self._look(time.monotonic())

    def _let_in(self) -> None:
        taker: socket.socket | None = None
        lane: Lane | None = None
        fds: list[int] = []
        try:
            taker, _ = self._listener.accept()
            if len(self._lanes) >= MOST_LANES:
                raise OSError("there are enough lanes")
            # No other process's ticket may be taken for one of this lane: not even of one that had
            # this address before.
            number = int.from_bytes(os.urandom(4))
            lane = Lane(self._driver, self._device, number, self._slot_bytes, self._thread_stream)
            fds.append(lane.export())
            offer = lane.slots.offer.to_bytes()
            socket.send_fds(taker, [offer], [*fds, lane.credits_fd])
        except OSError as error:
            logger.info("a peer's hidden states come as bytes: %s", error)
            if lane is not None:
                lane.close()
            if taker is not None:
                taker.close()
        else:
            self._lanes[number] = self._takers[taker] = lane
        finally:
            for fd in fds:
                os.close(fd)

    def _turn_way(self, to: str) -> None:
        if to not in self._ways:
            return  # left meanwhile
        try:
            self._ways[to].accept(self._device)
            logger.info("hidden states go into the memory of %s", to)
        except OSError as error:
            logger.info("hidden states go as bytes to %s for a while: %s", to, error)
            self._leave(to)

    def _leave(self, to: str) -> None:
        self._left.append(self._ways.pop(to))
        self._not_before_s[to] = time.monotonic() + RETRY_S
        self._wake.send(b"w")

    def _look(self, now_s: float) -> None:
        self.reads.look(now_s)
        for way in tuple(self._left):  # its end tells the peer that all is written
            if way.is_written:
                self._left.remove(way)
                way.close()
        for number, lane in tuple(self._lanes.items()):
            is_over = lane.left_s is not None and now_s - lane.left_s > LINGER_S
            if is_over and lane.num_open == 0:
                del self._lanes[number]
                lane.close()

    def close(self) -> None:
        """Nothing may be under way."""
        self._is_closing = True
        self._wake.send(b"w")
        self._thread.join()
        for one in (*self._takers, self._listener, self._wake, self._woken):
            one.close()
        for way in (*self._ways.values(), *self._left):
            way.close()
        for lane in self._lanes.values():
            lane.close()
        self._path.unlink(missing_ok=True)
        self._free_streams()

    def _free_streams(self) -> None:
        for stream in (self._own_stream, self._thread_stream):
            self._driver.stream_destroy(stream)
        self.reads.close()


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    path.unlink(missing_ok=True)
    try:
        listener.bind(str(path))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
