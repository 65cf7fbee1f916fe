"""A cluster that may grow: orders under overload, and instances given back after it."""

from kunserve.control.cluster.commands import Respawn, ScaleDown, ScaleUp
from kunserve.control.cluster.scaling import REFUSED_HOLD_S, SAY_PERIOD_S
from kunserve.core.config import ClusterConfig
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Prepare, Submit
from kunserve.core.request import FinishReason
from kunserve.core.snapshots import ClusterSize
from kunserve.policy.drop.scale import GIVE_BACK_HOLD_S
from tests.unit.control.cluster.brain import BLOCKS, Brain

SHORT = {"num_running": 9, "used_blocks": BLOCKS, "num_waiting": 2, "head_of_line_blocks": 90}


def growing(num_instances: int = 1, most: int = 3) -> Brain:
    config = ClusterConfig(num_instances=num_instances, min_instances=1, max_instances=most)
    return Brain(num_instances, cluster=config, policy="recompute")


def test_as_many_are_ordered_as_the_queue_needs_and_no_more_than_once() -> None:
    brain = growing()
    brain.report(0, **SHORT, waiting_blocks=150)
    assert len(brain.said(ScaleUp)) == 2
    brain.report(0, **SHORT, waiting_blocks=150)
    assert not brain.said(ScaleUp), "what was ordered counts as if it stood"


def test_an_order_that_has_arrived_is_none_any_more() -> None:
    brain = growing()
    brain.report(0, **SHORT, waiting_blocks=90)
    assert len(brain.said(ScaleUp)) == 1
    brain.start(1)
    brain.report(0, **SHORT, waiting_blocks=90)
    assert len(brain.said(ScaleUp)) == 1


def test_a_replacement_is_no_order() -> None:
    brain = growing(num_instances=2)
    brain.report(0, **SHORT, waiting_blocks=90)
    assert len(brain.said(ScaleUp)) == 1
    brain.die(1)
    brain.start(1)
    brain.report(0, **SHORT, waiting_blocks=90)
    assert not brain.said(ScaleUp), "the ordered one is still to come"


def idle_for(brain: Brain, seconds: float) -> None:
    end_s = brain.now_s + seconds
    while brain.now_s < end_s:
        for members in brain.groups:
            brain.report(members[0], after_s=1.0)


def test_the_youngest_idle_instance_is_given_back_after_a_while() -> None:
    brain = growing(num_instances=2)
    idle_for(brain, GIVE_BACK_HOLD_S - 2.0)
    assert not brain.said(ScaleDown)
    idle_for(brain, 6.0)
    assert brain.said(ScaleDown) == [ScaleDown(InstanceId(1))]
    assert brain.groups == [(0,)]
    idle_for(brain, 2 * GIVE_BACK_HOLD_S)
    assert not brain.said(ScaleDown), "never smaller than it was set up"


def test_who_leaves_gets_no_request_and_serves_its_own_to_their_end() -> None:
    brain = growing(num_instances=2)
    brain.report(0, num_running=1, used_blocks=5)
    request_id = brain.request()
    ((leader, _),) = brain.take(Submit)
    assert leader == 1
    end_s = brain.now_s + GIVE_BACK_HOLD_S + 4.0
    while brain.now_s < end_s:
        brain.report(0, after_s=1.0, num_running=1, used_blocks=5)
        brain.report(1, after_s=1.0, num_running=1, used_blocks=2)
    assert brain.controller.placement.leaving == {brain.group_id(1)}
    brain.request()
    ((leader, _),) = brain.take(Submit)
    assert leader == 0
    assert not brain.said(ScaleDown)
    brain.output(1, request_id, FinishReason.LENGTH)
    brain.report(1)
    assert brain.said(ScaleDown) == [ScaleDown(InstanceId(1))]


