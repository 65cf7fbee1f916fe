"""Live migration of a running request, and what can go wrong in the middle of it."""

from collections.abc import Callable

import pytest

from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import HandOff, MigrationOver, OfferKv
from kunserve.core.plan import SwapPlan
from kunserve.core.request import SamplingParams
from kunserve_lab.world.actions import Action, CompletePull, Delivery, StartStep
from tests.fake_cluster import FakeCluster, link

NOTHING: Callable[[Action], bool] = lambda action: False  # noqa: E731


def lopsided(num: int = 3, max_tokens: int = 12, **settings: object) -> FakeCluster:
    """Requests decode on instance 0; instance 1 has nothing to do."""
    cluster = FakeCluster(**{"pools": (24, 24), "block_size": 2, **settings})  # type: ignore[arg-type]
    min_running = min(num, int(str(settings.get("max_num_seqs", num))))
    cluster.kill_instance(InstanceId(1))
    for _ in range(num):
        cluster.request(3, max_tokens)
    cluster.run_except(NOTHING, lambda: len(running(cluster, 0)) == min_running)
    cluster.start_instance(InstanceId(1))
    is_step = lambda action: isinstance(action, StartStep)  # noqa: E731
    cluster.run_except(is_step, lambda: cluster.agent(1).membership is not None)
    assert len(running(cluster, 0)) == min_running and not running(cluster, 1)
    return cluster


def running(cluster: FakeCluster, instance_id: int) -> tuple[RequestId, ...]:
    """Requests that have been computed in part on the instance and are not over."""
    return tuple(
        request_id
        for request_id in cluster.agent(instance_id).state.table.request_ids()
        if cluster.accounts[request_id].token_ids and cluster.accounts[request_id].end is None
    )


def migrate(cluster: FakeCluster, source: int = 0, max_blocks: int = 1000) -> None:
    by_leader = {group.leader: group.group_id for group in cluster.groups()}
    cluster.migrate(by_leader[InstanceId(source)], by_leader[InstanceId(1 - source)], max_blocks)


def moved(cluster: FakeCluster) -> int:
    return cluster.controller.balance.num_moved


def run_for(cluster: FakeCluster, num_actions: int) -> None:
    begin = cluster.num_actions
    cluster.run_except(NOTHING, lambda: cluster.num_actions >= begin + num_actions)


def test_a_request_moves_with_its_kv_and_goes_on_where_it_was() -> None:
    cluster = lopsided()
    migrate(cluster)
    cluster.run_until(lambda: moved(cluster) == 1)
    cluster.run_until(lambda: not cluster.controller.placement.migrating)
    (mover,) = running(cluster, 1)
    cluster.run_until(lambda: mover not in cluster.agent(0).state.table.request_ids())
    assert mover in cluster.unfinished
    cluster.finish()
    assert cluster.num_preemptions == 0, "nothing was computed twice"
    prompts = sum(len(a.request.prompt_token_ids) for a in cluster.accounts.values())
    totals = [cluster.agent(i).state.totals for i in (0, 1)]
    assert sum(total.prompt_tokens for total in totals) == prompts


def test_the_source_decodes_the_request_while_its_blocks_are_copied() -> None:
    cluster = lopsided(1, 12)
    (request_id,) = running(cluster, 0)
    migrate(cluster)
    before = len(cluster.accounts[request_id].token_ids)
    is_pull = lambda action: isinstance(action, CompletePull)  # noqa: E731
    cluster.run_except(is_pull, lambda: len(cluster.accounts[request_id].token_ids) > before + 4)
    assert len(cluster.accounts[request_id].token_ids) > before + 4
    assert cluster.members[InstanceId(1)].mover.pulls and moved(cluster) == 0
    cluster.run_until(lambda: moved(cluster) == 1)
    cluster.finish()


