"""Bytes that come slowly are waited for, and those that come no more are not."""

import pytest

from kunserve.control.instance.arrivals import TELL_S, Arrivals
from kunserve.control.instance.changes.kv_transfer import KvImport
from kunserve.core.ids import InstanceId
from kunserve.core.messages import TransferProgress
from kunserve_lab.world.actions import Action, CompletePull, StartStep
from tests.fake_cluster import FakeCluster

STAGES = ((0, 0, 2), (1, 2, 4))


def is_pull(action: Action) -> bool:
    return isinstance(action, CompletePull)


def test_who_waits_is_told_now_and_then_of_bytes_that_come() -> None:
    arrivals = Arrivals()
    assert not arrivals.are_told(False, 700, 100.0)
    assert not arrivals.are_told(True, 700, 101.0), "they came before"
    assert not arrivals.are_told(True, 800, 101.0 + TELL_S - 0.1)
    assert arrivals.are_told(True, 800, 101.0 + TELL_S)
    assert not arrivals.are_told(True, 800, 200.0), "none came"
    assert arrivals.are_told(True, 801, 200.1)
    assert not arrivals.are_told(False, 900, 300.0)
    assert not arrivals.are_told(True, 900, 400.0), "it is another change"


def pipeline() -> FakeCluster:
    cluster = FakeCluster()
    cluster.drop(*STAGES)
    cluster.run_until_idle()
    for _ in range(3):
        cluster.request(4, 9)
    cluster.run_until(lambda: all(a.token_ids for a in cluster.accounts.values()))
    return cluster


def trickle(cluster: FakeCluster, seconds: float, instance_id: int = 0) -> None:
    """No pull ends, and a byte of one comes every three seconds."""
    for _ in range(int(seconds / 3.0)):
        cluster.members[InstanceId(instance_id)].mover.landed_bytes += 1
        cluster.pass_time(3.0)
        cluster.run_except(is_pull)


@pytest.mark.parametrize("seconds", [190.0, 1800.0])
def test_a_restore_takes_as_long_as_its_bytes(seconds: float) -> None:
    cluster = pipeline()
    cluster.restore(cluster.groups()[0])
    cluster.run_except(is_pull)
    trickle(cluster, seconds)
    assert [t.phase for t in cluster.controller.transitions.active.values()] == ["loading"]
    cluster.finish()
    assert [record.ending for record in cluster.records] == ["done", "done"]


def test_a_restore_whose_bytes_stop_gives_the_memory_back() -> None:
    """The pulls hang for good, and nobody waits for their end."""
    cluster = pipeline()
    cluster.restore(cluster.groups()[0])
    cluster.run_except(is_pull)
    trickle(cluster, 200.0)
    for _ in range(50):
        cluster.pass_time(3.0)
        cluster.run_except(is_pull)
    assert cluster.records[-1].ending.startswith("rolled back: no answer"), cluster.records
    for member in cluster.members.values():
        assert not member.agent.is_in_transition and not member.mover.pulls
        membership = member.agent.membership
        assert membership is not None
        if (scheduler := membership.scheduler) is not None:
            assert scheduler.load(0, 0, 0.0).capacity_blocks == membership.capacity_blocks
    cluster.finish()


def test_an_exchange_takes_as_long_as_its_bytes() -> None:
    """One request's KV comes for ten minutes, and no whole request does."""
    cluster = FakeCluster(pools=(24, 24))
    for _ in range(2):
        cluster.request(8, 30)
    cluster.run_until(lambda: all(a.token_ids for a in cluster.accounts.values()))
    cluster.drop(*STAGES)
    cluster.run_except(is_pull)
    assert any(member.mover.pulls for member in cluster.members.values())
    trickle(cluster, 600.0)
    assert not cluster.records
    cluster.finish()
    assert [record.ending for record in cluster.records] == ["done"]
    assert cluster.controller.state(cluster.now_s).num_rerun == 0


def test_a_word_of_one_that_is_in_no_transition_is_void() -> None:
    cluster = pipeline()
    cluster.controller.on(InstanceId(0), TransferProgress(InstanceId(0), 5), cluster.now_s)
    assert not cluster.controller.drain()
    cluster.finish()


@pytest.mark.parametrize(("step_s", "patience_s"), [(0.0, 0.5), (3.0, 12.5)])
def test_units_that_are_scattered_are_waited_for_as_long_as_steps_take(
    monkeypatch: pytest.MonkeyPatch, step_s: float, patience_s: float
) -> None:
    """A taker in a long step says late that blocks between them are free."""
    cluster = FakeCluster(pools=(24, 24))
    for _ in range(2):
        cluster.request(8, 30)
    cluster.run_until(lambda: all(a.token_ids for a in cluster.accounts.values()))
    cluster.drop(*STAGES)
    with monkeypatch.context() as patch:
        patch.setattr(KvImport, "place", lambda *_, may_compact: False)
        cluster.run_except(lambda action: isinstance(action, StartStep))
        for member in cluster.members.values():
            member.agent.state.step_s = step_s
        since_s, lost = cluster.now_s, 0
        while not lost:
            cluster.pass_time(0.25)
            cluster.run_except(lambda action: isinstance(action, StartStep))
            lost = sum(
                member.agent.state.totals.num_preemptions for member in cluster.members.values()
            )
            assert cluster.now_s - since_s < patience_s + 1.0
        assert cluster.now_s - since_s >= patience_s
    cluster.finish()


def test_the_longest_of_the_last_steps_is_known() -> None:
    cluster = FakeCluster()
    cluster.request(4, 30)
    agent = cluster.agent(0)
    cluster.run_until(lambda: cluster.members[InstanceId(0)].work is not None)
    cluster.now_s += 9.0
    cluster.finish()
    assert 0.3 < agent.state.step_s < 3.0
