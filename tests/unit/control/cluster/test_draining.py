"""An instance that leaves: who waits there goes back, who runs moves with its KV."""

from kunserve.control.cluster.commands import ScaleDown
from kunserve.control.cluster.standing import Standing
from kunserve.core.config import ClusterConfig
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import (
    HandOff,
    Migrate,
    MigrationOver,
    MigrationReady,
    Returned,
    ReturnWaiting,
    Submit,
)
from tests.fake_cluster import FakeCluster
from tests.unit.control.cluster.brain import BLOCKS, Brain


def leaving(num_requests: int = 1, **load: int) -> tuple[Brain, list[RequestId]]:
    """Of two instances the second leaves, with all requests; ``load`` is what the first reports."""
    # In turn: who waits is asked back for no other reason.
    cluster = ClusterConfig(num_instances=2, dispatch_policy="round-robin")
    brain = Brain(2, cluster=cluster, policy="recompute")
    brain.die(0)
    requests = [brain.request() for _ in range(num_requests)]
    brain.start(0)
    brain.report(0, **load)
    brain.report(1, num_running=1, num_waiting=num_requests - 1, waiting_blocks=2, used_blocks=3)
    brain.take(Submit)
    brain.controller.placement.mark(brain.group_id(1), Standing.LEAVING)
    brain.pass_time()
    return brain, requests


def test_what_waits_goes_back_and_what_runs_moves() -> None:
    brain, requests = leaving(3)
    assert brain.take(ReturnWaiting) == [(InstanceId(1), ReturnWaiting(tuple(requests)))]
    ((source, order),) = brain.take(Migrate)
    assert (source, order.group_id, order.target) == (1, brain.group_id(1), 0)
    brain.tell(1, Returned(InstanceId(1), tuple(requests[1:])))
    assert {int(leader) for leader, _ in brain.take(Submit)} == {0}
    brain.pass_time()
    assert not brain.take(ReturnWaiting) and not brain.take(Migrate), "one after the other"


def test_the_instance_goes_when_nothing_of_the_last_request_is_left_there() -> None:
    brain, (request_id,) = leaving()
    brain.controller.resize(1)
    ((_, order),) = brain.take(Migrate)
    brain.tell(1, MigrationReady(order.migration_id, InstanceId(1), request_id))
    assert brain.take(HandOff)
    ((leader, submit),) = brain.take(Submit)
    assert leader == 0 and submit.migration_id == order.migration_id
    brain.pass_time()
    assert not brain.said(ScaleDown), "its last blocks are still to be pulled"
    brain.tell(1, MigrationOver(order.migration_id, InstanceId(1), None))
    brain.pass_time()
    assert brain.said(ScaleDown) == [ScaleDown(InstanceId(1))]
    assert brain.groups == [(0,)]


def test_a_request_that_could_not_move_is_tried_again_at_the_next_tick() -> None:
    brain, _ = leaving()
    brain.keep()
    assert not brain.take(Migrate)
    brain.pass_time()
    assert len(brain.take(Migrate)) == 1


def test_where_nobody_has_room_the_request_stays() -> None:
    brain, _ = leaving(num_running=9, used_blocks=BLOCKS - 5)
    assert not brain.take(Migrate)
    brain.report(0, num_running=1, used_blocks=9)
    brain.pass_time()
    assert len(brain.take(Migrate)) == 1


def test_nothing_moves_over_a_cut_link() -> None:
    brain = Brain(2, policy="recompute")
    brain.request()
    ((leader, _),) = brain.take(Submit)
    for number in range(2):
        brain.report(number, num_running=1, used_blocks=2)
    brain.controller.transitions.cuts.found(InstanceId(0), InstanceId(1), brain.now_s)
    brain.controller.placement.mark(brain.group_id(leader), Standing.LEAVING)
    brain.pass_time()
    assert not brain.take(Migrate)


def scaled_down(num: int, max_tokens: int, **settings: object) -> FakeCluster:
    """Requests run on two instances, and one of them is to leave."""
    cluster = FakeCluster(**{"pools": (200, 200), "max_model_len": 100, **settings})  # type: ignore[arg-type]
    for _ in range(num):
        cluster.request(5, max_tokens)
    cluster.run_until(lambda: all(account.token_ids for account in cluster.accounts.values()))
    cluster.pass_time(0.1)
    cluster.resize(1)
    return cluster


def longest_answer(cluster: FakeCluster) -> int:
    return max(len(account.token_ids) for account in cluster.accounts.values())


def run_until_given_back(cluster: FakeCluster) -> None:
    """Time passes quickly beside steps, as in a cluster whose steps take long."""
    while not cluster.given_back:
        for action in cluster.actions():
            if action in cluster.actions():
                cluster.perform(action)
        cluster.check()
        cluster.pass_time(0.1)


def test_an_instance_leaves_long_before_its_answers_end() -> None:
    cluster = scaled_down(4, 60)
    before = longest_answer(cluster)
    run_until_given_back(cluster)
    assert longest_answer(cluster) < before + 30
    assert len(cluster.unfinished) == 4
    assert cluster.controller.balance.num_moved == 2
    cluster.finish()
    assert cluster.num_preemptions == 0, "nothing was computed twice"


def test_with_a_ring_answers_end_where_they_are() -> None:
    cluster = scaled_down(4, 40, num_layers=6, windows=(8, 3), caches=False)
    run_until_given_back(cluster)
    assert cluster.controller.balance.num_moved == 0
    cluster.finish()
