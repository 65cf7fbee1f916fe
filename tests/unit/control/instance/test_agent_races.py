"""What can go wrong in the middle of a transition, each trap alone."""

from collections.abc import Callable

import pytest

from kunserve.control.instance import inbox
from kunserve.control.instance.agent import InstanceAgent
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import (
    Abort,
    Activation,
    Connect,
    Form,
    LayersLoaded,
    Message,
    Report,
    Submit,
)
from kunserve.core.request import FinishReason, Request, SamplingParams
from kunserve.policy.drop.restore import Postponed
from kunserve_lab.world.actions import Action, CompletePull, Delivery, StartStep
from kunserve_lab.world.fake_body import FakeBody
from kunserve_lab.world.world import NOWHERE
from tests.fake_cluster import FakeCluster, link

NOTHING: Callable[[Action], bool] = lambda action: False  # noqa: E731


def is_pull(action: Action) -> bool:
    return isinstance(action, CompletePull)


def started(count: int = 4, max_tokens: int = 9, **settings: object) -> FakeCluster:
    """Two instances with requests under way on both."""
    cluster = FakeCluster(**{"pools": (12, 12), "block_size": 1, **settings})  # type: ignore[arg-type]
    for _ in range(count):
        cluster.request(3, max_tokens)
    cluster.run_except(NOTHING, lambda: cluster.num_actions >= 40)
    assert len(cluster.unfinished) == count
    return cluster


def led_by(cluster: FakeCluster, instance_id: int) -> RequestId:
    """A request that runs on the instance."""
    return cluster.agent(instance_id).state.table.request_ids()[0]


def early_plans(agent: InstanceAgent) -> list[Activation]:
    """Microbatches of a group that the instance has yet to enter."""
    return [message for message in agent.inbox.waiting if isinstance(message, Activation)]


def merge(cluster: FakeCluster) -> None:
    cluster.drop((0, 0, 2), (1, 2, 4))


def merged(count: int = 3, **settings: object) -> tuple[FakeCluster, GroupLayout]:
    """A pipeline of two with requests under way."""
    cluster = FakeCluster(**{"pools": (12, 12), "block_size": 1, **settings})  # type: ignore[arg-type]
    merge(cluster)
    cluster.run_until_idle()
    (group,) = cluster.groups()
    for _ in range(count):
        cluster.request(2, 5)
    begin = cluster.num_actions
    cluster.run_except(NOTHING, lambda: cluster.num_actions >= begin + 12)
    return cluster, group


def last_outcome(cluster: FakeCluster) -> str:
    return cluster.records[-1].ending


# Aborts


