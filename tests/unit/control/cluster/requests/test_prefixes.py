"""Requests go where their beginning lies, unless there is too much to do."""

from collections import Counter

import pytest

from kunserve.control.cluster.requests import backlog
from kunserve.control.cluster.requests.prefixes import MAX_HELD
from kunserve.core.config import ClusterConfig, SchedulerConfig
from kunserve.core.ids import RequestId
from kunserve.core.messages import Submit
from kunserve.core.request import FinishReason
from tests.unit.control.cluster.brain import Brain

SYSTEM = list(range(5000, 5128))
"""What all prompts of a test begin with: two names of 64 tokens."""


def told(number: int, num_tokens: int = 128) -> list[int]:
    """A beginning of its own."""
    return [10_000 * (number + 1) + i for i in range(num_tokens)]


def leader_of(brain: Brain, **asked: object) -> int | None:
    """Where the next request is sent. It makes one token there, and runs on."""
    brain.take(Submit)
    request_id = brain.request(max_tokens=4, **asked)  # type: ignore[arg-type]
    leader = next((i for i, s in brain.take(Submit) if s.request.request_id == request_id), None)
    if leader is not None:
        brain.output(leader, request_id)
    return leader


def idle(brain: Brain, num_instances: int) -> None:
    """All leaders report that they have nothing to do."""
    for number in range(num_instances):
        brain.report(number)


def test_a_second_turn_goes_where_the_first_was() -> None:
    brain = Brain(3)
    first = [leader_of(brain, prompt=told(session)) for session in range(3)]
    assert sorted(first) == [0, 1, 2]
    for session in (2, 0, 1):
        prompt = told(session) + [7] * 20
        assert leader_of(brain, prompt=prompt) == first[session]


def test_an_answer_is_the_beginning_of_the_next_turn() -> None:
    brain = Brain(2)
    brain.take(Submit)
    request_id = brain.request(prompt=told(0, 60), max_tokens=8)
    ((leader, _),) = brain.take(Submit)
    for position in range(8):
        brain.output(leader, request_id, FinishReason.LENGTH if position == 7 else None)
    other = leader_of(brain)
    assert other != leader, "the other one has less to do"
    assert leader_of(brain, prompt=told(0, 60) + [7] * 8) == leader


def test_a_request_of_one_token_is_a_beginning_too() -> None:
    brain = Brain(2)
    leader_of(brain)
    request_id = brain.request(prompt=told(0), max_tokens=1)
    ((leader, _),) = brain.take(Submit)
    brain.output(leader, request_id, FinishReason.LENGTH)
    assert leader == 1 and leader_of(brain) == 0
    assert leader_of(brain, prompt=told(0)) == 1


def test_who_comes_while_a_beginning_is_computed_goes_by_load() -> None:
    brain = Brain(2)
    brain.request(prompt=told(0))
    brain.request(prompt=told(0))
    assert [i for i, _ in brain.take(Submit)] == [0, 1]


def test_another_salt_is_another_beginning() -> None:
    brain = Brain(2)
    assert leader_of(brain, prompt=told(0), salt="a") == 0
    assert leader_of(brain, prompt=told(0), salt="b") == 1
    assert leader_of(brain, prompt=told(0), salt="b") == 1


def test_a_prompt_that_is_scored_is_computed_anyway() -> None:
    brain = Brain(2)
    assert leader_of(brain, prompt=told(0)) == 0
    brain.take(Submit)
    brain.request(prompt=told(0), num_prompt_logprobs=0)
    assert [i for i, _ in brain.take(Submit)] == [1]
    assert leader_of(brain, prompt=told(0)) == 0


def test_a_beginning_that_all_have_spreads() -> None:
    brain = Brain(4)
    leaders = [leader_of(brain, prompt=[*SYSTEM, i]) for i in range(16)]
    assert leaders[:3] == [0, 0, 0]
    assert set(leaders) == {0, 1, 2, 3}


def test_without_prefix_caching_load_decides() -> None:
    for brain in (
        Brain(2, scheduler=SchedulerConfig(enable_prefix_caching=False)),
        Brain(2, cluster=ClusterConfig(num_instances=2, prefix_aware_dispatch=False)),
        Brain(2, cluster=ClusterConfig(num_instances=2, dispatch_policy="round-robin")),
    ):
        assert [leader_of(brain, prompt=SYSTEM) for _ in range(4)] == [0, 1, 0, 1]


