"""Both ends of an instance's hops to instances on other hosts: tickets by the links, and hidden
states through pipes from device to device.

Each pair of stages has a pipe. The giving end waits for the other one, which an invitation behind
rows as bytes tells where. A pipe has neither names nor room: what is given and not taken holds up
all that comes after it. So a ticket says how large those before it were, and where the links have
lost some the taker takes their rows too, and forgets them. Few are on their way at a time; beyond
that all goes as bytes, with a note that says the same. Nobody waits for ever: a pipe in which
nothing moves is given up, and another one opened later.

A step reads rows once they are there: no stream waits for another host.
"""

import logging
import os
import struct
import threading
import time
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist

from kunserve.core.faults import StepVoid
from kunserve.engine.cpu.hidden_rows import HiddenRows
from kunserve_extras.torch_body.hops.pipes import (
    GIVES,
    TAKES,
    Pipe,
    PipeBy,
    Place,
    Under,
    join_store,
    open_pipe,
    open_store,
)
from kunserve_extras.torch_body.hops.rows import LostRows, with_behind

logger = logging.getLogger(__name__)

NUM_UNDER_WAY = 4
"""So many microbatches are in a pipe at most."""
PATIENCE_S = 5.0
"""For rows of which a ticket has come."""
MOVE_S = 30.0
"""For anything in a pipe to move, and for the other end of a new one. What is in a pipe that is
given up costs its group, so whoever takes may be slow.
"""
RETRY_S = 30.0
"""So long after a pipe's end nobody is invited again."""
LOOK_GAP_S = 50e-6
_TCP = "tcp://"
_TICKET = struct.Struct(f"<8sI{2 + NUM_UNDER_WAY}I")
_INVITATION = struct.Struct("<8sIIH64s32s2x")
_TICKET_MARK, _INVITATION_MARK = b"kunsfar1", b"kunsfar2"
MOST_BEHIND_BYTES = max(_TICKET.size, _INVITATION.size)
"""A row must be wider than what tells of it."""


class FarTicket(NamedTuple):
    """What goes by the links instead of hidden states, or as a note behind them."""

    pipe: int
    number: int
    """Of the giver's microbatches in this pipe, from 1 on."""
    num_rows: int
    """0 in a note: every ticket with a smaller number was sent before."""
    before: tuple[int, ...]
    """Rows of the numbers before this one, the last one first; 0 where there is none."""

    def to_bytes(self) -> memoryview:
        """For the wire."""
        data = _TICKET.pack(_TICKET_MARK, self.pipe, self.number, self.num_rows, *self.before)
        return memoryview(data)


class Invitation(NamedTuple):
    """Where a pipe's taking end finds the other one."""

    pipe: int
    giver: int
    """A process, which has one pipe at a time to each other."""
    place: Place

    def to_bytes(self) -> memoryview:
        """For the wire."""
        host, port, token = self.place
        names = host.encode(), token.encode()
        data = _INVITATION.pack(_INVITATION_MARK, self.pipe, self.giver, port, *names)
        return memoryview(data)


Behind = FarTicket | Invitation


def parted(
    data: bytes | bytearray | memoryview, row_bytes: int
) -> tuple[memoryview, Behind | None]:
    """Rows, none perhaps, and what is behind them, if anything."""
    view = memoryview(data)
    extra = view.nbytes % row_bytes
    rows, end = view[: view.nbytes - extra], bytes(view[view.nbytes - extra :])
    if extra == _TICKET.size and end.startswith(_TICKET_MARK):
        _, pipe, number, num_rows, *before = _TICKET.unpack(end)
        return rows, FarTicket(pipe, number, num_rows, tuple(before))
    if extra == _INVITATION.size and end.startswith(_INVITATION_MARK):
        _, pipe, giver, port, *names = _INVITATION.unpack(end)
        host, token = (name.rstrip(b"\0").decode() for name in names)
        return rows, Invitation(pipe, giver, Place(host, port, token))
    return view, None