def test_nobody_leaves_once_memory_is_short_again_or_somebody_died() -> None:
    for end in ("short", "death"):
        brain = growing(num_instances=3)
        brain.report(2, num_running=1, used_blocks=2)
        brain.request()  # keeps whoever has it from being dismissed at once
        end_s = brain.now_s + GIVE_BACK_HOLD_S + 4.0
        while brain.now_s < end_s and not brain.controller.placement.leaving:
            for members in brain.groups:
                brain.report(members[0], after_s=1.0, num_running=1, used_blocks=1)
        assert brain.controller.placement.leaving
        if end == "short":
            brain.report(0, **SHORT, waiting_blocks=90)
        else:
            brain.die(0)
        assert not brain.controller.placement.leaving, end


def test_what_waits_runs_on_who_was_to_leave_and_stays() -> None:
    brain = growing(num_instances=2)
    brain.report(0, num_running=1, used_blocks=5)
    brain.request()
    end_s = brain.now_s + GIVE_BACK_HOLD_S + 4.0
    while brain.now_s < end_s:
        brain.report(0, after_s=1.0, num_running=1, used_blocks=5)
        brain.report(1, after_s=1.0, num_running=1, used_blocks=2)
    assert brain.controller.placement.leaving == {brain.group_id(1)}
    brain.take(Submit)
    for _ in range(60):
        brain.request(360)
    assert {int(leader) for leader, _ in brain.take(Submit)} == {0}
    brain.report(0, num_running=2, used_blocks=BLOCKS, num_waiting=2, head_of_line_blocks=90)
    assert not brain.controller.placement.leaving
    brain.pass_time()
    assert {int(leader) for leader, _ in brain.take(Submit)} == {1}


def test_what_nobody_may_order_is_wanted_until_a_while_after_the_shortage() -> None:
    brain = Brain(1, policy="drop")
    brain.report(0)
    assert not brain.controller.state(brain.now_s).is_scale_up_wanted
    brain.report(0, **SHORT, waiting_blocks=150)
    assert brain.controller.state(brain.now_s).is_scale_up_wanted
    brain.report(0, after_s=SAY_PERIOD_S - 1.0)
    assert brain.controller.state(brain.now_s).is_scale_up_wanted
    brain.report(0, after_s=2.0)
    assert not brain.controller.state(brain.now_s).is_scale_up_wanted


# By hand


def sized(num_instances: int = 2) -> Brain:
    return Brain(num_instances, policy="recompute")


def size_of(brain: Brain) -> ClusterSize:
    return brain.controller.state(brain.now_s).size


def resize(brain: Brain, num_instances: int) -> None:
    brain.controller.resize(num_instances)
    brain.pass_time(0.0)


def test_more_are_ordered_at_once_and_counted_until_they_come() -> None:
    brain = sized()
    resize(brain, 4)
    assert len(brain.said(ScaleUp)) == 2
    assert size_of(brain) == ClusterSize(wanted=4, ordered=2, fewest=4)
    brain.start(2)
    brain.pass_time()
    assert not brain.said(ScaleUp)
    assert size_of(brain).ordered == 1
    brain.start(3)
    assert brain.groups == [(0,), (1,), (2,), (3,)]
    assert size_of(brain) == ClusterSize(wanted=4, fewest=4)


def test_fewer_leave_when_their_requests_have_ended() -> None:
    brain = sized(3)
    requests = [brain.request() for _ in range(3)]
    for number in range(3):
        brain.report(number, num_running=1, used_blocks=2)
    resize(brain, 1)
    assert size_of(brain) == ClusterSize(wanted=1, leaving=2, fewest=1)
    assert not brain.said(ScaleDown)
    leaders = {leader for leader, _ in brain.take(Submit)}
    brain.request()
    ((stays, _),) = brain.take(Submit)
    for request_id, leader in zip(requests, sorted(leaders), strict=True):
        if leader != stays:
            brain.output(leader, request_id, FinishReason.LENGTH)
    brain.keep()
    brain.pass_time()
    assert {down.instance_id for down in brain.said(ScaleDown)} == leaders - {stays}
    assert brain.groups == [(stays,)]
    assert size_of(brain) == ClusterSize(wanted=1, fewest=1)


