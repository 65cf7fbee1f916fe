"""Leases over the wire, connections that are looked after, the gate before a transition."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from kunserve.cluster.instance.lease import LeaseTerms
from kunserve.cluster.instance.prepare_gate import PrepareGate
from kunserve.cluster.instance.wire_lease import LEASE_PART, WireLease
from kunserve.cluster.processes.reachability import DOWN_S, Reachability
from kunserve.core.config import ClusterConfig
from kunserve.core.ids import GroupId, InstanceId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import (
    EndMigration,
    Migrate,
    MigrationOver,
    Prepare,
    Prepared,
    Rollback,
)
from kunserve.transport.bulk.pacing import BulkPacing
from kunserve.transport.wire.pulse import GIVEN_UP, Answer
from kunserve.transport.wire.sockets import PULSES_PER_TIMEOUT

ZERO, ONE = InstanceId(0), InstanceId(1)


class Leased:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.deaths: list[str] = []
        terms = LeaseTerms("", "front", 30.0)
        self.lease = WireLease(terms, 8.0, clock=lambda: self.now_s, die=self.deaths.append)

    def answer(self, question: bytes, front: str = "front") -> None:
        self.lease.answered(Answer(question, front).to_bytes())


def test_what_stands_still_for_three_seconds_is_given_up_by_nobody() -> None:
    """By default: a connection, a lease, a heartbeat, a pull."""
    config = ClusterConfig()
    limits_s = (
        config.link_timeout_s,
        LEASE_PART * config.heartbeat_timeout_s,
        config.heartbeat_timeout_s,
        BulkPacing().chunk_timeout_s,
        BulkPacing().unknown_grace_s,
    )
    # A pulse may have been sent just before, and the next one is sent late.
    most_s = min(limits_s) * (1.0 - 1.0 / PULSES_PER_TIMEOUT)
    assert most_s >= 3.0, limits_s


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
        self.slow_s = 0.0
        self.gate = PrepareGate(ZERO, self._unreached, self._patience_s)

    def _patience_s(self, peers: Iterable[InstanceId]) -> float:
        return 2.0 + self.slow_s

    def _unreached(self, peers: Iterable[InstanceId]) -> list[InstanceId]:
        return [peer for peer in peers if peer in self.down]


def prepare(number: int = 7) -> Prepare:
    old = tuple(GroupLayout(GroupId(i), (Stage(InstanceId(i), LayerRange(0, 4)),)) for i in (0, 1))
    stages = (Stage(ZERO, LayerRange(0, 2)), Stage(ONE, LayerRange(2, 4)))
    return Prepare(TransitionId(number), old, (GroupLayout(GroupId(9), stages),), ())


def test_a_transition_waits_for_its_connections() -> None:
    world = Gate()
    assert not world.gate.passes(prepare(), 0.0) and world.gate.is_waiting
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
    assert not passed and isinstance(refusal, Prepared)
    assert refusal.transition_id == 7 and refusal.instance_id == ZERO
    assert refusal.refusal == "no connection to instances [1]"
    assert not world.gate.is_waiting


def test_a_transition_waits_longer_for_one_in_a_long_step() -> None:
    world = Gate()
    world.slow_s = 20.0
    world.gate.passes(prepare(), 0.0)
    assert world.gate.turn(21.9) == ([], [])
    world.down.clear()
    assert world.gate.turn(21.9) == ([prepare()], [])


def test_a_restore_that_is_called_off_at_the_gate_is_heard_of() -> None:
    """Its layers are loaded already: the agent is to give their memory back."""
    world = Gate()
    drop = prepare()
    world.gate.passes(replace(drop, old=drop.new, new=drop.old), 0.0)
    assert world.gate.is_waiting
    assert world.gate.passes(Rollback(TransitionId(7)), 0.1)
    world.down.clear()
    assert world.gate.turn(5.0) == ([], [])


MIGRATE = Migrate(TransitionId(7), GroupId(0), ONE, GroupId(1), 9)


def test_a_migration_waits_for_its_connection() -> None:
    world = Gate()
    assert not world.gate.passes(MIGRATE, 0.0)
    assert world.gate.turn(1.9) == ([], [])
    world.down.clear()
    assert world.gate.turn(2.1) == ([MIGRATE], [])
    assert world.gate.passes(replace(MIGRATE, migration_id=TransitionId(8)), 3.0)


def test_a_migration_over_a_cut_is_refused() -> None:
    world = Gate()
    world.gate.passes(MIGRATE, 0.0)
    reason = "no connection to instances [1]"
    assert world.gate.turn(2.1) == ([], [MigrationOver(TransitionId(7), ZERO, reason)])
    world.gate.passes(MIGRATE, 3.0)
    assert not world.gate.passes(EndMigration(TransitionId(7)), 3.1), "it never began"
    assert world.gate.passes(EndMigration(TransitionId(7)), 3.2)


@pytest.mark.parametrize("is_rolled_back", [False, True])
def test_what_is_called_off_meanwhile_is_forgotten(is_rolled_back: bool) -> None:
    world = Gate()
    world.gate.passes(prepare(), 0.0)
    if is_rolled_back:
        assert not world.gate.passes(Rollback(TransitionId(7)), 0.0)
    else:
        world.gate.clear()
    world.down.clear()
    assert world.gate.turn(5.0) == ([], [])
