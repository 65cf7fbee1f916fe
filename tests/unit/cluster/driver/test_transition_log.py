"""The log line of a transition, as people and scripts read it."""

import logging

import pytest

from kunserve.cluster.driver.transition_log import describe, log_decision, log_transition
from kunserve.cluster.log_format import fields_of
from kunserve.control.cluster.commands import LogObserved, LogQuarantine, LogRerun
from kunserve.core.ids import RequestId, TransitionId
from kunserve.core.snapshots import Kind, Outcome, TransitionRecord


def record(outcome: Outcome, reason: str | None = None) -> TransitionRecord:
    return TransitionRecord(
        transition_id=TransitionId(3),
        kind=Kind.DROP,
        trigger="admin",
        started_s=1.0,
        groups_before=(),
        groups_after=(),
        finished_s=1.5,
        outcome=outcome,
        reason=reason,
    )


def test_the_outcome_is_a_plain_word() -> None:
    assert "drop id=3 outcome='done' trigger='admin'" in describe(record(Outcome.DONE))


def test_a_failure_says_why() -> None:
    line = describe(record(Outcome.ROLLED_BACK, "no answer"))
    assert "outcome='rolled back: no answer'" in line


def test_the_measurements_are_fields_of_a_json_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_transition(record(Outcome.DONE))
    (line,) = caplog.records
    assert line.getMessage() == describe(record(Outcome.DONE))
    fields = fields_of(line)
    assert (fields["id"], fields["outcome"], fields["total_ms"]) == (3, "done", 500.0)
    assert {"trigger", "groups", "bytes", "gap_ms", "moved_bytes"} <= set(fields)


def test_every_decision_about_a_request_names_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_decision(LogRerun(RequestId("cmpl-a-0"), 7))
    log_decision(LogQuarantine(RequestId("cmpl-a-0"), "it runs alone"))
    log_decision(LogObserved("drop groups=0+1"))
    assert [record.getMessage() for record in caplog.records] == [
        "run again request=cmpl-a-0 tokens=7",
        "quarantine request=cmpl-a-0: it runs alone",
        "observed only, nothing is done: drop groups=0+1",
    ]
    assert fields_of(caplog.records[0]) == {"request": "cmpl-a-0", "tokens": 7}
    assert fields_of(caplog.records[1]) == {"request": "cmpl-a-0"}
