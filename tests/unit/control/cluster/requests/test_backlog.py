"""What waits at the controller: leaders are sent what they compute soon, and no more."""

from kunserve.control.cluster.requests.backlog import MOST_REQUESTS_AHEAD, STEPS_AHEAD
from kunserve.core.config import ClusterConfig, SchedulerConfig, ServerConfig
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Abort, Prepare, Returned, Submit
from kunserve.core.request import FinishReason, Request, SamplingParams
from tests.unit.control.cluster.brain import BLOCKS, Brain

TOKENS = 256
"""Of each prompt."""
AHEAD = STEPS_AHEAD * SchedulerConfig().max_num_batched_tokens // TOKENS
"""Such prompts that a leader of one stage is sent."""


def submitted(brain: Brain) -> list[tuple[int, RequestId]]:
    return [(int(i), message.request.request_id) for i, message in brain.take(Submit)]


def full(num_instances: int, **overload: object) -> tuple[Brain, list[RequestId]]:
    """As many requests as leaders are sent ahead, and ten more."""
    brain = Brain(num_instances, policy="recompute", **overload)
    requests = [brain.request(TOKENS) for _ in range(num_instances * AHEAD + 10)]
    return brain, requests


def test_a_leader_is_sent_a_few_steps_and_the_rest_waits_in_order() -> None:
    brain, requests = full(1)
    assert submitted(brain) == [(0, request_id) for request_id in requests[:AHEAD]]
    assert brain.controller.state(brain.now_s).num_unplaced == 10
    for number in range(10):
        brain.output(0, requests[number])
        assert submitted(brain) == [(0, requests[AHEAD + number])]
    brain.output(0, requests[10])
    assert submitted(brain) == []


def test_whoever_is_bound_on_arrival_waits_at_the_least_loaded() -> None:
    """As behind a balancer that knows loads: nothing is held back for whoever has room first."""
    cluster = ClusterConfig(num_instances=2, dispatch_policy="least-load")
    brain = Brain(2, policy="recompute", cluster=cluster)
    requests = [brain.request(TOKENS) for _ in range(2 * AHEAD + 10)]
    sent = submitted(brain)
    assert [request_id for _, request_id in sent] == requests
    assert [leader for leader, _ in sent].count(0) == len(requests) // 2
    assert brain.controller.state(brain.now_s).num_unplaced == 0


def test_a_second_token_makes_no_more_room() -> None:
    brain, requests = full(1)
    brain.output(0, requests[0])
    submitted(brain)
    brain.output(0, requests[0])
    assert submitted(brain) == []


def test_what_ends_or_is_cancelled_makes_room() -> None:
    brain, requests = full(1)
    submitted(brain)
    brain.output(0, requests[0], FinishReason.ERROR)
    assert submitted(brain) == [(0, requests[AHEAD])]
    brain.controller.cancel(requests[1])
    brain.pass_time()
    assert brain.take(Abort) == [(0, Abort(requests[1]))]
    assert submitted(brain) == [(0, requests[AHEAD + 1])]
    brain.controller.cancel(requests[AHEAD + 2])
    brain.output(0, requests[2])
    assert submitted(brain) == [(0, requests[AHEAD + 3])]
    assert not brain.take(Abort), "nobody has what waits here"


def test_long_prompts_are_sent_two_at_a_time() -> None:
    brain = Brain(1, policy="recompute")
    brain.controller.placement.groups[brain.group_id(0)].capacity_blocks = 10**6
    brain.report(0)
    requests = [brain.request(10_000) for _ in range(4)]
    assert submitted(brain) == [(0, request_id) for request_id in requests[:2]]


def test_a_new_instance_takes_what_waits_in_order() -> None:
    brain, requests = full(1)
    submitted(brain)
    brain.start(1)
    assert submitted(brain) == [(1, r) for r in requests[AHEAD : 2 * AHEAD]]


def test_at_a_commit_only_what_was_sent_ahead_is_sent_anew() -> None:
    brain, requests = full(2)
    ahead = submitted(brain)
    brain.controller.force_drop(None, brain.now_s)
    brain.pass_time(0.0)
    brain.prepared()
    for leader in (1, 0):
        theirs = tuple(request_id for to, request_id in ahead if to == leader)
        brain.tell(leader, Returned(InstanceId(leader), theirs))
    assert submitted(brain) == []
    brain.committed()
    ((leader, *_),) = brain.groups
    assert submitted(brain) == [(leader, request_id) for request_id in requests[: 2 * AHEAD]]


def test_what_waits_is_part_of_what_a_drop_must_free() -> None:
    brain = Brain(2, max_queue_per_gain=1e9)
    for _ in range(2 * AHEAD + 10):
        brain.request(TOKENS)
    brain.report(1, num_running=9, used_blocks=BLOCKS)
    brain.report(
        0,
        num_running=9,
        used_blocks=BLOCKS,
        num_waiting=8,
        head_of_line_blocks=64,
        waiting_blocks=512,
    )
    (transition,) = brain.controller.transitions.active.values()
    share = 10 * (TOKENS // 4) // 2
    trigger = f"demand {BLOCKS + 512 + share} blocks, capacity {BLOCKS}"
    assert transition.record.trigger == trigger


def test_waiting_for_others_is_no_reason_to_end() -> None:
    brain = Brain(1, cluster=ClusterConfig(num_instances=1, start_timeout_s=30.0))
    for _ in range(AHEAD + 1):
        brain.request(TOKENS)
    for _ in range(100):
        brain.pass_time(1.0)
    assert not brain.tokens


def test_queue_limits_count_what_waits_here() -> None:
    limits = ServerConfig(max_num_queued_reqs=AHEAD + 3)
    brain = Brain(1, server=limits, policy="recompute")
    one_more = Request(RequestId("x"), (1,), SamplingParams(max_tokens=1), 0.0)
    for _ in range(AHEAD + 2):
        brain.request(TOKENS)
    assert brain.controller.admit(one_more) is None
    brain.request(TOKENS)
    assert brain.controller.admit(one_more) is not None


def test_no_drop_is_made_for_a_queue_that_waits_for_compute() -> None:
    brain = Brain(2)
    for _ in range(2 * AHEAD + 10):
        brain.request(TOKENS)
    for _ in range(5):
        for number in range(2):
            brain.report(number, num_running=1, used_blocks=5, num_waiting=1, waiting_blocks=64)
    assert not brain.take(Prepare)


def test_who_is_urgent_passes_those_that_wait() -> None:
    """Also those that leaders were sent, but not without a bound."""
    brain, requests = full(1)
    submitted(brain)
    urgent = [brain.request(TOKENS, priority=-1) for _ in range(AHEAD + 1)]
    assert submitted(brain) == [(0, request_id) for request_id in urgent[:AHEAD]]
    least = brain.request(TOKENS, priority=5)
    brain.output(0, urgent[0])
    assert submitted(brain) == [(0, urgent[AHEAD])]
    for request_id in [*urgent[1:], *requests[:AHEAD]]:
        brain.output(0, request_id)
    assert submitted(brain) == [(0, request_id) for request_id in requests[AHEAD:]][:AHEAD]
    for request_id in requests[AHEAD : AHEAD + 10]:
        brain.output(0, request_id)
    assert (0, least) in submitted(brain)


def test_what_a_leader_is_sent_is_bounded_whatever_the_priorities() -> None:
    brain = Brain(1, policy="recompute")
    for number in range(MOST_REQUESTS_AHEAD + 20):
        brain.request(TOKENS, priority=-number)
    assert len(submitted(brain)) == MOST_REQUESTS_AHEAD