def turns_of(brain: Brain, num_tokens: int, *sizes: int) -> list[RequestId]:
    """One session's first turn, which makes a token at 0, then turns with so many new tokens."""
    prompt = told(0, num_tokens)
    first = brain.request(prompt=prompt, max_tokens=4)
    brain.output(0, first)
    idle(brain, 2)
    brain.take(Submit)
    return [brain.request(prompt=prompt + [i] * size, max_tokens=4) for i, size in enumerate(sizes)]


def test_held_for_its_group_and_sent_when_that_has_room() -> None:
    brain = Brain(2, scheduler=SchedulerConfig(max_num_batched_tokens=16))
    turns = turns_of(brain, 128, 32, 32)
    assert [i for i, _ in brain.take(Submit)] == [0, 0]
    idle(brain, 2)
    waits = brain.request(prompt=told(0, 128) + [9] * 8)
    assert not brain.take(Submit), "64 tokens are ahead at 0, which saves 128"
    brain.output(0, turns[0])
    assert [(i, s.request.request_id) for i, s in brain.take(Submit)] == [(0, waits)]


def test_not_held_where_more_is_ahead_than_it_saves() -> None:
    brain = Brain(2, scheduler=SchedulerConfig(max_num_batched_tokens=16))
    turns_of(brain, 64, 60, 60)
    idle(brain, 2)
    assert leader_of(brain, prompt=told(0, 64) + [9] * 8) == 1, "120 tokens are ahead at 0"


def test_those_held_for_a_group_are_ahead_of_the_next() -> None:
    brain = Brain(2, scheduler=SchedulerConfig(max_num_batched_tokens=16))
    turns_of(brain, 128, 32, 32)
    idle(brain, 2)
    sent = [leader_of(brain, prompt=told(0, 128) + [9] * 40) for _ in range(3)]
    assert sent == [None, None, 1], "64 + 40 + 40 tokens are more than the 128 saved"


def test_a_group_that_died_is_forgotten() -> None:
    brain = Brain(3)
    assert leader_of(brain, prompt=told(0)) == 0
    brain.request(prompt=told(1))
    brain.die(0)
    brain.controller.check()
    ((leader, request_id),) = [
        (i, s.request.request_id)
        for i, s in brain.take(Submit)
        if s.request.prompt_token_ids[0] == 10_000
    ]
    assert leader == 2, "the one with nothing to do"
    brain.output(leader, request_id)
    assert leader_of(brain, prompt=told(0)) == 2


def test_after_a_drop_and_a_restore_running_requests_are_found() -> None:
    brain = Brain(2, policy="recompute")
    running = [brain.request(prompt=told(session), max_tokens=50) for session in range(2)]
    for leader, request_id in enumerate(running):
        brain.output(leader, request_id)
    brain.controller.force_drop(None, brain.now_s)
    brain.pass_time(0.0)
    brain.complete()
    brain.controller.check()
    (leader,) = (members[0] for members in brain.groups)
    assert leader_of(brain, prompt=told(0)) == leader
    assert len(brain.controller._requests._prefixes._by_group) == 1


def test_not_all_are_sent_ahead_whose_prompts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "MOST_REQUESTS_AHEAD", 4)
    brain = Brain(2, scheduler=SchedulerConfig(max_num_batched_tokens=64))
    turns_of(brain, 128, *[1] * 10)
    assert Counter(i for i, _ in brain.take(Submit)) == {0: 4, 1: 2}
    assert brain.controller.state(brain.now_s).num_unplaced == 4


def test_nobody_is_held_for_long_for_a_group_that_stands_still() -> None:
    brain = Brain(2, scheduler=SchedulerConfig(max_num_batched_tokens=16))
    turns_of(brain, 128, 32, 32)
    idle(brain, 2)
    assert leader_of(brain, prompt=told(0, 128) + [9] * 8) is None
    for _ in range(MAX_HELD):
        brain.pass_time()
    assert [i for i, _ in brain.take(Submit)] == [1]
