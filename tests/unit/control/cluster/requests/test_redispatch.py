"""Requests that wait go to where they start at once: what the controller sends, and what comes."""

from kunserve.core.config import ServerConfig
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Abort, Prepare, Returned, ReturnWaiting, Submit
from kunserve.core.request import FinishReason, Request, SamplingParams
from tests.fake_cluster import FakeCluster
from tests.unit.control.cluster.brain import BLOCKS, Brain


def submitted(brain: Brain) -> list[tuple[int, str]]:
    return [(int(i), message.request.request_id) for i, message in brain.take(Submit)]


def beside_idle_ones(server: ServerConfig | None = None) -> tuple[Brain, int, RequestId]:
    """A full pipeline of two with one waiting request, and two idle instances."""
    brain = Brain(4, server=server)
    brain.controller.force_drop(None, brain.now_s)
    brain.pass_time()
    brain.complete()
    (leader,) = (members[0] for members in brain.groups if len(members) == 2)
    singles = [members[0] for members in brain.groups if len(members) == 1]
    for single in singles:
        brain.report(single, used_blocks=BLOCKS - 1)  # so that the pipeline gets the request
    brain.report(leader)
    request_id = brain.request()
    assert submitted(brain) == [(leader, request_id)]
    for single in singles:
        brain.report(single)
    capacity = brain.controller.placement.groups[brain.group_id(leader)].capacity_blocks
    brain.report(
        leader,
        num_running=9,
        used_blocks=capacity,
        num_waiting=1,
        head_of_line_blocks=20,
        waiting_blocks=20,
    )
    return brain, leader, request_id


def test_one_waiting_request_beside_idle_instances_moves_and_nothing_is_merged() -> None:
    brain, leader, request_id = beside_idle_ones()
    assert brain.take(ReturnWaiting) == [(leader, ReturnWaiting((request_id,)))]
    assert not brain.take(Prepare)
    brain.tell(leader, Returned(InstanceId(leader), (request_id,)))
    ((target, moved),) = submitted(brain)
    assert moved == request_id and target not in brain.group_of(leader).members
    assert brain.controller.state(brain.now_s).num_moved == 1


def test_what_has_started_meanwhile_stays() -> None:
    brain, leader, _ = beside_idle_ones()
    brain.take(ReturnWaiting)
    brain.tell(leader, Returned(InstanceId(leader), ()))
    assert submitted(brain) == []
    assert brain.controller.state(brain.now_s).num_moved == 0


def test_a_leader_is_asked_once_until_its_report_knows_of_it() -> None:
    brain, leader, request_id = beside_idle_ones()
    full = {"num_running": 9, "used_blocks": 10**4, "num_waiting": 1, "head_of_line_blocks": 20}
    brain.take(ReturnWaiting)
    brain.report(leader, **full, waiting_blocks=20)
    assert not brain.take(ReturnWaiting)
    brain.tell(leader, Returned(InstanceId(leader), (request_id,)))
    brain.report(leader, num_running=9, used_blocks=10**4)
    assert not brain.take(ReturnWaiting)


def test_requests_given_back_at_a_commit_wait_for_the_new_group_in_order() -> None:
    brain = Brain(policy="recompute")
    requests = [brain.request() for _ in range(6)]
    brain.take(Submit)
    brain.controller.force_drop(None, brain.now_s)
    brain.pass_time(0.0)
    brain.prepared()
    for leader in (1, 0):
        theirs = tuple(r for i, r in enumerate(requests) if i % 2 == leader)
        brain.tell(leader, Returned(InstanceId(leader), theirs))
    assert submitted(brain) == []
    late = brain.request()
    assert submitted(brain) == [], "nobody is sent to a group that is about to change"
    brain.committed()
    (leader,) = (members[0] for members in brain.groups)
    assert submitted(brain) == [(leader, r) for r in (*requests, late)]


def test_a_survivor_gets_requests_once_it_has_formed() -> None:
    brain = Brain(3, policy="recompute")
    brain.controller.force_drop(None, brain.now_s)
    brain.pass_time(0.0)
    brain.complete()
    (pair,) = (members for members in brain.groups if len(members) == 2)
    (single,) = (members[0] for members in brain.groups if len(members) == 1)
    survivor = pair[1]
    brain.slow.add(survivor)
    brain.die(pair[0])
    for _ in range(4):
        brain.request()
    assert {leader for leader, _ in submitted(brain)} == {single}
    brain.formed(survivor)
    brain.request()
    assert {leader for leader, _ in submitted(brain)} == {survivor}


def test_a_late_end_of_an_old_run_is_nothing_to_the_new_one() -> None:
    brain = Brain(3, policy="recompute")
    brain.controller.force_drop(None, brain.now_s)
    brain.pass_time(0.0)
    brain.complete()
    (pair,) = (members for members in brain.groups if len(members) == 2)
    (single,) = (members[0] for members in brain.groups if len(members) == 1)
    brain.report(single, used_blocks=BLOCKS)
    request_id = brain.request()
    assert submitted(brain) == [(pair[0], request_id)]
    brain.report(single)
    brain.slow.add(pair[0])
    brain.die(pair[1])
    assert submitted(brain) == [(single, request_id)]
    brain.output(pair[0], request_id, FinishReason.LENGTH)
    assert brain.take(Abort) == [] and brain.controller.num_unfinished == 1
    brain.output(single, request_id, FinishReason.LENGTH)
    assert len(brain.tokens) == 1


def test_a_respawned_instance_takes_over_what_waits() -> None:
    """Real agents: the waiting requests leave the survivor's queue, and get their own tokens."""
    cluster = FakeCluster(pools=(12, 12), max_num_seqs=8)
    for _ in range(8):
        cluster.request(8, 8)
    cluster.kill_instance(InstanceId(1))
    cluster.run_except(lambda action: False, lambda: cluster.num_actions >= 80)
    cluster.start_instance(InstanceId(1))
    while cluster.unfinished:
        for action in cluster.actions()[:20]:
            if action in cluster.actions():
                cluster.perform(action)
        cluster.pass_time(0.1)
    assert cluster.controller.state(cluster.now_s).num_moved > 0
    cluster.finish()


def test_queue_limits_count_what_has_come_back_once() -> None:
    limits = ServerConfig(max_num_queued_reqs=2, max_num_queued_tokens=100)
    brain, leader, request_id = beside_idle_ones(limits)
    one_more = Request(RequestId("x"), (1,), SamplingParams(max_tokens=1), 0.0)
    assert brain.controller.admit(one_more) is None
    brain.tell(leader, Returned(InstanceId(leader), (request_id,)))
    assert brain.controller.admit(one_more) is None, "it is in the last report and on its way"