def test_aborts_that_nobody_waits_for_any_more_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that leaves as its last token comes leaves an abort behind."""
    cluster = started()
    agent = cluster.agent(0)
    for number in range(20):
        agent.on(Abort(RequestId(f"ended-{number}")), cluster.now_s)
    looked: list[Message] = []
    look = inbox.when_to_read
    monkeypatch.setattr(
        inbox, "when_to_read", lambda mail, moment: looked.append(mail) or look(mail, moment)
    )
    for _ in range(3):
        agent.report(cluster.now_s)
    assert len(agent.inbox.waiting) == 20 and not looked
    cluster.finish()


@pytest.mark.parametrize("after", range(0, 56, 2))
def test_abort_in_every_phase_of_a_drop_on_both_sides(after: int) -> None:
    cluster = started()
    victims = [led_by(cluster, 0), led_by(cluster, 1)]
    merge(cluster)
    begin = cluster.num_actions
    cluster.run_except(NOTHING, lambda: cluster.num_actions >= begin + after)
    for victim in victims:
        if victim in cluster.unfinished:
            cluster.cancel(victim)
    cluster.finish()
    assert last_outcome(cluster) == "done"


@pytest.mark.parametrize("after", range(0, 72, 2))
def test_abort_in_every_phase_of_a_restore(after: int) -> None:
    cluster, group = merged()
    victims = cluster.unfinished[:2]
    cluster.restore(group)
    begin = cluster.num_actions
    cluster.run_except(NOTHING, lambda: cluster.num_actions >= begin + after)
    for victim in victims:
        if victim in cluster.unfinished:
            cluster.cancel(victim)
    cluster.finish()
    assert last_outcome(cluster) == "done"


def test_abort_of_a_stalled_request_frees_it_on_both_sides() -> None:
    cluster = started()
    victim = led_by(cluster, 1)
    merge(cluster)
    cluster.run_except(is_pull)
    assert any(member.mover.pulls for member in cluster.members.values())
    cluster.cancel(victim)
    cluster.run_except(is_pull)
    for member in cluster.members.values():
        assert member.agent.state.table.num_blocks(victim) == 0
        assert victim not in member.mover.exports
    cluster.finish()


def test_abort_at_the_old_leader_follows_a_request_that_moved() -> None:
    cluster, group = merged(4)
    cluster.restore(group, capacity_blocks=20)
    cluster.run_until(
        lambda: (
            cluster.agent(0).membership.layout != group
            and cluster.agent(1).membership.scheduler is not None
        )
    )
    there = cluster.agent(1).membership.scheduler
    assert there is not None
    moved = next(r for r in cluster.unfinished if there.migration.knows(r))
    cluster.cancel(moved)  # the controller has not heard of the new leaders
    cluster.run_except(lambda action: isinstance(action, StartStep))
    assert not there.migration.knows(moved)
    cluster.finish()


# Mail that comes early or late


def test_a_request_sent_to_an_old_leader_during_the_commit() -> None:
    cluster = started()
    merge(cluster)
    # Instance 1 hears of the commit last, and meanwhile gets a request as a leader.
    late = cluster.request(3, 4)
    other = cluster.request(3, 4)
    cluster.run_except(link(None, 1))
    cluster.run_except(link(0, 1))
    cluster.finish()
    assert {late, other} <= set(cluster.accounts)
    assert last_outcome(cluster) == "done"


def test_a_request_that_comes_after_the_handover_is_not_forgotten() -> None:
    cluster = started()
    merge(cluster)
    # Both have handed over, and neither has the other's sequences yet.
    cluster.run_except(lambda action: link(1, 0)(action) or link(0, 1)(action))
    for _ in range(4):
        cluster.request(2, 3)
    cluster.run_except(lambda action: link(1, 0)(action) or link(0, 1)(action))
    assert all(member.agent.membership.layout.group_id < 2 for member in cluster.members.values())
    cluster.finish()
    assert last_outcome(cluster) == "done"


def test_an_activation_comes_before_the_member_has_switched() -> None:
    cluster = FakeCluster(pools=(12, 12, 12), block_size=1, layer_units=60)
    for _ in range(6):
        cluster.request(3, 6)
    cluster.run_except(NOTHING, lambda: cluster.num_actions >= 40)
    cluster.drop((0, 0, 1), (1, 1, 2), (2, 2, 4))
    # Instance 1 misses the third handover until the pipeline's first plan is there.
    cluster.run_except(link(2, 1))
    cluster.cancel(led_by(cluster, 0))
    cluster.run_except(link(2, 1))
    assert early_plans(cluster.agent(1)), "no plan was early"
    cluster.finish()


def test_progress_of_a_member_that_switched_first_is_kept() -> None:
    cluster = started()
    merge(cluster)
    cluster.run_except(link(1, 0))
    assert not cluster.records
    cluster.finish()
    assert last_outcome(cluster) == "done"


def test_a_pipeline_formed_anew_whose_second_stage_hears_of_it_last() -> None:
    cluster = started()
    for request_id in cluster.unfinished:
        cluster.cancel(request_id)
    cluster.run_until_idle()
    layout = GroupLayout(
        cluster.controller.placement.new_ids(1),
        (Stage(InstanceId(0), LayerRange(0, 3)), Stage(InstanceId(1), LayerRange(3, 4))),
    )
    placement = cluster.controller.placement
    placement.remove([group.layout for group in placement.groups.values()])
    specs = (placement.specs[InstanceId(0)], placement.specs[InstanceId(1)])
    placement.add(layout)
    for member in layout.members:
        cluster.connect(member, Connect(tuple((i, NOWHERE) for i in layout.members)))
        cluster.post(None, member, Form(layout, specs, num_sent=placement.num_sent[member]))
    cluster.request(4, 5)
    cluster.run_except(link(None, 1))
    assert early_plans(cluster.agent(1))
    cluster.finish()


# Failures


def test_a_failed_pull_recomputes_the_request() -> None:
    cluster = started(pools=(24, 24))
    merge(cluster)
    cluster.run_except(is_pull)
    cluster.perform(CompletePull(InstanceId(1), 0, fails=True))
    cluster.finish()
    assert last_outcome(cluster) == "done"
    assert cluster.num_preemptions == 1


def test_every_pull_fails() -> None:
    cluster = started(6)
    merge(cluster)
    for _ in range(60):
        cluster.run_except(is_pull)
        for instance_id, member in cluster.members.items():
            if member.mover.pulls:
                cluster.perform(CompletePull(instance_id, 0, fails=True))
    cluster.finish()
    assert last_outcome(cluster) == "done"
    assert cluster.records[0].moved_bytes == 0


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("after", range(0, 60, 4))
def test_death_in_every_phase_of_a_drop(dead: int, after: int) -> None:
    cluster = started()
    merge(cluster)
    begin = cluster.num_actions
    cluster.run_except(NOTHING, lambda: cluster.num_actions >= begin + after)
    cluster.kill_instance(InstanceId(dead))
    cluster.check()
    cluster.run_except(NOTHING, lambda: cluster.num_actions >= begin + after + 30)
    cluster.start_instance(InstanceId(dead))
    cluster.finish()
    assert all(len(group.stages) == 1 for group in cluster.groups())


@pytest.mark.parametrize("after", range(0, 72, 4))
def test_death_in_every_phase_of_a_restore(after: int) -> None:
    cluster, group = merged()
    cluster.restore(group)
    begin = cluster.num_actions
    cluster.run_except(NOTHING, lambda: cluster.num_actions >= begin + after)
    cluster.kill_instance(InstanceId(after // 4 % 2))
    cluster.start_instance(InstanceId(after // 4 % 2))
    cluster.finish()


def test_a_group_formed_anew_waits_for_the_running_step() -> None:
    cluster = started()
    cluster.run_except(NOTHING, lambda: cluster.members[InstanceId(0)].work is not None)
    work = cluster.members[InstanceId(0)].work
    layout = cluster.agent(0).membership.layout
    assert work is not None and layout is not None
    new = GroupLayout(cluster.controller.placement.new_ids(1), layout.stages)
    spec = cluster.controller.placement.specs[InstanceId(0)]
    cluster.agent(0).on(Form(new, (spec,)), cluster.now_s)
    assert cluster.agent(0).membership.layout == layout
    assert cluster.agent(0).state.table.used_units > 0
    cluster.perform(next(a for a in cluster.actions() if "Finish" in type(a).__name__))
    assert cluster.agent(0).membership.layout == new
    assert cluster.agent(0).state.table.used_units == 0


# Rollbacks


@pytest.mark.parametrize(("after", "num_pieces"), [*((i, 1) for i in range(8)), (8, 3), (12, 3)])
def test_rollback_of_a_prepared_drop(
    after: int, num_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while memory is prepared a piece at a time."""
    monkeypatch.setattr(FakeBody, "num_pieces", num_pieces)
    cluster = started()
    before = cluster.groups()
    cluster.run_except(lambda action: isinstance(action, Delivery))
    transition_id = cluster.drop((0, 0, 2), (1, 2, 4))
    begin = cluster.num_actions
    cluster.run_except(NOTHING, lambda: cluster.num_actions >= begin + after)
    if cluster.roll_back(transition_id):
        cluster.run_until(lambda: bool(cluster.records))
        assert cluster.groups() == before
        assert all(member.body.held.num_layers == 4 for member in cluster.members.values())
    merge(cluster)
    cluster.finish()


