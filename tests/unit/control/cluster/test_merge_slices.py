"""The merges of a large plan are begun a few at a time: the same ones, in the same order."""

import random

import pytest

from kunserve.control.cluster import transitions
from kunserve.core.config import MIB
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Connect, Prepare, Rollback
from kunserve.core.snapshots import Outcome
from tests.fake_cluster import FakeCluster
from tests.unit.control.cluster.brain import Brain

ALL = 100 * MIB
"""More than can be dropped."""


def dropping(num_instances: int, per_turn: int, monkeypatch: pytest.MonkeyPatch) -> Brain:
    """All that can be dropped is to be dropped, in turns of so many merges."""
    monkeypatch.setattr(transitions, "BEGINNINGS_PER_TURN", per_turn)
    brain = Brain(num_instances, policy="recompute", min_deep_gain=0.0, max_group_size=2)
    brain.commands.clear()
    brain.controller.force_drop(ALL, brain.now_s)
    brain.commands += brain.controller.drain()
    return brain


def tell_more(brain: Brain) -> None:
    brain.controller.tell_more(brain.now_s)
    brain.commands += brain.controller.drain()


@pytest.mark.parametrize("per_turn", [1, 3, 100])
def test_slices_change_neither_what_is_said_nor_its_order(
    per_turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = dropping(14, 100, monkeypatch)
    assert not whole.controller.has_more_to_tell
    brain = dropping(14, per_turn, monkeypatch)
    assert len({message.transition_id for _, message in brain.take(Prepare)}) == min(per_turn, 7)
    brain = dropping(14, per_turn, monkeypatch)
    busy = brain.controller.transitions.busy_groups
    assert busy == whole.controller.transitions.busy_groups, "all are under way from the beginning"
    num_turns = 1
    while brain.controller.has_more_to_tell:
        brain.controller.force_drop(ALL, brain.now_s)  # nothing is left for another plan
        tell_more(brain)
        num_turns += 1
    assert num_turns == -(-7 // per_turn)
    assert brain.commands == whole.commands
    assert {type(command.message) for command in brain.commands} == {Prepare, Connect}


def test_who_was_not_told_of_a_merge_is_not_told_of_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brain = dropping(8, 1, monkeypatch)
    (first,) = {message.transition_id for _, message in brain.take(Prepare)}
    active = brain.controller.transitions.active
    last = max(active)
    dead, survivor = sorted(active[last].members)
    brain.die(dead)
    assert last not in active and not brain.take(Rollback)
    assert brain.ended[0].outcome is Outcome.ROLLED_BACK
    while brain.controller.has_more_to_tell:
        tell_more(brain)
    told = {i: message.transition_id for i, message in brain.take(Prepare)}
    assert survivor not in told and dead not in told
    assert set(told.values()) == set(active) - {first}
    brain.die(sorted(active[first].members)[0])
    assert {message.transition_id for _, message in brain.take(Rollback)} == {first}


@pytest.mark.parametrize("seed", range(12))
def test_everything_may_happen_between_two_slices(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, commits, deaths and ends of requests: tokens stay the same, and nothing is left."""
    monkeypatch.setattr(transitions, "BEGINNINGS_PER_TURN", 1)
    draw = random.Random(seed)
    cluster = FakeCluster(pools=(12,) * 6)
    for _ in range(14):
        cluster.request(draw.randrange(1, 10), draw.randrange(2, 10))
    cluster.run_except(lambda _: False, lambda: cluster.num_actions > 400 + draw.randrange(40))
    assert len(cluster.controller.force_drop(ALL, cluster.now_s)) > 1
    cluster.carry_out()
    assert cluster.controller.has_more_to_tell
    for _ in range(draw.randrange(120)):
        found = cluster.actions()
        if found:
            cluster.perform(draw.choice(found))
            cluster.check()
    if seed % 2:
        cluster.kill_instance(InstanceId(draw.randrange(6)))
        cluster.start_instance(cluster.dead[0])
    cluster.finish()
    assert not cluster.controller.has_more_to_tell