def test_the_target_sets_memory_aside_before_anything_moves() -> None:
    cluster = lopsided(1)
    migrate(cluster)
    scheduler = cluster.agent(1).membership.scheduler
    assert scheduler is not None
    cluster.run_except(NOTHING, lambda: bool(cluster.members[InstanceId(1)].mover.pulls))
    assert scheduler.used_blocks > cluster.agent(1).state.table.num_blocks(running(cluster, 0)[0])
    cluster.finish()


def test_what_does_not_fit_at_the_target_stays() -> None:
    cluster = lopsided(1, pools=(24, 4), max_model_len=40)
    migrate(cluster)
    cluster.finish()
    assert moved(cluster) == 0 and cluster.num_preemptions == 0


def test_a_target_whose_requests_wait_for_memory_takes_none() -> None:
    cluster = lopsided(2, 20, pools=(24, 24), max_num_seqs=1)
    # One runs at a time: on instance 1 too there is a queue.
    for _ in range(4):
        cluster.request(3, 20)
    target = cluster.agent(1).membership.scheduler
    cluster.run_except(NOTHING, lambda: target.load(0, 0, 0.0).num_waiting > 0)
    migrate(cluster)
    run_for(cluster, 30)
    assert moved(cluster) == 0
    cluster.finish()


def test_too_large_ones_stay() -> None:
    cluster = lopsided()
    migrate(cluster, max_blocks=1)
    cluster.finish()
    assert moved(cluster) == 0


def test_sampling_parameters_move_along() -> None:
    cluster = FakeCluster(pools=(24, 24), block_size=2)
    sampling = SamplingParams(14, temperature=1.0, seed=3, frequency_penalty=0.5)
    request_id = cluster.request(4, sampling=sampling)
    cluster.run_until(lambda: len(cluster.accounts[request_id].token_ids) > 2)
    source = int(request_id not in cluster.agent(0).state.table.request_ids())
    migrate(cluster, source)
    cluster.run_until(lambda: moved(cluster) == 1)
    cluster.finish()


def test_there_and_back_again() -> None:
    cluster = lopsided(1, 20)
    for source in (0, 1, 0):
        migrate(cluster, source)
        cluster.run_until(lambda: not cluster.controller.placement.migrating)
    assert moved(cluster) == 3
    cluster.finish()
    assert cluster.num_preemptions == 0


# Ends in the middle


@pytest.mark.parametrize("after", range(0, 34, 2))
def test_abort_at_every_moment(after: int) -> None:
    cluster = lopsided()
    migrate(cluster)
    run_for(cluster, after)
    for request_id in running(cluster, 0) + running(cluster, 1):
        if request_id in cluster.unfinished:
            cluster.cancel(request_id)
    cluster.finish()


@pytest.mark.parametrize("after", range(0, 34, 2))
@pytest.mark.parametrize("victim", [0, 1])
def test_death_of_either_side_at_every_moment(after: int, victim: int) -> None:
    cluster = lopsided()
    migrate(cluster)
    run_for(cluster, after)
    cluster.kill_instance(InstanceId(victim))
    run_for(cluster, 10)
    cluster.start_instance(InstanceId(victim))
    cluster.finish()


@pytest.mark.parametrize("after", range(0, 34, 2))
def test_pulls_that_fail_at_every_moment(after: int) -> None:
    cluster = lopsided()
    migrate(cluster)
    run_for(cluster, after)
    for _ in range(60):
        for action in cluster.actions():
            if isinstance(action, CompletePull):
                cluster.perform(CompletePull(action.instance_id, action.index, fails=True))
                cluster.check()
                break
        else:
            run_for(cluster, 1)
    cluster.finish()


@pytest.mark.parametrize("after", range(0, 34, 2))
def test_memory_runs_out_at_either_side_at_every_moment(after: int) -> None:
    cluster = lopsided(3, 12, pools=(14, 14))
    migrate(cluster)
    run_for(cluster, after)
    for _ in range(6):
        cluster.request(9, 10)
    cluster.finish()