@pytest.mark.parametrize(("after", "num_pieces"), [(i, 1 + 3 * (i % 2)) for i in range(25)])
def test_rollback_of_a_load_in_every_phase(
    after: int, num_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBody, "num_pieces", num_pieces)
    cluster, group = merged()
    transition_id = cluster.restore(group)
    begin = cluster.num_actions
    cluster.run_except(NOTHING, lambda: cluster.num_actions >= begin + after)
    scheduler = cluster.agent(0).membership.scheduler
    assert cluster.roll_back(transition_id), "it had committed already"
    cluster.run_until_idle()
    assert cluster.groups() == [group]
    for number, member in enumerate(cluster.members.values()):
        assert member.body.held == group.stages[number].layers
        assert member.agent.state.table.num_units == member.body.kv_units
    assert scheduler is not None
    assert scheduler.load(0, 0, 0.0).capacity_blocks == cluster.agent(0).membership.capacity_blocks
    cluster.request(3, 5)
    cluster.restore(group)
    cluster.finish()
    assert last_outcome(cluster) == "done"


def test_a_rollback_that_overtakes_the_order_to_load() -> None:
    cluster, group = merged()
    transition_id = cluster.restore(group)
    cluster.run_except(link(0, 1))  # the leader's word to the member is late
    assert cluster.roll_back(transition_id)
    cluster.run_except(link(0, 1))
    assert cluster.agent(1).state.held == LayerRange(2, 4)
    cluster.run_until_idle()
    assert cluster.members[InstanceId(1)].body.held == LayerRange(2, 4)
    cluster.restore(group)
    cluster.finish()
    assert last_outcome(cluster) == "done"


# Restores


def test_layers_come_from_disk_when_the_peer_cannot_give_them() -> None:
    cluster, group = merged()
    cluster.restore(group)
    cluster.run_except(is_pull)
    for instance_id, member in cluster.members.items():
        while member.mover.pulls:
            cluster.perform(CompletePull(instance_id, 0, fails=True))
    cluster.finish()
    assert last_outcome(cluster) == "done"


