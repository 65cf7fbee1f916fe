"""A way: the sender's side of a lane, from the question for one to its end."""

import contextlib
import os
import socket
from collections.abc import Sequence

import torch

from kunserve.core.ids import GroupId, StepId
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.hops.lanes import (
    MOST_NUMBER,
    MOST_TOKENS,
    NUM_SLOTS,
    OFFER_BYTES,
    Offer,
    Slots,
    Ticket,
)


class Way:
    """To one peer: its lane, mapped here."""

    def __init__(self, driver: Driver, desk: str) -> None:
        """Raises OSError where nobody hands out lanes."""
        self._driver = driver
        self.slots: Slots | None = None
        """None while it is not there, and once it is refused."""
        self.number = 1
        self._group_id: GroupId | None = None
        """Whose tokens are written."""
        self._first_token_number = self._last_token_number = 0
        """Of the group's step 0, if that had been written; and of the last step that was."""
        self._written = driver.event()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        try:
            self.socket.connect(desk)
        except OSError:
            self.close()
            raise

    def accept(self, device: torch.device) -> None:
        """Map what has come. Raises OSError for anything else, and at the peer's end."""
        data, fds, _, _ = socket.recv_fds(self.socket, OFFER_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        try:
            if self.slots is not None or len(fds) != 2:
                raise OSError("the peer has gone, or gives no lane")
            offer = Offer.of_bytes(data)
            handle = self._driver.import_(fds[0])
            try:
                self.slots = Slots(self._driver, device, handle, offer, fds[1])
            finally:
                self._driver.release(handle)  # what is mapped lives on without it
        finally:
            for fd in fds:
                os.close(fd)

    def write(self, hidden: torch.Tensor, stream: int) -> Ticket | None:
        """Have the stream write rows and their word; None where there is no room.

        Raises OSError once all numbers are used up, and what was sent has been read.
        """
        slots, number = self.slots, self.number
        if slots is None or not slots.is_free(number):
            return None
        if number > MOST_NUMBER:
            if all(slots.is_free(number + more) for more in range(NUM_SLOTS)):
                raise OSError("a lane has no more numbers")
            return None
        if hidden.nbytes > slots.offer.slot_bytes:
            return None
        slots.rows(number, hidden.nbytes).copy_(hidden.view(torch.uint8).flatten())
        self._driver.write_value(slots.word(number), number, stream)
        self._driver.record(self._written, stream)
        self.number = number + 1
        return Ticket(slots.offer.lane, number, len(hidden))

    def write_tokens(
        self, parts: Sequence[torch.Tensor], group_id: GroupId, step_id: StepId, stream: int
    ) -> Ticket | None:
        """Have the stream write what a step samples, and its word; None without a lane.

        Once this has given a ticket it is called for each of the group's steps that sample. Raises
        OSError once all numbers are used up: a step that awaits these tokens is void then.
        """
        if self.slots is None or sum(map(len, parts)) > MOST_TOKENS:
            return None
        if group_id != self._group_id:
            self._group_id = group_id
            self._first_token_number = self._last_token_number + 1 - step_id
        number = self._last_token_number = self._first_token_number + step_id
        if number > MOST_NUMBER:
            raise OSError("a lane has no more numbers")
        tokens, num_tokens = self.slots.tokens(number), 0
        for part in parts:
            tokens[num_tokens : num_tokens + len(part)].copy_(part)
            num_tokens += len(part)
        self._driver.write_value(self.slots.token_word(number), number, stream)
        self._driver.record(self._written, stream)
        return Ticket(self.slots.offer.lane, number, num_tokens)

    def note(self) -> Ticket | None:
        """For rows that go as bytes: which tickets were sent before them. None without a lane."""
        return None if self.slots is None else Ticket(self.slots.offer.lane, self.number, 0)

    @property
    def is_written(self) -> bool:
        """Whether all that the stream was to write is there, so that ``close`` does not wait."""
        return self._driver.is_done(self._written)

    def close(self) -> None:
        """Once all that was written is there: a peer takes an earlier end for a death."""
        if self.slots is not None:
            self._driver.wait(self._written)
        self.socket.close()
        if self.slots is not None:
            with contextlib.suppress(OSError):  # then it stays mapped
                self.slots.close()
            self.slots = None
        self._driver.event_destroy(self._written)
