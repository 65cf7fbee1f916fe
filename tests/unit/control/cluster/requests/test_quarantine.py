"""Requests that kill instances: who is suspected, who runs alone, who ends with an error."""

import pytest

from kunserve.control.cluster.commands import LogQuarantine, Outbox
from kunserve.control.cluster.requests.quarantine import (
    CLEARING_TOKENS,
    EMPTYING_S,
    Blame,
    Cause,
    Quarantine,
)
from kunserve.core.config import ClusterConfig
from kunserve.core.ids import RequestId
from kunserve.core.messages import Submit
from kunserve.core.request import FinishReason
from kunserve.policy.drop.static_pipelines import plan_pipelines
from tests.unit.control.cluster.brain import Brain
from tests.unit.control.cluster.test_placement import placed


def crash(
    brain: Brain, number: int, named: tuple[str, ...] = (), cause: Cause = Cause.INSIDE
) -> None:
    """An instance dies, of what it runs as far as anybody knows, and comes back."""
    blame = Blame(cause, tuple(map(RequestId, named)))
    brain.controller.lost(brain.group_of(number).leader, "exit code 1", brain.now_s, blame)
    brain.pass_time(0.0)
    brain.start(number)


def errors(brain: Brain) -> list[str]:
    return [t.request_id for t in brain.tokens if t.finish_reason is FinishReason.ERROR]


def end(brain: Brain, request_id: str) -> None:
    """A request ends, and the leader's next report says that nothing is left of it."""
    brain.output(0, RequestId(request_id), FinishReason.LENGTH)
    brain.report(0)


def submitted(brain: Brain) -> list[tuple[int, str]]:
    return [(int(i), message.request.request_id) for i, message in brain.take(Submit)]


def test_the_first_death_is_nobodys_fault() -> None:
    brain = Brain(policy="recompute")
    first, second = brain.request(), brain.request()
    assert submitted(brain) == [(0, first), (1, second)]
    crash(brain, 0)
    assert submitted(brain) == [(1, first)]
    assert brain.controller.state(brain.now_s).num_quarantined == 0


def twice_dead(num_requests: int = 2) -> Brain:
    """All requests were part of two deaths of the only instance."""
    brain = Brain(1, policy="recompute")
    for _ in range(num_requests):
        brain.request()
    crash(brain, 0)
    assert len(submitted(brain)) == 2 * num_requests
    crash(brain, 0)
    return brain


def test_after_the_second_death_half_of_them_is_tested_then_the_other_half() -> None:
    brain = twice_dead(4)
    assert submitted(brain) == [(0, "r0"), (0, "r1")], "and nothing beside them"
    brain.request()
    assert submitted(brain) == []
    assert brain.controller.state(brain.now_s).num_unplaced == 3
    end(brain, "r0")
    assert submitted(brain) == []
    end(brain, "r1")
    assert submitted(brain) == [(0, "r2")]
    end(brain, "r2")
    assert submitted(brain) == [(0, "r3")]
    end(brain, "r3")
    assert submitted(brain) == [(0, "r4")], "and then whatever else has come"
    assert brain.controller.state(brain.now_s).num_quarantined == 4


def test_a_half_that_dies_clears_the_other_half_at_once() -> None:
    brain = twice_dead(4)
    assert submitted(brain) == [(0, "r0"), (0, "r1")]
    crash(brain, 0)
    assert submitted(brain) == [(0, "r0")]
    end(brain, "r0")
    assert submitted(brain) == [(0, "r1")]
    quarantine = brain.controller._requests.quarantine
    assert not quarantine.holds("r2") and not quarantine.holds("r3")  # type: ignore[arg-type]


def test_a_step_that_names_its_requests_narrows_the_search() -> None:
    brain = Brain(1, policy="recompute")
    for _ in range(8):
        brain.request()
    for _ in range(2):
        crash(brain, 0, ("r5", "r6"))
    # Released are all but these two, and run when the test is over; r5 is the older half.
    assert submitted(brain)[-1] == (0, "r5")
    end(brain, "r5")
    assert submitted(brain)[0] == (0, "r6")
    crash(brain, 0, ("r6",))
    assert errors(brain) == ["r6"]
    assert brain.controller.state(brain.now_s).num_guilty == 1


def test_a_request_that_is_alone_in_a_step_that_fails_twice_is_guilty() -> None:
    """Nothing needs to run alone for that."""
    brain = Brain(1, policy="recompute")
    for _ in range(3):
        brain.request()
    crash(brain, 0, ("r1",))
    assert errors(brain) == []
    crash(brain, 0, ("r1",))
    assert errors(brain) == ["r1"]
    assert brain.controller.state(brain.now_s).num_quarantined == 0


