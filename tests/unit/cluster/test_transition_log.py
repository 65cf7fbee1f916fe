"""The log line of a transition, as people and scripts read it."""

from kunserve.cluster.transition_log import describe
from kunserve.core.ids import TransitionId
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
