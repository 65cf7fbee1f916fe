"""Hidden states go into the next stage's memory, and nobody reads them before they are there."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kunserve.core.faults import StepVoid
from kunserve.core.ids import GroupId, StepId
from kunserve.engine.asked import Asked
from kunserve.engine.backend import nothing_to_wait_for
from kunserve.engine.cpu.hidden_rows import HiddenRows
from kunserve_extras.torch_body.cuda.driver import Driver
from kunserve_extras.torch_body.hops import hops as hops_module
from kunserve_extras.torch_body.hops import reads as reads_module
from kunserve_extras.torch_body.hops import ways as ways_module
from kunserve_extras.torch_body.hops.hops import Hops, LandedRows
from kunserve_extras.torch_body.hops.lanes import MOST_NUMBER, NUM_SLOTS
from kunserve_extras.torch_body.hops.ways import Way
from tests.conftest import wait_until as eventually
from tests.fakecuda.library import FakeCuda, build
from tests.unit.transport.addresses import fresh_address

ROW_BYTES, MOST_ROWS = 64, 3
CPU = torch.device("cpu")


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    assert made.left() == {}


def opened(address: str | None = None) -> Hops:
    driver = Driver(library=build())
    return Hops(driver, CPU, address or fresh_address(), MOST_ROWS * ROW_BYTES, ROW_BYTES)


def rows_of(value: float, num_rows: int = 2) -> torch.Tensor:
    return torch.full((num_rows, ROW_BYTES // 4), value)


class Pair:
    """A stage and the next one, which have found each other."""

    def __init__(self) -> None:
        self.address = fresh_address()
        self.first, self.second = opened(), opened(self.address)
        assert self.first.give(rows_of(0.0), self.address) is None, "as bytes, and a lane is asked"
        eventually(lambda: self.way.slots is not None and self.second._takers)

    @property
    def way(self) -> Way:
        return self.first._ways[self.address]

    def send(self, hidden: torch.Tensor) -> LandedRows:
        data = self.first.give(hidden, self.address)
        assert data is not None
        landed = self.second.take(bytes(data))
        assert isinstance(landed, LandedRows) and landed.num_rows == len(hidden)
        return landed

    def send_bytes(self, hidden: torch.Tensor) -> HiddenRows:
        """With the note behind them."""
        data = self.first.give(hidden, self.address)
        assert data is not None and data.nbytes > hidden.nbytes
        rows = self.second.take(bytes(data))
        assert rows is not None and not isinstance(rows, LandedRows)
        assert torch.equal(rows.tensor(torch.float32), hidden)
        return rows

    def receive(self, landed: HiddenRows) -> torch.Tensor:
        rows = landed.tensor(torch.float32)
        self.second.reads.ended(self.second.reads.mark())
        return rows

    def close(self) -> None:
        self.first.close()
        self.second.close()


@pytest.fixture
def pair(fake: FakeCuda) -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def asked_of(hidden: HiddenRows, states: torch.Tensor) -> Asked:
    work: Any = SimpleNamespace(is_last=False)
    batch: Any = None
    return Asked(work, batch, hidden, None, states, tuple, nothing_to_wait_for)


def write_late(monkeypatch: pytest.MonkeyPatch, pair: Pair, delay_s: float) -> None:
    """As a device does that is busy: the ticket is on its way before the rows are."""
    original = Way.write

    def write(way: Way, hidden: torch.Tensor, stream: int) -> Any:
        number = way.number
        ticket = original(way, torch.zeros_like(hidden), stream)
        way._driver.write_value(way.slots.word(number), number - 1, stream)  # type: ignore[union-attr]

        def work() -> None:
            way._driver.enter()
            own = way._driver.stream()
            way.slots.rows(number, hidden.nbytes).copy_(hidden.view(torch.uint8).flatten())  # type: ignore[union-attr]
            way._driver.write_value(way.slots.word(number), number, own)  # type: ignore[union-attr]
            way._driver.synchronize(own)
            way._driver.stream_destroy(own)

        if delay_s < 100.0:
            threading.Timer(delay_s, work).start()
        return ticket

    monkeypatch.setattr(Way, "write", write)


def test_rows_come_in_any_number_of_turns(pair: Pair) -> None:
    for turn in range(3 * NUM_SLOTS):
        sent = rows_of(float(turn), 1 + turn % MOST_ROWS)
        assert torch.equal(pair.receive(pair.send(sent)), sent)


def test_a_slot_is_written_again_only_when_it_was_read(pair: Pair) -> None:
    landed = [pair.send(rows_of(float(number))) for number in range(NUM_SLOTS)]
    pair.send_bytes(rows_of(9.0))  # no slot is free
    first = landed[0].tensor(torch.float32)
    pair.send_bytes(rows_of(9.0))  # its step has not ended
    pair.second.reads.ended(pair.second.reads.mark())
    landed.append(pair.send(rows_of(4.0)))
    got = [first, *(pair.receive(one) for one in landed[1:])]
    assert [float(rows[0, 0]) for rows in got] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_what_nobody_reads_is_given_up(pair: Pair) -> None:
    """Its group was no more when it came."""
    for number in range(2 * NUM_SLOTS):
        pair.send(rows_of(float(number)))
    assert torch.equal(pair.receive(pair.send(rows_of(7.0))), rows_of(7.0))


def test_a_later_ticket_gives_back_the_slots_of_lost_ones(pair: Pair) -> None:
    """And one that comes after all is refused: others' rows may lie in its slot."""
    for turn in range(2 * NUM_SLOTS):
        lost = [pair.first.give(rows_of(-1.0), pair.address) for _ in range(turn % NUM_SLOTS)]
        assert all(data is not None and data.nbytes < ROW_BYTES for data in lost), "no slot is free"
        sent = rows_of(float(turn))
        assert torch.equal(pair.receive(pair.send(sent)), sent)
    assert lost[0] is not None
    late = pair.second.take(bytes(lost[0]))
    assert late is not None
    with pytest.raises(StepVoid, match="after later ones"):
        late.tensor(torch.float32)