def test_who_has_made_enough_tokens_in_the_test_runs_among_others_again() -> None:
    brain = twice_dead()
    submitted(brain)
    for _ in range(CLEARING_TOKENS):
        assert submitted(brain) == []
        brain.output(0, "r0")  # type: ignore[arg-type]
    assert submitted(brain) == [], "the next suspect waits until the group is empty"
    end(brain, "r0")
    assert submitted(brain) == [(0, "r1")]
    end(brain, "r1")
    assert not brain.controller.num_unfinished


def test_who_dies_alone_three_times_ends_with_an_error_and_is_named() -> None:
    brain = twice_dead()
    for number in range(3):
        assert submitted(brain)[0] == (0, "r0")
        assert errors(brain) == [], number
        crash(brain, 0)
    assert errors(brain) == ["r0"]
    said = [c.reason for c in brain.said(LogQuarantine) if c.request_id == "r0"]
    assert len(said) == 4 and "ends with an error" in said[-1]
    assert brain.controller.state(brain.now_s).num_guilty == 1
    assert submitted(brain)[-1] == (0, "r1")


def test_two_deaths_from_outside_convict_nobody() -> None:
    """Not even two more, while it runs alone."""
    brain = Brain(1, policy="recompute")
    brain.request()
    for _ in range(3):
        crash(brain, 0, cause=Cause.OUTSIDE)
        assert brain.controller.state(brain.now_s).num_quarantined == 0
    crash(brain, 0, cause=Cause.OUTSIDE)
    assert brain.controller.state(brain.now_s).num_quarantined == 1
    for _ in range(5):
        crash(brain, 0, cause=Cause.OUTSIDE)
        assert errors(brain) == []
    crash(brain, 0, cause=Cause.OUTSIDE)
    assert errors(brain) == ["r0"]


def test_a_deliberate_death_is_no_requests_fault() -> None:
    brain = Brain(1, policy="recompute")
    brain.request()
    for _ in range(9):
        crash(brain, 0, cause=Cause.NOBODY)
    assert not brain.tokens and brain.controller.state(brain.now_s).num_quarantined == 0


def test_a_deliberate_death_in_a_test_only_interrupts_it() -> None:
    brain = twice_dead(1)
    submitted(brain)
    crash(brain, 0, cause=Cause.NOBODY)
    assert not brain.tokens
    assert submitted(brain) == [(0, "r0")]


def test_requests_far_back_in_the_queue_are_not_suspected() -> None:
    """They cannot have run: a death with a long queue does not end in as many quarantines."""
    brain = Brain(1, policy="recompute", max_num_seqs=4)
    for _ in range(40):
        brain.request()
    for _ in range(2):
        brain.report(0, num_running=4, num_waiting=36)
        crash(brain, 0)
    quarantine = brain.controller._requests.quarantine
    held = [number for number in range(40) if quarantine.holds(f"r{number}")]  # type: ignore[arg-type]
    assert held == list(range(8))


def test_a_serving_instance_is_not_emptied_while_another_is_missing() -> None:
    brain = Brain(2, policy="recompute")
    for _ in range(2):
        brain.request()
    submitted(brain)
    for _ in range(2):
        brain.controller.lost(brain.group_of(0).leader, "exit code 1", brain.now_s)
        brain.start(0)
        for number in range(2):
            brain.report(number, num_running=1)
    # r0 moved to instance 1 at the first death; whatever was on 0 at both is alone now, or nobody.
    brain.request()
    assert submitted(brain), "new requests are still served"


def test_no_test_is_made_in_a_group_that_a_transition_will_change() -> None:
    brain = Brain(3, policy="recompute")
    first = brain.request()
    crash(brain, 0)
    assert submitted(brain) == [(0, first), (1, first)]
    placement = brain.controller.placement
    ((old, new),) = plan_pipelines(
        (brain.group_of(0), brain.group_of(2)),
        placement.specs,
        2,
        first_id=placement.new_ids(1),
        head_cost_layers=1,
    )
    brain.controller.transitions.begin_drops([(old, new)], "test", brain.now_s)
    crash(brain, 1)
    assert submitted(brain) == [(1, first)]
    assert placement.reserved == brain.group_id(1)


def test_a_suspect_that_no_group_can_hold_keeps_no_other_from_its_test() -> None:
    brain = Brain(2, policy="recompute")
    for _ in range(2):
        brain.controller.force_drop(None, brain.now_s)
        brain.pass_time()
        brain.complete()
        assert len(brain.groups) == 1
        if not brain.controller.num_unfinished:
            large, small = brain.request(4 * 120), brain.request()
        brain.take(Submit)
        crash(brain, brain.group_of(0).leader)
    assert [request_id for _, request_id in submitted(brain)] == [small]
    assert brain.controller._requests.quarantine.holds(large)


def test_who_waits_for_the_end_of_a_test_is_not_given_up() -> None:
    brain = Brain(1, cluster=ClusterConfig(num_instances=1, start_timeout_s=30.0))
    for _ in range(2):
        brain.request()
    for _ in range(2):
        crash(brain, 0)
    brain.request()
    for tested, following in (("r0", "r1"), ("r1", "r2")):
        for _ in range(40):
            brain.pass_time(1.0)
        assert errors(brain) == []
        submitted(brain)
        end(brain, tested)
        assert submitted(brain) == [(0, following)]


