"""Hidden states go through pipes between hosts, here of gloo: nobody reads others' rows, a pipe
that has lost tickets is used again, and no wait lasts for ever.
"""

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from kunserve.core.faults import StepVoid
from kunserve.engine.cpu.hidden_rows import HiddenRows, bytes_of
from kunserve_extras.torch_body.hops import far as far_module
from kunserve_extras.torch_body.hops.far import NUM_UNDER_WAY, FarHops, FarRows
from kunserve_extras.torch_body.hops.pipes import GlooPipe, PipeBy, _OnDevice, _Watched
from tests.conftest import wait_until as eventually

ROW_BYTES = 256
HERE = "tcp://127.0.0.1"
THERE = "tcp://127.0.0.1:4711"
"""By which the links know the second stage."""


def opened() -> FarHops:
    return FarHops(PipeBy.GLOO, torch.device("cpu"), HERE, ROW_BYTES)


def rows_of(value: float, num_rows: int = 2) -> torch.Tensor:
    return torch.full((num_rows, ROW_BYTES // 4), value)


class Pair:
    """A stage and the next one, on another host."""

    def __init__(self) -> None:
        self.first, self.second = opened(), opened()

    def give(self, hidden: torch.Tensor) -> bytes:
        """What the links carry."""
        data = self.first.give(hidden, THERE)
        return bytes(bytes_of(hidden) if data is None else data)

    def take(self, data: bytes) -> HiddenRows:
        return self.second.take(data) or HiddenRows.of_bytes(data, ROW_BYTES)

    def send(self, hidden: torch.Tensor) -> bool:
        """Whether they went through the pipe."""
        rows = self.take(self.give(hidden))
        assert torch.equal(rows.tensor(torch.float32), hidden)
        return isinstance(rows, FarRows)

    def meet(self) -> "Pair":
        eventually(lambda: self.send(rows_of(1.0)))
        return self

    @property
    def pipe(self) -> GlooPipe:
        pipe = self.first._giving[THERE].pipe
        assert isinstance(pipe, GlooPipe)
        return pipe

    def close(self) -> None:
        self.first.close()
        self.second.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_rows_go_through_a_pipe_once_both_ends_are_there(pair: Pair) -> None:
    assert not pair.send(rows_of(1.0)), "as bytes, and a pipe is opened"
    pair.meet()
    for turn in range(3 * NUM_UNDER_WAY):
        assert pair.send(rows_of(float(turn), 1 + turn % 3))


def test_what_is_taken_is_read_later_and_in_any_order(pair: Pair) -> None:
    pair.meet()
    taken = [pair.take(pair.give(rows_of(float(n), n + 1))) for n in range(NUM_UNDER_WAY)]
    for number in (2, 0, 3, 1):
        assert (taken[number].tensor(torch.float32) == number).all()


def test_what_nobody_reads_holds_up_nobody(pair: Pair) -> None:
    pair.meet()
    for turn in range(3 * NUM_UNDER_WAY):
        pair.take(pair.give(rows_of(-1.0)))
        if turn % NUM_UNDER_WAY == 0:
            eventually(lambda: pair.send(rows_of(7.0)))


def test_lost_tickets_hold_up_nobody(pair: Pair) -> None:
    """Any number of them, of any size, all that fit among these."""
    draw = random.Random(3)
    before = pair.meet().pipe
    for turn in range(40):
        lost = [pair.give(rows_of(-1.0, draw.randint(1, 5))) for _ in range(draw.randint(0, 6))]
        assert sum(len(data) < ROW_BYTES for data in lost) <= NUM_UNDER_WAY
        pair.send(rows_of(float(turn)))
    eventually(lambda: pair.send(rows_of(9.0)))
    assert pair.pipe is before and pair.first._giving[THERE].number > NUM_UNDER_WAY


def test_what_is_too_much_goes_as_bytes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.meet()
    giving = pair.first._giving[THERE]
    eventually(lambda: giving.has_room() and not giving.under_way)
    with monkeypatch.context() as slow:  # nothing is told to have been sent, however fast gloo is
        slow.setattr(_Watched, "is_done", False)
        given = [pair.give(rows_of(float(number))) for number in range(NUM_UNDER_WAY + 2)]
    assert [len(data) < ROW_BYTES for data in given] == [True] * NUM_UNDER_WAY + [False] * 2
    taken = [pair.take(data).tensor(torch.float32) for data in given]
    assert [float(rows[0, 0]) for rows in taken] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_recorded_step_may_write_its_outcome_again(pair: Pair) -> None:
    pair.meet()
    hidden = rows_of(5.0)
    data = pair.give(hidden)
    hidden.fill_(6.0)
    assert (pair.take(data).tensor(torch.float32) == 5.0).all()


def test_late_tickets_and_those_of_no_pipe_are_void(pair: Pair) -> None:
    pair.meet()
    first, second = (pair.give(rows_of(value)) for value in (1.0, 2.0))
    assert (pair.take(second).tensor(torch.float32) == 2.0).all()
    for late in (first, pair.give(rows_of(3.0))):
        with pytest.raises(StepVoid):
            pair.take(late).tensor(torch.float32)


@pytest.mark.parametrize("end", ["first", "second"])
def test_a_dead_end_is_noticed_and_another_pipe_opened(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(far_module, "RETRY_S", 0.0)
    pair.meet()
    data = pair.give(rows_of(5.0))
    getattr(pair, end).close()
    setattr(pair, end, opened())
    rows = pair.take(data)
    if end == "second":
        with pytest.raises(StepVoid):
            rows.tensor(torch.float32)
    else:
        with suppress(StepVoid):  # it may have been sent before
            assert torch.equal(rows.tensor(torch.float32), rows_of(5.0))

    def meets() -> bool:
        try:
            return pair.send(rows_of(6.0))
        except StepVoid:
            return False  # into the former pipe

    eventually(meets)


def test_rows_that_do_not_come_are_waited_for_a_while(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.meet()
    monkeypatch.setattr(far_module, "PATIENCE_S", 0.1)
    ticket = pair.first._giving[THERE].told(2)
    rows = pair.second.take(bytes(ticket.to_bytes()))
    assert isinstance(rows, FarRows)
    with pytest.raises(StepVoid):
        rows.tensor(torch.float32)


def test_a_pipe_in_which_nothing_moves_is_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_module, "RETRY_S", 0.0)
    pair.meet()
    before = pair.pipe
    pair.give(rows_of(1.0))
    monkeypatch.setattr(far_module, "MOVE_S", -1.0)  # whether or not the system has taken the rows
    assert pair.first.give(rows_of(2.0), THERE) is None
    monkeypatch.undo()
    pair.first._not_before_s.clear()
    pair.meet()
    assert pair.pipe is not before


def test_an_invitation_that_is_lost_is_sent_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_module, "RETRY_S", 0.0)
    with monkeypatch.context() as hasty:
        hasty.setattr(far_module, "MOVE_S", 0.2)
        eventually(lambda: len(pair.give(rows_of(1.0))) > rows_of(1.0).nbytes)
        eventually(lambda: pair.first._giving[THERE].is_over)
    pair.meet()


class DeviceWork:
    """As NCCL's: over when it has failed, too, and nobody is told."""

    is_over, failure = False, None

    def is_completed(self) -> bool:
        return self.is_over

    def exception(self) -> RuntimeError | None:
        return self.failure


def test_what_fails_on_a_device_is_not_taken_for_done() -> None:
    work: Any = DeviceWork()
    under = _OnDevice(torch.zeros(1), work)
    assert not under.is_done
    work.is_over = True
    assert under.is_done
    work.failure = RuntimeError("the other host is gone")
    with pytest.raises(OSError, match="other host"):
        _ = under.is_done


def test_what_cannot_be_is_said_at_once() -> None:
    for address, row_bytes in (("ipc:///here", ROW_BYTES), (HERE, 64)):
        with pytest.raises(OSError):
            FarHops(PipeBy.GLOO, torch.device("cpu"), address, row_bytes)
    hops = opened()
    assert hops.give(rows_of(1.0), "ipc:///there") is None
    assert hops.take(bytes(2 * ROW_BYTES)) is None