def test_many_rows_go_as_bytes(pair: Pair) -> None:
    pair.send_bytes(rows_of(1.0, MOST_ROWS + 1))
    assert pair.second.take(bytes(2 * ROW_BYTES)) is None


def test_rows_as_bytes_give_back_the_slots_of_lost_tickets(pair: Pair) -> None:
    """All of them were lost, so no ticket can come that would."""
    for turn in range(3):
        for _ in range(NUM_SLOTS):
            assert pair.first.give(rows_of(-1.0), pair.address) is not None
        pair.send_bytes(rows_of(float(turn)))
        assert torch.equal(pair.receive(pair.send(rows_of(9.0))), rows_of(9.0))


def test_rows_as_bytes_give_back_no_slot_that_is_still_to_be_read(pair: Pair) -> None:
    landed = [pair.send(rows_of(float(number))) for number in range(NUM_SLOTS)]
    pair.send_bytes(rows_of(8.0))
    pair.send_bytes(rows_of(9.0))
    assert [float(pair.receive(one)[0, 0]) for one in landed] == [0.0, 1.0, 2.0, 3.0]


def test_who_gets_no_lane_asks_again(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    first, address = opened(), fresh_address()
    assert first.give(rows_of(1.0), address) is None, "nobody is there"
    second = opened(address)
    assert first.give(rows_of(1.0), address) is None
    assert not first._ways, "not yet again"
    monkeypatch.setattr(hops_module, "RETRY_S", 0.0)
    first._not_before_s.clear()
    eventually(lambda: first.give(rows_of(1.0), address) is not None)
    first.close()
    second.close()


def test_a_lane_without_more_numbers_is_left_once_all_is_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways_module, "MOST_NUMBER", 2)
    monkeypatch.setattr(hops_module, "RETRY_S", 0.0)
    assert MOST_NUMBER > 2
    old, landed = pair.way, [pair.send(rows_of(float(number))) for number in range(2)]
    pair.send_bytes(rows_of(9.0))
    assert [float(pair.receive(one)[0, 0]) for one in landed] == [0.0, 1.0]
    assert pair.first.give(rows_of(9.0), pair.address) is None
    eventually(lambda: pair.first.give(rows_of(2.0), pair.address) is not None)
    assert pair.way is not old and pair.way.number == 2


def test_rows_are_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    write_late(monkeypatch, pair, 0.1)
    assert torch.equal(pair.receive(pair.send(rows_of(5.0))), rows_of(5.0))


