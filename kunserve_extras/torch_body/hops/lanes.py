"""A lane: memory of the instance that receives, into which one sender writes.

It has a few slots, each with a word that a sender's stream writes behind the rows; and as many for
tokens (``tokens.py``). Which slots may
be written again, the receiver tells by numbers in host memory, because a stream that waited for a
word of another device's memory would depend on the link between them. A lane has one sender only:
what one that is given up still writes disturbs nobody.
"""

import mmap
import os
import struct
from typing import NamedTuple

import numpy as np
import torch

from kunserve.engine.memory.wrap import wrap
from kunserve_extras.torch_body.cuda.driver import Driver

NUM_SLOTS = 4
MOST_SLOT_BYTES = 8 << 20
"""Of 14B in bfloat16 819 rows; prompts of more take so long that their way does not show."""
MOST_NUMBER = (1 << 31) - 1
"""Words have 32 bits, and streams compare them with a sign: after weeks a lane is asked anew."""
MOST_TOKENS = 4096
"""Of one step."""
_TOKEN_BYTES = 8
_WORD_BYTES = 256
_WORDS_BYTES = _WORD_BYTES * 2 * NUM_SLOTS
_TICKET = struct.Struct("<8sIII4x")
_TICKET_MARK = b"kunshop1"
TICKET_BYTES = _TICKET.size
_OFFER = struct.Struct("<IQQ")
OFFER_BYTES = _OFFER.size


class Offer(NamedTuple):
    """What a sender is told of its lane, beside descriptors of its memory and its credits."""

    lane: int
    slot_bytes: int
    num_bytes: int

    def to_bytes(self) -> bytes:
        """For the wire."""
        return _OFFER.pack(*self)

    @classmethod
    def of_bytes(cls, data: bytes) -> "Offer":
        """From the wire. Raises OSError for anything else."""
        if len(data) != OFFER_BYTES:
            raise OSError("the peer has no lane")
        return cls(*_OFFER.unpack(data))


class Ticket(NamedTuple):
    """What goes by the links instead of hidden states: where these are."""

    lane: int
    """A number drawn by chance, so that it is no former lane's."""
    number: int
    """Of the sender's microbatches in this lane, from 1 on; it says which slot."""
    num_rows: int
    """None in a note, which is behind rows that go as bytes: every ticket with a smaller number was
    sent before."""

    @property
    def is_note(self) -> bool:
        """Whether it tells of no rows."""
        return self.num_rows == 0

    def to_bytes(self) -> memoryview:
        """For the wire."""
        return memoryview(_TICKET.pack(_TICKET_MARK, *self))

    @classmethod
    def of_bytes(cls, data: bytes | bytearray | memoryview) -> "Ticket | None":
        """From the wire; None for what are rows, which are wider than a ticket."""
        if len(data) != TICKET_BYTES:
            return None
        mark, *numbers = _TICKET.unpack(data)
        return cls(*numbers) if mark == _TICKET_MARK else None


def parted(
    data: bytes | bytearray | memoryview, row_bytes: int
) -> tuple[memoryview, Ticket | None]:
    """Rows, none perhaps, and what is behind them, if anything. A row is wider than a ticket."""
    view = memoryview(data)
    if view.nbytes % row_bytes != TICKET_BYTES:
        return view, None
    rows, end = view[:-TICKET_BYTES], Ticket.of_bytes(view[-TICKET_BYTES:])
    assert end is not None and end.is_note == bool(rows.nbytes), (view.nbytes, end)
    return rows, end