@pytest.mark.parametrize("after", range(0, 30, 2))
def test_the_request_ends_while_it_is_copied(after: int) -> None:
    cluster = lopsided(1, 8)
    migrate(cluster)
    run_for(cluster, after)
    is_pull = lambda action: isinstance(action, CompletePull)  # noqa: E731
    cluster.run_except(is_pull)
    cluster.finish()


@pytest.mark.parametrize("after", range(0, 30, 2))
def test_a_drop_and_a_migration_exclude_each_other(after: int) -> None:
    cluster = lopsided()
    migrate(cluster)
    run_for(cluster, after)
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.finish()
    (outcome,) = [record.ending for record in cluster.records]
    assert outcome == "done" or outcome.endswith("a request migrates")


def test_a_submission_may_overtake_the_hand_off() -> None:
    """The target may have taken everything before the source knows whose the request is."""
    cluster = lopsided(1)
    migrate(cluster)
    cluster.run_except(NOTHING, lambda: moved(cluster) == 1)
    cluster.run_except(link(None, 0), lambda: bool(running(cluster, 1)))
    cluster.finish()


def test_an_abort_of_the_moved_request_reaches_its_new_instance() -> None:
    cluster = lopsided(1)
    (request_id,) = running(cluster, 0)
    migrate(cluster)
    cluster.run_except(NOTHING, lambda: moved(cluster) == 1)
    cluster.cancel(request_id)
    cluster.finish()
    assert not cluster.accounts[request_id].end


def test_a_target_that_dies_after_the_hand_off_costs_only_a_recomputation() -> None:
    cluster = lopsided(1)
    (request_id,) = running(cluster, 0)
    migrate(cluster)
    cluster.run_except(link(0, None), lambda: False)
    cluster.run_except(NOTHING, lambda: moved(cluster) == 1)
    assert Delivery(None, InstanceId(0)) in cluster.actions(), "the source does not know yet"
    cluster.kill_instance(InstanceId(1))
    cluster.finish()
    assert cluster.accounts[request_id].end is not None


def test_messages_of_migrations_long_over_change_nothing() -> None:
    cluster = lopsided(1)
    migrate(cluster)
    cluster.run_until(lambda: not cluster.controller.placement.migrating)
    (request_id,) = running(cluster, 1)
    migration_id = cluster.controller.transitions.new_id()
    agent = cluster.agent(0)
    agent.on(HandOff(migration_id), cluster.now_s)
    agent.on(
        OfferKv(
            migration_id, InstanceId(1), agent.membership.layout.group_id, request_id, 99, 99, 1
        ),
        cluster.now_s,
    )
    cluster.controller.on(InstanceId(0), MigrationOver(migration_id, InstanceId(0), None), 0.0)
    cluster.finish()


def test_a_step_that_starts_late_still_sees_its_blocks() -> None:
    """The last blocks are copied while the source's next step is already planned."""
    cluster = lopsided(2)
    migrate(cluster)
    starts = lambda action: action == StartStep(InstanceId(1))  # noqa: E731
    cluster.run_except(starts)
    cluster.finish()
    assert moved(cluster) == 1


def test_a_request_that_goes_to_host_memory_stays() -> None:
    """Its blocks were offered, and moved all the same. No server has both; machines of tests do."""
    cluster = FakeCluster(pools=(18, 24), block_size=2, swap=SwapPlan(1e7))
    cluster.kill_instance(InstanceId(1))
    for _ in range(3):
        cluster.request(13, 20)
    cluster.run_except(
        NOTHING, lambda: sum(bool(a.token_ids) for a in cluster.accounts.values()) > 1
    )
    cluster.start_instance(InstanceId(1))
    cluster.run_except(NOTHING, lambda: cluster.agent(1).membership is not None)
    migrate(cluster)
    is_pull = lambda action: isinstance(action, CompletePull)  # noqa: E731
    cluster.run_except(is_pull, lambda: not cluster.controller.placement.migrating)
    totals = cluster.agent(0).state.totals
    assert totals.swapped_out_blocks and not moved(cluster)
    cluster.finish()
