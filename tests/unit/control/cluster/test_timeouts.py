"""Requests do not wait for ever: for a group that can take them, or for their end."""

from kunserve.core.config import ClusterConfig, ServerConfig
from kunserve.core.messages import Abort, Submit
from kunserve.core.request import FinishReason
from tests.unit.control.cluster.brain import Brain


def test_a_request_that_no_instance_can_take_ends_after_a_while() -> None:
    brain = Brain(1, cluster=ClusterConfig(num_instances=1, start_timeout_s=30.0))
    brain.die(0)
    request_id = brain.request()
    for _ in range(25):
        brain.pass_time(1.0)
    assert not brain.tokens
    for _ in range(10):
        brain.pass_time(1.0)
    (end,) = brain.tokens
    assert (end.request_id, end.finish_reason) == (request_id, FinishReason.ERROR)
    assert brain.controller.num_unfinished == 0


def test_one_that_found_its_place_in_time_does_not() -> None:
    brain = Brain(1, cluster=ClusterConfig(num_instances=1, start_timeout_s=30.0))
    brain.die(0)
    brain.request()
    for _ in range(25):
        brain.pass_time(1.0)
    brain.start(0)
    for _ in range(100):
        brain.pass_time(1.0)
    assert not brain.tokens


def test_without_a_limit_a_request_that_has_a_place_may_take_its_time() -> None:
    brain = Brain(1)
    brain.request()
    brain.pass_time(10_000.0)
    brain.pass_time(1.0)
    assert not brain.tokens


def test_with_a_limit_it_ends_and_is_aborted_where_it_runs() -> None:
    brain = Brain(1, server=ServerConfig(request_timeout_s=60.0))
    old = brain.request()
    brain.output(0, old)
    brain.pass_time(30.0)
    young = brain.request()
    brain.take(Submit)
    brain.pass_time(31.0)
    assert [(t.request_id, t.finish_reason) for t in brain.tokens] == [
        (old, None),
        (old, FinishReason.ERROR),
    ]
    assert brain.take(Abort) == [(0, Abort(old))]
    assert brain.tokens[-1].position == 1
    brain.pass_time(31.0)
    assert brain.tokens[-1].request_id == young