def test_who_does_not_wait_reads_garbage(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test before this one can fail."""
    write_late(monkeypatch, pair, 0.1)
    landed = pair.send(rows_of(5.0))
    with monkeypatch.context() as faulty:
        faulty.setattr(Driver, "wait_value", lambda *_: None)
        assert not torch.equal(landed.tensor(torch.float32), rows_of(5.0))
    slots = pair.way.slots
    assert slots is not None
    eventually(lambda: bool((slots.rows(1, 4) != 0).any()))
    eventually(lambda: pair.second.reads._value_at(slots.word(1)) == 1)
    pair.second.reads.ended(pair.second.reads.mark())


@pytest.mark.parametrize("is_dead", [True, False])
def test_rows_that_never_come_hang_nobody(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, is_dead: bool
) -> None:
    """Of a sender that died behind its ticket, or hangs: the step is void."""
    monkeypatch.setattr(reads_module, "PATIENCE_S", 1000.0 if is_dead else 0.2)
    write_late(monkeypatch, pair, 1000.0)
    landed = pair.send(rows_of(5.0))
    if is_dead:
        pair.way.socket.shutdown(2)
    states = landed.tensor(torch.float32)
    assert not asked_of(landed, states).await_input(), "or its next stage would use them"
    with pytest.raises(StepVoid):
        pair.second.reads.ended(pair.second.reads.mark())


def test_what_is_computed_of_rows_is_told_of_once_they_are_there(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_late(monkeypatch, pair, 0.1)
    landed = pair.send(rows_of(5.0))
    with monkeypatch.context() as aside:
        aside.setattr(Hops, "_catch_up", lambda hops: None)  # as on a device
        states = landed.tensor(torch.float32)
    looks: list[int] = []
    assert landed.await_all(lambda: looks.append(1))
    assert looks, "mail is read meanwhile"
    assert asked_of(landed, states).await_input()
    pair.second.reads.ended(pair.second.reads.mark())


def looks_of(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of threads that serve peers, at what is awaited and left."""
    looks: list[float] = []
    look = Hops._look

    def look_and_tell(hops: Hops, now_s: float) -> None:
        look(hops, now_s)
        looks.append(now_s)

    monkeypatch.setattr(Hops, "_look", look_and_tell)
    return looks


def test_a_way_that_is_left_ends_once_all_is_written(
    fake: FakeCuda, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end before that is a death to the peer."""
    fake.answer_after(1 << 40)
    way = pair.way
    with monkeypatch.context() as aside:
        aside.setattr(Hops, "_catch_up", lambda hops: None)  # as on a device
        landed = pair.send(rows_of(5.0))
    with pair.first._lock:
        pair.first._leave(pair.address)
    looks = looks_of(monkeypatch)
    eventually(lambda: len(looks) > 3)
    assert way.socket.fileno() >= 0 and pair.second._takers
    fake.answer_after(1)
    eventually(lambda: not pair.second._takers)
    assert torch.equal(pair.receive(landed), rows_of(5.0))


def test_a_lane_outlives_its_sender_for_a_while(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    landed = pair.send(rows_of(3.0))
    pair.way.socket.shutdown(2)
    eventually(lambda: not pair.second._takers)
    assert torch.equal(pair.receive(landed), rows_of(3.0))
    monkeypatch.setattr(hops_module, "LINGER_S", 0.0)
    eventually(lambda: not pair.second._lanes)


def test_a_dead_receivers_memory_is_let_go_of(pair: Pair) -> None:
    (taker,) = pair.second._takers
    taker.shutdown(2)
    eventually(lambda: pair.address not in pair.first._ways and not pair.first._left)
    assert pair.first.give(rows_of(1.0), pair.address) is None


@pytest.mark.parametrize("refuses", ["words", "export"])
def test_what_the_device_cannot_is_done_as_bytes(fake: FakeCuda, refuses: str) -> None:
    if refuses == "words":
        fake.refuse_values()
    else:
        fake.describe(can_export=False)
    with pytest.raises(OSError):
        opened()


def test_nobody_is_there_or_far_away(fake: FakeCuda) -> None:
    hops = opened()
    for address in ("ipc:///nowhere", "tcp://10.0.0.1:1", ""):
        assert hops.give(rows_of(1.0), address) is None
        assert hops.give(rows_of(1.0), address) is None
    hops.close()


# Tokens


class Group:
    """A pair's first stage and its last one, whose steps sample."""

    def __init__(self, pair: Pair, number: int = 1) -> None:
        self.last, self.leader, self.to = pair.first, pair.second, pair.address
        self.group_id = GroupId(number)

    def write(self, step: int, *tokens: int) -> bytes:
        """In two parts, as of many rows."""
        parts = [torch.tensor(tokens[:1]), torch.tensor(tokens[1:], dtype=torch.int64)]
        word = self.last.write_tokens(parts, self.to, self.group_id, StepId(step))
        assert word is not None
        return bytes(word)

    def tell(self, step: int, word: bytes) -> None:
        self.leader.tokens_come(memoryview(word), self.group_id, StepId(step))

    def read(self, step: int, num_tokens: int) -> list[int]:
        """As a step that feeds on them, to its end."""
        fed = self.leader.read_tokens(StepId(step), num_tokens)
        assert fed.await_all()
        self.leader.reads.ended(self.leader.reads.mark())
        return fed.tokens.tolist()


def test_tokens_are_read_without_a_ticket_of_their_own(pair: Pair) -> None:
    """Once one step has told where; also of steps in between that sample nothing."""
    group = Group(pair)
    assert not group.leader.feeds_from(group.group_id)
    word = group.write(3, 7, 8)
    assert not group.leader.feeds_from(group.group_id), "it has not heard of them"
    group.tell(3, word)
    assert group.leader.feeds_from(group.group_id)
    for step in range(4, 4 + 3 * NUM_SLOTS):
        if step % 5:
            group.write(step, step, step + 1, step + 2)
            assert group.read(step, 2) == [step, step + 1]
    assert torch.equal(pair.receive(pair.send(rows_of(1.0))), rows_of(1.0)), "rows have slots left"


def test_another_group_s_tokens_are_not_taken_for_these(pair: Pair) -> None:
    """Its steps are numbered anew, and its words are in the same places."""
    former = Group(pair)
    former.tell(0, former.write(0, 1))
    for step in range(1, 10):
        former.write(step, 1)
    group = Group(pair, 2)
    assert not group.leader.feeds_from(group.group_id)
    group.tell(0, group.write(0, 2))
    assert not group.leader.feeds_from(former.group_id)

    def write_late() -> None:
        group.last._driver.enter()
        group.write(1, 3)

    threading.Timer(0.1, write_late).start()
    assert group.read(1, 1) == [3], "and not one of the former's"


def test_a_lane_that_is_gone_feeds_nobody(pair: Pair) -> None:
    group = Group(pair)
    word = group.write(0, 1)
    group.tell(0, word)
    pair.way.socket.shutdown(2)
    eventually(lambda: not group.leader.feeds_from(group.group_id))
    group.tell(0, word[:-8] + bytes(8))
    group.tell(0, b"something else")
    assert not group.leader.feeds_from(group.group_id)


@pytest.mark.parametrize("why", ["dead", "late", "nobody wants them"])
def test_tokens_that_never_come_hang_nobody(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(reads_module, "PATIENCE_S", 0.2 if why == "late" else 1000.0)
    group = Group(pair)
    group.tell(0, group.write(0, 1))
    if why == "dead":
        pair.way.socket.shutdown(2)
    if why == "nobody wants them":
        threading.Timer(0.1, group.leader.stop_waiting).start()
    fed = group.leader.read_tokens(StepId(1), 1)
    assert not fed.await_all()
    with pytest.raises(StepVoid):
        group.leader.reads.ended(group.leader.reads.mark())


def test_a_lane_without_numbers_for_tokens_is_asked_anew(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After months: streams compare words with a sign."""
    monkeypatch.setattr(hops_module, "RETRY_S", 0.0)
    group, former = Group(pair), pair.way
    former._last_token_number = MOST_NUMBER - 1
    group.tell(0, group.write(0, 1))
    assert group.read(0, 1) == [1]
    assert pair.first.write_tokens([torch.tensor([2])], pair.address, GroupId(1), StepId(1)) is None
    assert pair.first.write_tokens([torch.tensor([3])], pair.address, GroupId(1), StepId(2)) is None
    eventually(lambda: pair.way is not former and pair.way.slots is not None)
    group.tell(3, group.write(3, 4))
    assert group.read(3, 1) == [4]