class FarRows(HiddenRows):
    """Hidden states in a pipe."""

    def __init__(self, under: Under, num_rows: int) -> None:
        super().__init__(memoryview(b""), 0)
        self.num_rows = num_rows
        self._under = under
        self._until_s = time.monotonic() + PATIENCE_S

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """They, on the device, [rows, hidden]. Raises StepVoid if they do not come."""
        try:
            while not self._under.is_done:
                if time.monotonic() > self._until_s:
                    raise StepVoid("hidden states have not come from another host")
                time.sleep(LOOK_GAP_S)
        except OSError as error:
            raise StepVoid(f"hidden states have not come from another host: {error}") from error
        tensor = self._under.tensor
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor.view(dtype).view(self.num_rows, -1)


class _End:
    """One end of a pipe, which a thread opens."""

    def __init__(self) -> None:
        self.pipe: Pipe | None = None
        self.is_over = False
        """It could not be opened, or is broken."""
        self.under_way: deque[Under] = deque()
        self.is_opened = threading.Event()
        self._lock = threading.Lock()

    def has(self, pipe: Pipe) -> None:
        """From the thread that has opened it."""
        with self._lock:
            self.pipe = pipe
            if self.is_over:  # meanwhile
                pipe.close()

    def close(self) -> None:
        with self._lock:
            self.is_over = True
            if self.pipe is not None:
                self.pipe.close()


class _Giving(_End):
    def __init__(self) -> None:
        super().__init__()
        # No other pipe's ticket may be taken for one of this.
        self.name = int.from_bytes(os.urandom(4))
        self.invitation: Invitation | None = None
        """Until it is sent."""
        self.number = 1
        self.before: deque[int] = deque([0] * NUM_UNDER_WAY, NUM_UNDER_WAY)
        self.moved_s = 0.0
        """When something moved last, or nothing was on its way."""

    def has_room(self) -> bool:
        """Raises OSError where it is broken."""
        now_s, under_way = time.monotonic(), self.under_way
        while under_way and under_way[0].is_done:
            under_way.popleft()
            self.moved_s = now_s
        if not under_way:
            self.moved_s = now_s
        if now_s - self.moved_s > MOVE_S:
            raise OSError("nothing moves in a pipe")
        return len(under_way) < NUM_UNDER_WAY

    def told(self, num_rows: int) -> FarTicket:
        return FarTicket(self.name, self.number, num_rows, tuple(self.before))


class _Taking(_End):
    def __init__(self, giver: int) -> None:
        super().__init__()
        self.giver = giver
        self.latest = 0
        """Of the tickets that have come."""

    def take(self, ticket: FarTicket, row_bytes: int) -> Under | None:
        """Post what the ticket tells of, behind the rows of those that are lost. Raises OSError."""
        while self.under_way and self.under_way[0].is_done:
            self.under_way.popleft()
        if ticket.number <= self.latest or self.pipe is None or self.is_over:
            raise OSError("a ticket came after later ones, or without a pipe")
        lost = ticket.before[: ticket.number - self.latest - 1]
        if len(lost) < ticket.number - self.latest - 1:
            raise OSError("more tickets are lost than a pipe holds")
        for num_rows in reversed(lost):
            self.under_way.append(self.pipe.take(num_rows * row_bytes))
        self.latest = ticket.number - 1
        if not ticket.num_rows:
            return None
        self.latest = ticket.number
        self.under_way.append(self.pipe.take(ticket.num_rows * row_bytes))
        return self.under_way[-1]