def test_suspects_are_looked_at_while_an_instance_stays_dead() -> None:
    """The end of a request changes no group, so nothing else looks whether a group is empty."""
    brain = Brain(3, policy="recompute")
    first, second, third = brain.request(), brain.request(), brain.request()
    assert submitted(brain) == [(0, first), (1, second), (2, third)]
    crash(brain, 0)
    ((leader, suspect),) = submitted(brain)
    assert suspect == first
    others = {1: second, 2: third}
    stays = ({1, 2} - {leader}).pop()
    more = brain.request()
    assert submitted(brain) == [(0, more)]
    brain.controller.lost(
        brain.group_of(leader).leader, "exit code 1", brain.now_s, Blame(Cause.INSIDE, ())
    )
    brain.pass_time(0.0)
    submitted(brain)
    for number, request_id in ((0, more), (stays, others[stays])):
        brain.output(number, RequestId(request_id), FinishReason.LENGTH)
        brain.report(number)
    brain.pass_time(1.0)
    brain.pass_time(1.0)
    assert first in [request_id for _, request_id in submitted(brain)]


def two_suspects_and_a_loss(num_others: int) -> tuple[Brain, str]:
    """Three instances; a suspect is held, and the one that died of it last never comes back."""
    brain = Brain(3, policy="recompute")
    suspect = brain.request()
    crash(brain, 0)
    ((leader, _), *_) = [one for one in submitted(brain) if one[1] == suspect][1:]
    for _ in range(num_others):
        brain.request()
    brain.controller.lost(brain.group_of(leader).leader, "exit code 1", brain.now_s, Blame())
    brain.pass_time(0.0)
    assert brain.controller._requests.quarantine.holds(RequestId(suspect))
    return brain, suspect


def serve(brain: Brain, seconds: float, *, with_load: bool) -> list[str]:
    """Who is sent to an instance meanwhile; with load every end is followed by another request."""
    sent = [request_id for _, request_id in submitted(brain)]
    for _ in range(int(seconds)):
        leaders = [group.layout.leader for group in brain.controller.placement.groups.values()]
        for leader in leaders:
            led = brain.controller._requests.led_by(leader)
            if len(led) > 1 or (led and not with_load):
                brain.output(leader, led[0], FinishReason.LENGTH)
            num_running = brain.controller._requests.num_at(leader)
            brain.report(leader, after_s=0.0, num_running=num_running, used_blocks=num_running)
        if with_load:
            brain.request()
        brain.pass_time(1.0)
        sent += [request_id for _, request_id in submitted(brain)]
    return sent


def test_a_group_is_emptied_under_steady_load_although_one_is_dead_for_good() -> None:
    brain, suspect = two_suspects_and_a_loss(6)
    sent = serve(brain, 29.0, with_load=True)
    assert suspect not in sent, "whoever is missing may come back"
    sent = serve(brain, 60.0, with_load=True)
    assert suspect in sent and not errors(brain)
    assert brain.controller._requests.num_rerun > 0, "a group never gets empty by itself here"


def test_idle_groups_are_tested_in_at_once_although_one_is_dead_for_good() -> None:
    brain, suspect = two_suspects_and_a_loss(2)
    assert suspect in serve(brain, 3.0, with_load=False) and not errors(brain)


def test_what_still_runs_in_a_group_kept_for_a_test_runs_elsewhere_after_a_while() -> None:
    """A long answer would hold up the test of the next suspect until its end."""
    brain = twice_dead()
    assert submitted(brain)[-1] == (0, "r0")
    for _ in range(CLEARING_TOKENS):
        brain.output(0, RequestId("r0"))
    for _ in range(int(EMPTYING_S) - 1):
        brain.pass_time(1.0)
    assert submitted(brain) == []
    brain.pass_time(2.0)
    assert submitted(brain) == [(0, "r1")]
    end(brain, "r1")
    ((_, again),) = [(i, message.request) for i, message in brain.take(Submit)]
    assert (again.request_id, len(again.output_token_ids)) == ("r0", CLEARING_TOKENS)


@pytest.mark.parametrize(("cause", "is_released"), [(Cause.OUTSIDE, True), (Cause.INSIDE, False)])
def test_who_waits_too_long_for_a_test_is_released_if_all_deaths_came_from_outside(
    cause: Cause, is_released: bool
) -> None:
    quarantine = Quarantine(placed((0,)), Outbox())
    name = RequestId("r")
    while not quarantine.holds(name):
        quarantine.died([name], Blame(cause))
    assert quarantine.release(name) == is_released
    assert quarantine.holds(name) == (not is_released)
    assert not quarantine.release(RequestId("another"))
