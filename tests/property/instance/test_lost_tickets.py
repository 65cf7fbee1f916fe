"""Tickets of hidden states are lost, come late and twice, and both ends are replaced: nobody ever
reads rows of another microbatch, and lanes are used again soon.
"""

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.faults import StepVoid
from kunserve.engine.cpu.hidden_rows import bytes_of
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.hops import hops as hops_module
from kunserve_extras.torch_body.hops.hops import Hops, LandedRows
from kunserve_extras.torch_body.hops.lanes import NUM_SLOTS, Ticket
from kunserve_extras.torch_body.hops.rows import LostRows
from kunserve_extras.torch_body.hops.ways import Way
from tests.conftest import wait_until as eventually
from tests.examples import examples
from tests.fakecuda.library import FakeCuda, build
from tests.unit.transport.addresses import fresh_address

ROW_BYTES, MOST_ROWS = 64, 3
NUM_ACTIONS = 60
MOST_DELAY_S = 0.002
GARBAGE = -7.0
WRITE = Way.write
CLOSE = Way.close


def is_ticket(data: bytes | memoryview | None) -> bool:
    return data is not None and len(data) < ROW_BYTES


class LateStreams:
    """What senders' streams write comes in its order, but late: tickets overtake rows."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._jobs = draw, queue.Queue[Any]()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def write(self, way: Way, hidden: torch.Tensor, stream: int) -> Ticket | None:
        """As ``Way.write``, which writes garbage here, and whose word is taken back at once."""
        ticket = WRITE(way, torch.full_like(hidden, GARBAGE), stream)
        if ticket is None:
            return None
        slots, number = way.slots, ticket.number
        assert slots is not None
        way._driver.write_value(slots.word(number), number - 1, stream)
        way._driver.synchronize(stream)
        rows, data = slots.rows(number, hidden.nbytes), hidden.view(torch.uint8).flatten()
        self._jobs.put((way._driver, rows, data, slots.word(number), number))
        return ticket

    def end(self, way: Way) -> None:
        """As ``Way.close``, which waits for all that its stream writes."""
        self.settle()
        CLOSE(way)

    def settle(self) -> None:
        self._jobs.join()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            driver, rows, data, word, number = job
            driver.enter()
            time.sleep(self._draw.random() * MOST_DELAY_S)
            rows.copy_(data)
            own = driver.stream()
            driver.write_value(word, number, own)
            driver.synchronize(own)
            driver.stream_destroy(own)
            self._jobs.task_done()


class Links:
    """Two stages, and between them links that keep the order of what they do not lose."""

    def __init__(self, draw: random.Random, streams: LateStreams) -> None:
        self._draw, self._streams = draw, streams
        self.address = fresh_address()
        self.first, self.second = self._opened(fresh_address()), self._opened(self.address)
        self.under_way: deque[tuple[float, bytes]] = deque()
        self.landed: deque[tuple[float, LandedRows]] = deque()
        self.tickets: list[bytes] = []
        """That have come."""
        self.astray: set[bytes] = set()
        """Into a lane of the stage's process before: the sender has not heard of its end."""
        self.value = 0.0

    @staticmethod
    def _opened(address: str) -> Hops:
        most_bytes = MOST_ROWS * ROW_BYTES
        return Hops(Driver(library=build()), torch.device("cpu"), address, most_bytes, ROW_BYTES)

    def send(self) -> bool:
        """Whether it went into a lane."""
        self.value += 1.0
        num_rows = self._draw.randint(1, MOST_ROWS)
        hidden = torch.full((num_rows, ROW_BYTES // 4), self.value)
        data = self.first.give(hidden, self.address)
        self.under_way.append((self.value, bytes(bytes_of(hidden) if data is None else data)))
        if data is not None and is_ticket(data):
            ticket = Ticket.of_bytes(data)
            assert ticket is not None
            if ticket.lane not in self.second._lanes:
                self.astray.add(bytes(data))
        return is_ticket(data)

    def take(self) -> None:
        """One message comes; and perhaps the oldest rows that have come are read."""
        if self.under_way:
            self._take(*self.under_way.popleft())
        if self.landed and self._draw.random() < 0.7:
            value, rows = self.landed.popleft()
            if self._draw.random() < 0.9:  # else its group is no more
                self._read(value, rows)

    def _take(self, value: float, data: bytes, *, is_late: bool = False) -> None:
        rows = self.second.take(data)
        assert is_late or data in self.astray or not isinstance(rows, LostRows)
        if isinstance(rows, LandedRows):
            self.tickets.append(data)
            self.landed.append((value, rows))
        elif rows is not None:
            with suppress(StepVoid) if is_ticket(data) else nullcontext():
                assert (rows.tensor(torch.float32) == value).all()

    def _read(self, value: float, rows: LandedRows) -> None:
        read = rows.tensor(torch.float32)
        assert (read == value).all(), (read, value)
        self.second.reads.ended(self.second.reads.mark())

    def take_all(self) -> None:
        while self.under_way or self.landed:
            self.take()

    def lose(self) -> None:
        """The newest under way, so that nothing behind them tells of it."""
        for _ in range(min(self._draw.randint(1, NUM_SLOTS), len(self.under_way))):
            self.under_way.pop()

    def twice(self) -> None:
        """A ticket that came comes again, perhaps long after."""
        if self.tickets:
            assert isinstance(self.second.take(self._draw.choice(self.tickets)), LostRows)

    def late(self) -> None:
        """The oldest under way comes behind the next: refused, if that told of it."""
        if len(self.under_way) > 1:
            oldest = self.under_way.popleft()
            self._take(*self.under_way.popleft())
            self._take(*oldest, is_late=True)

    def replace_first(self) -> None:
        self._streams.settle()
        self.under_way.clear()
        self.first.close()
        self.first = self._opened(fresh_address())

    def replace_second(self) -> None:
        """At the same address, the worst that can be: what is under way comes to the new one."""
        self._streams.settle()
        self.landed.clear()
        self.second.close()
        self.second = self._opened(self.address)
        for _, data in filter(lambda sent: is_ticket(sent[1]), self.under_way):
            assert isinstance(self.second.take(data), LostRows)
        self.under_way.clear()

    def close(self) -> None:
        self.landed.clear()
        self._streams.settle()
        self.first.close()
        self.second.close()


ACTIONS = (
    (Links.send, 12.0),
    (Links.take, 9.0),
    (Links.lose, 4.0),
    (Links.twice, 1.0),
    (Links.late, 1.0),
    (Links.replace_first, 0.3),
    (Links.replace_second, 0.3),
)
"""And how likely each is."""


@contextmanager
def links_of(draw: random.Random) -> Iterator[Links]:
    streams = LateStreams(draw)
    with pytest.MonkeyPatch.context() as patch, closing(streams):
        patch.setattr(Way, "write", lambda *given: streams.write(*given))
        patch.setattr(Way, "close", lambda way: streams.end(way))
        patch.setattr(hops_module, "RETRY_S", 0.0)
        patch.setattr(hops_module, "LINGER_S", 0.0)
        patch.setattr(hops_module, "LOOK_GAP_S", 0.01)
        with closing(Links(draw, streams)) as links:
            yield links


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 1 << 32))
def test_nobody_reads_others_rows_and_lanes_are_used_again(seed: int) -> None:
    fake, draw = FakeCuda(), random.Random(seed)
    with links_of(draw) as links:
        for _ in range(NUM_ACTIONS):
            (action,) = draw.choices(*zip(*ACTIONS, strict=True))
            action(links)
        links.take_all()

        def goes_into_a_lane() -> bool:
            num_astray = len(links.astray)
            is_used = links.send()  # else its note gives lost slots back
            links.take_all()
            return is_used and len(links.astray) == num_astray

        eventually(goes_into_a_lane)  # and not as bytes for good
    assert fake.left() == {}
