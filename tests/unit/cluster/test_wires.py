"""Leases over the wire, connections that are looked after, the gate before a transition."""

from collections.abc import Iterable

import pytest

from kunserve.cluster.instance.lease import LeaseTerms
from kunserve.cluster.instance.prepare_gate import PrepareGate
from kunserve.cluster.instance.wire_lease import WireLease
from kunserve.cluster.processes.reachability import DOWN_S, Reachability
from kunserve.core.ids import GroupId, InstanceId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import Abort, Form, Prepare, Rollback
from kunserve.transport.wire.pulse import GIVEN_UP, Answer

ZERO, ONE = InstanceId(0), InstanceId(1)


class Leased:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.deaths: list[str] = []
        terms = LeaseTerms("", "front", 30.0)
        self.lease = WireLease(terms, 8.0, clock=lambda: self.now_s, die=self.deaths.append)

    def answer(self, question: bytes, front: str = "front") -> None:
        self.lease.answered(Answer(question, front).to_bytes())


def test_a_lease_counts_from_when_it_was_asked_for() -> None:
    leased = Leased()
    question = leased.lease.question()
    leased.now_s += 7.0
    leased.answer(question)
    assert not leased.lease.is_alone
    leased.now_s += 1.0
    assert leased.lease.is_alone, "an answer that was long on its way counts from its question"


def test_a_late_answer_of_an_early_question_shortens_nothing() -> None:
    leased = Leased()
    early = leased.lease.question()
    leased.now_s += 5.0
    leased.answer(leased.lease.question())
    leased.answer(early)
    leased.now_s += 7.9
    assert not leased.lease.is_alone


def test_an_answer_makes_who_was_alone_served_again() -> None:
    leased = Leased()
    leased.now_s += 20.0
    assert leased.lease.is_alone
    leased.answer(leased.lease.question(), "another")
    assert not leased.lease.is_alone
    assert (leased.lease.started_by, leased.lease.front) == ("front", "another")
    assert not leased.deaths


def test_who_is_given_up_ends_at_once() -> None:
    leased = Leased()
    leased.answer(leased.lease.question(), GIVEN_UP)
    assert leased.deaths == ["the front has given this process up"]


def test_a_connection_that_comes_back_soon_is_no_loss() -> None:
    down: set[InstanceId] = set()
    reach = Reachability(lambda i: i not in down)
    assert reach.lost([ZERO, ONE], 0.0) == []
    down.add(ONE)
    assert reach.lost([ZERO, ONE], 1.0) == []
    down.clear()
    assert reach.lost([ZERO, ONE], 1.0 + 2 * DOWN_S) == []
    down.add(ZERO)
    assert reach.lost([ZERO, ONE], 5.0) == []
    assert reach.lost([ZERO, ONE], 5.1 + DOWN_S) == [ZERO]
    assert reach.lost([ONE], 5.0 + 2 * DOWN_S) == []


class Gate:
    def __init__(self) -> None:
        self.down: set[InstanceId] = {ONE}
        self.gate = PrepareGate(ZERO, self._unreached, 2.0)

    def _unreached(self, peers: Iterable[InstanceId]) -> list[InstanceId]:
        return [peer for peer in peers if peer in self.down]


def prepare(number: int = 7) -> Prepare:
    old = tuple(GroupLayout(GroupId(i), (Stage(InstanceId(i), LayerRange(0, 4)),)) for i in (0, 1))
    stages = (Stage(ZERO, LayerRange(0, 2)), Stage(ONE, LayerRange(2, 4)))
    return Prepare(TransitionId(number), old, (GroupLayout(GroupId(9), stages),), ())


def test_a_transition_waits_for_its_connections() -> None:
    world = Gate()
    assert not world.gate.passes(prepare(), 0.0) and world.gate.is_waiting
    assert world.gate.passes(Abort("r"), 0.0)  # type: ignore[arg-type]
    assert world.gate.turn(1.0) == ([], [])
    world.down.clear()
    assert world.gate.turn(1.1) == ([prepare()], [])
    assert not world.gate.is_waiting
    assert world.gate.passes(prepare(8), 2.0)
    assert world.gate.passes(Rollback(TransitionId(8)), 2.0), "the agent has heard of it"


def test_a_transition_over_a_cut_is_refused() -> None:
    world = Gate()
    world.gate.passes(prepare(), 0.0)
    passed, [refusal] = world.gate.turn(2.1)
    assert not passed and refusal.transition_id == 7 and refusal.instance_id == ZERO
    assert refusal.refusal == "no connection to instances [1]"
    assert not world.gate.is_waiting


@pytest.mark.parametrize("end", [Rollback(TransitionId(7)), Form(prepare().new[0], ())])
def test_what_is_called_off_meanwhile_is_forgotten(end: Rollback | Form) -> None:
    world = Gate()
    world.gate.passes(prepare(), 0.0)
    assert world.gate.passes(end, 0.0) is isinstance(end, Form)
    world.down.clear()
    assert world.gate.turn(5.0) == ([], [])