def test_the_pipeline_serves_while_layers_are_loaded() -> None:
    cluster, group = merged(2)
    cluster.restore(group)
    cluster.run_except(is_pull)
    assert not cluster.unfinished
    late = cluster.request(3, 4)
    cluster.run_except(is_pull)
    assert cluster.accounts[late].end is not None
    cluster.finish()
    assert last_outcome(cluster) == "done"


def test_a_request_larger_than_one_pool_postpones_the_restore() -> None:
    cluster, group = merged(2, max_model_len=30, max_num_batched_tokens=64)
    large = cluster.request(20, 8)
    cluster.run_except(NOTHING, lambda: bool(cluster.accounts[large].token_ids))
    cluster.pass_time(0.1)
    cluster.run_except(
        NOTHING, lambda: cluster.controller.placement.groups[group.group_id].is_reported
    )
    (postponed,) = cluster.controller.force_restore(cluster.now_s)
    assert isinstance(postponed, Postponed) and "larger than a pool" in postponed.reason
    # Forced on the instances all the same, their leader refuses before anything has changed.
    cluster.restore(group)
    cluster.finish()
    assert "rolled back" in last_outcome(cluster)
    assert len(cluster.accounts[large].token_ids) == 8


def test_what_does_not_fit_after_a_restore_is_recomputed() -> None:
    cluster, group = merged(0, max_num_seqs=16)
    for _ in range(4):
        cluster.request(3, 9)
    leader = cluster.agent(0)

    def used() -> int:
        assert leader.membership.scheduler is not None
        return leader.membership.scheduler.used_blocks

    cluster.run_until(lambda: used() >= 22)
    cluster.restore(group, capacity_blocks=24)
    cluster.run_except(
        lambda action: isinstance(action, StartStep), lambda: len(cluster.groups()) == 2
    )
    cluster.finish()
    assert last_outcome(cluster) == "done"
    assert cluster.num_preemptions > 0


def test_a_large_request_goes_where_it_will_fit() -> None:
    cluster, group = merged(0, pools=(12, 20), max_model_len=20)
    large, small = cluster.request(3, 15), cluster.request(3, 5)
    begin = cluster.num_actions
    cluster.run_except(NOTHING, lambda: cluster.num_actions >= begin + 16)
    cluster.restore(group)
    cluster.finish()
    assert last_outcome(cluster) == "done"
    assert {cluster.accounts[r].end for r in (large, small)} == {FinishReason.LENGTH}


def test_the_answer_to_a_load_tells_what_was_loaded() -> None:
    cluster, group = merged(0)
    told: list[LayersLoaded] = []
    on_loaded = cluster.controller.transitions.on_loaded

    def spy(message: LayersLoaded, now_s: float) -> None:
        told.append(message)
        on_loaded(message, now_s)

    cluster.controller.transitions.on_loaded = spy  # type: ignore[method-assign]
    cluster.restore(group)
    cluster.finish()
    layer_bytes = cluster.members[InstanceId(0)].body.spec.layer_bytes
    assert sorted(m.instance_id for m in told) == [0, 1]
    assert all(m.loaded_bytes == 2 * layer_bytes and m.refusal is None for m in told)


# Accounts


def test_a_request_that_waits_for_the_commit_is_counted_once() -> None:
    """The controller matches ``num_received`` with what it has sent."""
    cluster = FakeCluster(pools=(12, 12), block_size=1)
    merge(cluster)
    # Both have committed, and neither has the other's sequences yet.
    cluster.run_except(lambda action: link(1, 0)(action) or link(0, 1)(action))
    agent = cluster.agent(0)
    submit = Submit(Request(RequestId("late"), (1, 2), SamplingParams(3), 0.0))
    agent.on(submit, cluster.now_s)
    assert agent.inbox.waiting == (submit,)
    cluster.run_until_idle()
    assert not agent.inbox.waiting
    agent.report(cluster.now_s)
    (report,) = [out.message for out in agent.outbox if isinstance(out.message, Report)]
    assert report.load.num_received == 1


def test_a_member_says_when_it_has_cleared_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeBody, "tidied_s", None)
    cluster = started()
    merge(cluster)
    cluster.pass_time(1.0)
    cluster.run_until_idle()
    assert cluster.controller.transitions.latest()[-1].tidy_s == 0.0
    monkeypatch.setattr(FakeBody, "tidied_s", 0.5)
    cluster.pass_time(1.0)
    cluster.run_until_idle()
    assert cluster.controller.transitions.latest()[-1].tidy_s == 0.5
    assert all(member.agent.state.untidy_after is None for member in cluster.members.values())
