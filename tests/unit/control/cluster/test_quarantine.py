"""Requests that kill instances: who is suspected, who runs alone, who ends with an error."""

from kunserve.control.cluster.commands import LogQuarantine
from kunserve.control.cluster.quarantine import CLEARING_TOKENS
from kunserve.core.ids import RequestId
from kunserve.core.messages import Submit
from kunserve.core.request import FinishReason
from tests.unit.control.cluster.brain import Brain


def crash(brain: Brain, number: int) -> None:
    """An instance dies of what it runs, and comes back."""
    brain.controller.lost(brain.group_of(number).leader, "exit code 1", brain.now_s)
    brain.pass_time(0.0)
    brain.start(number)


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


def test_after_the_second_death_each_runs_alone() -> None:
    brain = twice_dead()
    assert submitted(brain) == [(0, "r0")], "and nothing beside it"
    brain.request()
    assert submitted(brain) == []
    assert brain.controller.state(brain.now_s).num_unplaced == 2
    end(brain, "r0")
    assert submitted(brain) == [(0, "r1")]
    end(brain, "r1")
    assert submitted(brain) == [(0, "r2")], "and then whatever else has come"
    assert brain.controller.state(brain.now_s).num_quarantined == 2


def test_who_has_made_enough_tokens_alone_runs_among_others_again() -> None:
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


def test_who_dies_alone_ends_with_an_error_and_is_named() -> None:
    brain = twice_dead()
    submitted(brain)
    crash(brain, 0)
    assert [t.finish_reason for t in brain.tokens] == [FinishReason.ERROR]
    assert brain.tokens[0].request_id == "r0"
    said = brain.said(LogQuarantine)
    assert [command.request_id for command in said].count("r0") == 2
    assert "ends with an error" in [c.reason for c in said if c.request_id == "r0"][-1]
    assert brain.controller.state(brain.now_s).num_guilty == 1
    assert submitted(brain) == [(0, "r1")]


def test_a_deliberate_death_is_no_requests_fault() -> None:
    brain = Brain(1, policy="recompute")
    brain.request()
    for _ in range(9):
        brain.controller.lost(brain.group_of(0).leader, "killed", brain.now_s, is_deliberate=True)
        brain.start(0)
    assert not brain.tokens and brain.controller.state(brain.now_s).num_quarantined == 0


def test_a_deliberate_death_in_quarantine_only_interrupts_it() -> None:
    brain = twice_dead(1)
    submitted(brain)
    brain.controller.lost(brain.group_of(0).leader, "killed", brain.now_s, is_deliberate=True)
    brain.start(0)
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
