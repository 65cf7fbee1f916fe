"""A cluster that may grow: orders under overload, and instances given back after it."""

from kunserve.control.cluster.commands import ScaleDown, ScaleUp
from kunserve.control.cluster.scaling import SAY_PERIOD_S
from kunserve.core.config import ClusterConfig
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Submit
from kunserve.core.request import FinishReason
from kunserve.policy.scale import GIVE_BACK_HOLD_S
from tests.unit.control.cluster.brain import BLOCKS, Brain

SHORT = {"num_running": 9, "used_blocks": BLOCKS, "num_waiting": 2, "head_of_line_blocks": 90}


def growing(num_instances: int = 1, most: int = 3) -> Brain:
    config = ClusterConfig(num_instances=1, max_instances=most)
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