def lane_bytes(slot_bytes: int, granularity_bytes: int) -> int:
    """What a lane takes of the device."""
    wanted = NUM_SLOTS * (slot_bytes + MOST_TOKENS * _TOKEN_BYTES) + _WORDS_BYTES
    return -(-wanted // granularity_bytes) * granularity_bytes


class Slots:
    """A lane's memory as it is mapped on one side, and its credits."""

    def __init__(
        self, driver: Driver, device: torch.device, handle: int, offer: Offer, credits_fd: int
    ) -> None:
        """Map it; the handle is the caller's to release. Raises OSError."""
        self.offer = offer
        self._driver = driver
        self._num_bytes = offer.num_bytes
        self._credits = mmap.mmap(credits_fd, mmap.PAGESIZE)
        self._credit = np.frombuffer(self._credits, dtype=np.uint32)[:NUM_SLOTS]
        step = driver.granularity_bytes()
        self._address = driver.reserve(self._num_bytes, step)
        try:
            driver.map(self._address, self._num_bytes, handle)
            try:
                driver.allow(self._address, self._num_bytes)
            except OSError:
                driver.unmap(self._address, self._num_bytes)
                raise
        except OSError:
            driver.unreserve(self._address, self._num_bytes)
            raise
        self._whole = wrap(self._address, self._num_bytes, device)

    def rows(self, number: int, num_bytes: int) -> torch.Tensor:
        """The first bytes of that microbatch's slot, as uint8."""
        at = number % NUM_SLOTS * self.offer.slot_bytes
        return self._whole[at : at + num_bytes]

    def tokens(self, number: int) -> torch.Tensor:
        """Room for the tokens of a step, int64."""
        at = self._num_bytes - _WORDS_BYTES - (1 + number % NUM_SLOTS) * MOST_TOKENS * _TOKEN_BYTES
        return self._whole[at : at + MOST_TOKENS * _TOKEN_BYTES].view(torch.int64)

    def word(self, number: int) -> int:
        """Address of what says that the slot's rows are there."""
        return self.words[number % NUM_SLOTS]

    def token_word(self, number: int) -> int:
        """Address of what says that the step's tokens are there."""
        return self.words[NUM_SLOTS + number % NUM_SLOTS]

    @property
    def words(self) -> list[int]:
        """Addresses of all words."""
        end = self._address + self._num_bytes
        return list(range(end - _WORDS_BYTES, end, _WORD_BYTES))

    def is_free(self, number: int) -> bool:
        """Whether what was in that microbatch's slot has been read."""
        return int(self._credit[number % NUM_SLOTS]) == max(0, number - NUM_SLOTS)

    def give_back(self, number: int) -> None:
        """Its rows were read, or will never be."""
        self._credit[number % NUM_SLOTS] = number

    def close(self) -> None:
        """Unmap it. Nothing may be under way."""
        self._driver.unmap(self._address, self._num_bytes)
        self._driver.unreserve(self._address, self._num_bytes)


class Lane:
    """The receiver's side, which owns the memory."""

    def __init__(
        self, driver: Driver, device: torch.device, number: int, slot_bytes: int, stream: int
    ) -> None:
        """Raises OSError where there is no memory, or where streams cannot wait for words."""
        num_bytes = lane_bytes(slot_bytes, driver.granularity_bytes())
        self._driver = driver
        self.num_open = 0
        """Tickets that are neither read nor given up."""
        self.left_s: float | None = None
        """Since when it has no sender."""
        self._latest = 0
        """Of the tickets that have come."""
        self._handle = driver.create(num_bytes)
        self.credits_fd = os.memfd_create("kunserve-credits", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.credits_fd, mmap.PAGESIZE)
            offer = Offer(number, slot_bytes, num_bytes)
            self.slots = Slots(driver, device, self._handle, offer, self.credits_fd)
        except OSError:
            self._let_go()
            raise
        try:
            for word in self.slots.words:  # memory is not always given out empty
                driver.write_value(word, 0, stream)
                driver.wait_value(word, 0, stream)
            driver.synchronize(stream)
        except OSError:
            self.close()
            raise

    def has_come(self, number: int) -> bool:
        """A ticket has; False where it was taken for lost before."""
        if number <= self._latest:
            return False
        self.pass_over(number)
        self._latest = number
        return True

    def pass_over(self, number: int) -> None:
        """Tickets before that one have come, or are lost, because the links keep the order: then
        their slots are given back.

        Rows of a lost ticket may still be on their way. They and their word come before what is
        written there next, because one stream writes all that a sender sends.
        """
        for lost in range(self._latest + 1, number):
            self.slots.give_back(lost)
        self._latest = max(self._latest, number - 1)

    def export(self) -> int:
        """A descriptor of the memory, the caller's to close."""
        return self._driver.export(self._handle)

    def close(self) -> None:
        """Give it back."""
        self.slots.close()
        self._let_go()

    def _let_go(self) -> None:
        self._driver.release(self._handle)
        os.close(self.credits_fd)