class FarHops:
    """Of one instance. The loop's thread calls; others of its own open pipes."""

    def __init__(self, by: PipeBy, device: torch.device, address: str, row_bytes: int) -> None:
        """``address``: ``tcp://HOST``, by which other hosts reach this one. Raises OSError where
        this cannot be: then all goes as bytes.
        """
        if row_bytes <= MOST_BEHIND_BYTES or not address.startswith(_TCP):
            raise OSError("hidden states are too narrow for pipes, or there are no other hosts")
        self._by, self._device, self._row_bytes = by, device, row_bytes
        self._host = address.removeprefix(_TCP)
        self._name = int.from_bytes(os.urandom(4))
        self._giving: dict[str, _Giving] = {}
        """By the peer's address."""
        self._taking: dict[int, _Taking] = {}
        self._not_before_s: dict[str, float] = {}

    def give(self, hidden: torch.Tensor, to: str) -> memoryview | None:
        """Give hidden states [T, hidden] into the pipe, and return their ticket.

        Else their bytes and what is to be told behind them; None where they go as bytes alone.
        """
        if not to.startswith(_TCP):
            return None
        giving = self._giving.get(to)
        if giving is None:
            self._invite(to)
            return None
        try:
            behind = self._put(giving, hidden)
        except OSError as error:
            logger.warning("hidden states go as bytes to %s for a while: %s", to, error)
            self._leave(to)
            return None
        if isinstance(behind, FarTicket) and behind.num_rows:
            return behind.to_bytes()
        return None if behind is None else with_behind(hidden, behind.to_bytes())

    def take(self, data: bytes | bytearray | memoryview) -> HiddenRows | None:
        """What a ticket tells of, or the rows before something else; None for rows alone.

        Of a ticket whose rows will never come they are lost.
        """
        rows, behind = parted(data, self._row_bytes)
        if behind is None:
            return None
        if isinstance(behind, Invitation):
            self._accept(behind)
            return HiddenRows.of_bytes(rows, self._row_bytes)
        under, reason = self._under(behind)
        if not behind.num_rows:
            return HiddenRows.of_bytes(rows, self._row_bytes)
        if under is None:
            return LostRows(behind.num_rows, reason)
        return FarRows(under, behind.num_rows)

    def _under(self, ticket: FarTicket) -> tuple[Under | None, str]:
        """What it tells of; or why that is lost, if it tells of anything."""
        taking = self._taking.get(ticket.pipe)
        if taking is None:
            return None, "their pipe is gone"
        taking.is_opened.wait(PATIENCE_S)
        try:
            return taking.take(ticket, self._row_bytes), ""
        except OSError as error:
            logger.warning("a pipe from another host is given up: %s", error)
            self._taking.pop(ticket.pipe).close()
            return None, str(error)

    def _put(self, giving: _Giving, hidden: torch.Tensor) -> Behind | None:
        if giving.is_over:
            raise OSError("the other end has not come")
        invitation, giving.invitation = giving.invitation, None
        if invitation is not None or giving.pipe is None:
            return invitation
        if not giving.has_room():
            return giving.told(0)
        # A copy, because a recorded step writes its outcome again into the same memory.
        giving.under_way.append(giving.pipe.give(hidden.view(torch.uint8).flatten().clone()))
        ticket = giving.told(len(hidden))
        giving.before.appendleft(len(hidden))
        giving.number += 1
        return ticket

    def _invite(self, to: str) -> None:
        now_s = time.monotonic()
        if now_s < self._not_before_s.get(to, 0.0):
            return
        self._not_before_s[to] = now_s + RETRY_S
        giving = self._giving[to] = _Giving()

        def open_end() -> None:
            try:
                store, port = open_store(self._host, MOVE_S)
                token = os.urandom(16).hex()
                place = Place(self._host, port, token)
                giving.invitation = Invitation(giving.name, self._name, place)
                giving.has(self._open(store, token, GIVES))
                logger.info("hidden states go through a pipe to %s", to)
            except OSError as error:
                logger.info("hidden states go as bytes to %s for a while: %s", to, error)
                giving.is_over = True

        threading.Thread(target=open_end, name="pipe to", daemon=True).start()

    def _accept(self, invitation: Invitation) -> None:
        for name, former in tuple(self._taking.items()):
            if former.is_over or former.giver == invitation.giver:
                self._taking.pop(name).close()
        taking = self._taking[invitation.pipe] = _Taking(invitation.giver)

        def open_end() -> None:
            place = invitation.place
            try:
                store = join_store(place, MOVE_S)
                taking.has(self._open(store, place.token, TAKES))
            except OSError as error:
                logger.info("hidden states come as bytes from %s: %s", place.host, error)
                taking.is_over = True
            taking.is_opened.set()

        threading.Thread(target=open_end, name="pipe from", daemon=True).start()

    def _open(self, store: dist.Store, token: str, end: int) -> Pipe:
        return open_pipe(self._by, store, token, end, self._host, self._device, MOVE_S)

    def _leave(self, to: str) -> None:
        self._giving.pop(to).close()
        self._not_before_s[to] = time.monotonic() + RETRY_S

    def close(self) -> None:
        """Nothing may be under way."""
        for end in (*self._giving.values(), *self._taking.values()):
            end.close()