def test_who_is_to_leave_stays_when_more_are_wanted_again() -> None:
    brain = sized(2)
    request_id = brain.request()
    ((leader, _),) = brain.take(Submit)
    brain.report(1 - leader, num_running=1, used_blocks=9)
    brain.report(leader, num_running=1, used_blocks=2)
    resize(brain, 1)
    assert brain.controller.placement.leaving == {brain.group_id(leader)}
    resize(brain, 2)
    assert not brain.controller.placement.leaving
    assert not brain.said(ScaleUp)
    brain.output(leader, request_id, FinishReason.LENGTH)
    brain.pass_time()
    assert not brain.said(ScaleDown)


def leaving(policy: str = "recompute") -> tuple[Brain, int]:
    """Of two instances the one that leaves and has a request still."""
    brain = Brain(2, policy=policy)
    brain.request()
    ((leader, _),) = brain.take(Submit)
    brain.report(1 - leader, num_running=1, used_blocks=9)
    brain.report(leader, num_running=1, used_blocks=2)
    resize(brain, 1)
    return brain, leader


def test_who_dies_while_it_leaves_is_not_replaced() -> None:
    brain, leader = leaving()
    brain.die(leader)
    assert brain.said(ScaleDown) == [ScaleDown(InstanceId(leader))] and not brain.said(Respawn)
    ((other, _),) = brain.take(Submit)
    assert other == 1 - leader, "its request goes on there"
    assert size_of(brain) == ClusterSize(wanted=1, fewest=1)


def test_who_was_to_leave_stays_if_the_other_one_dies() -> None:
    brain, leader = leaving()
    brain.die(1 - leader)
    assert brain.said(ScaleDown) == [ScaleDown(InstanceId(1 - leader))] and not brain.said(Respawn)
    brain.pass_time()
    assert not brain.controller.placement.leaving and brain.groups == [(leader,)]
    assert size_of(brain) == ClusterSize(wanted=1, fewest=1)


def test_the_dead_go_first() -> None:
    brain = sized(2)
    brain.report(0)
    brain.die(1)
    assert brain.said(Respawn)
    resize(brain, 1)
    assert brain.said(ScaleDown) == [ScaleDown(InstanceId(1))]
    assert brain.groups == [(0,)]


def test_who_leaves_is_neither_dropped_nor_kept_by_a_shortage() -> None:
    brain, leader = leaving("drop")
    brain.report(1 - leader, **SHORT, waiting_blocks=90)
    brain.pass_time()
    assert brain.controller.placement.leaving == {brain.group_id(leader)}
    assert not brain.take(Prepare)
    assert brain.controller.force_drop(None, brain.now_s) == []


def test_an_order_that_cannot_be_carried_out_ends_the_wish_and_says_why() -> None:
    brain = sized()
    resize(brain, 3)
    assert len(brain.said(ScaleUp)) == 1
    brain.controller.growth_refused("no memory", brain.now_s)
    brain.pass_time()
    assert not brain.said(ScaleUp)
    assert size_of(brain) == ClusterSize(wanted=2, fewest=2)
    (reason,) = brain.controller.state(brain.now_s).reasons
    assert reason == "an instance more could not be started: no memory"
    brain.pass_time(REFUSED_HOLD_S + 1.0)
    assert not brain.controller.state(brain.now_s).reasons


def changed_minds() -> Brain:
    """Two serve; a third was asked for, and then not any more before it came."""
    brain = sized(2)
    resize(brain, 3)
    assert len(brain.said(ScaleUp)) == 1
    for number in range(2):
        brain.report(number, num_running=number, used_blocks=number)
    resize(brain, 2)
    brain.pass_time()
    assert not brain.said(ScaleDown) and not brain.controller.placement.leaving
    return brain


def test_nobody_who_serves_leaves_for_one_that_may_never_come() -> None:
    brain = changed_minds()
    assert size_of(brain) == ClusterSize(wanted=2, ordered=1, fewest=2)
    brain.controller.growth_refused("no memory", brain.now_s)
    brain.pass_time()
    assert brain.groups == [(0,), (1,)]
    assert size_of(brain) == ClusterSize(wanted=2, fewest=2)
    brain.pass_time()
    assert not brain.said(ScaleDown) and not brain.said(ScaleUp)


def test_who_comes_too_late_is_who_leaves() -> None:
    brain = changed_minds()
    brain.start(2)
    brain.pass_time()
    assert not brain.said(ScaleDown), "what it has to do is not known yet"
    brain.report(2)
    brain.pass_time()
    assert brain.said(ScaleDown) == [ScaleDown(InstanceId(2))]
    assert brain.groups == [(0,), (1,)]
    assert size_of(brain) == ClusterSize(wanted=2, fewest=2)


def test_who_dies_is_replaced_while_the_one_too_many_is_only_ordered() -> None:
    brain = changed_minds()
    brain.die(1)
    brain.pass_time()
    assert brain.said(Respawn) and not brain.said(ScaleDown)
    brain.controller.growth_refused("no memory", brain.now_s)
    brain.start(1)
    brain.pass_time()
    assert brain.groups == [(0,), (1,)]
    assert size_of(brain) == ClusterSize(wanted=2, fewest=2)


def test_who_leaves_is_kept_by_a_death_and_by_no_shortage_while_others_are_ordered() -> None:
    brain = Brain(3, policy="drop")
    resize(brain, 4)
    for number in range(3):
        brain.request()
        brain.report(number, num_running=1, used_blocks=2 + number)
    resize(brain, 2)
    assert brain.controller.placement.leaving == {brain.group_id(0)}
    brain.report(1, **SHORT, waiting_blocks=90)
    assert brain.controller.placement.leaving == {brain.group_id(0)}
    brain.die(1)
    assert not brain.controller.placement.leaving, "it takes the other one's place at once"


def test_who_leaves_stays_although_as_many_are_ordered() -> None:
    brain = sized(3)
    resize(brain, 5)
    for number in range(3):
        brain.request()
        brain.report(number, num_running=1, used_blocks=2 + number)
    resize(brain, 1)
    assert size_of(brain) == ClusterSize(wanted=1, ordered=2, leaving=2, fewest=1)
    resize(brain, 3)
    assert size_of(brain) == ClusterSize(wanted=3, ordered=2, fewest=3)
    for _ in range(2):
        brain.controller.growth_refused("no memory", brain.now_s)
    brain.pass_time()
    assert size_of(brain) == ClusterSize(wanted=3, fewest=3)
    assert not brain.said(ScaleDown) and len(brain.said(ScaleUp)) == 2


def test_a_cluster_that_was_refused_an_instance_does_not_ask_again_for_a_while() -> None:
    brain = growing()
    brain.report(0, **SHORT, waiting_blocks=90)
    assert len(brain.said(ScaleUp)) == 1
    brain.controller.growth_refused("no memory", brain.now_s)
    brain.report(0, **SHORT, waiting_blocks=90)
    assert not brain.said(ScaleUp)
    brain.pass_time(REFUSED_HOLD_S)
    brain.report(0, **SHORT, waiting_blocks=90)
    assert len(brain.said(ScaleUp)) == 1


def test_a_size_by_hand_is_the_least_from_then_on() -> None:
    brain = growing(num_instances=2, most=4)
    resize(brain, 3)
    brain.start(2)
    idle_for(brain, 3 * GIVE_BACK_HOLD_S)
    assert not brain.said(ScaleDown)
    resize(brain, 1)
    idle_for(brain, 2.0)
    assert len(brain.said(ScaleDown)) == 2


def test_nobody_leaves_while_somebody_is_dead() -> None:
    brain = growing(num_instances=3)
    brain.die(2)
    idle_for(brain, 2 * GIVE_BACK_HOLD_S)
    assert not brain.said(ScaleDown)
