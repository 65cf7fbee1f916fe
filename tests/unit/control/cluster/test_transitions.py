"""How long transitions wait for answers, and what becomes of those that wait in vain."""

import pytest

from kunserve.control.cluster.transition import Phase
from kunserve.control.cluster.transitions import PATIENCE_S
from kunserve.core.ids import InstanceId, TransitionId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import (
    Commit,
    Committed,
    Form,
    Prepare,
    Rollback,
    Submit,
    Tidied,
    TransferProgress,
)
from kunserve.core.snapshots import Kind, Outcome
from tests.unit.control.cluster.brain import NUM_LAYERS, Brain


def at(phase: Phase) -> Brain:
    """Two instances with two requests, whose drop has come so far."""
    brain = Brain(policy="recompute")
    for number in range(2):
        brain.report(number)
    brain.request()
    brain.request()
    brain.controller.force_drop(None, brain.now_s)
    brain.pass_time(0.0)
    if phase is not Phase.PREPARING:
        brain.prepared()
    if phase is Phase.EXCHANGING:
        brain.committed()
    brain.take(Submit)
    brain.take(Form)
    (transition,) = brain.controller.transitions.active.values()
    assert transition.phase is phase
    return brain


def test_a_member_that_does_not_answer_to_prepare_rolls_back() -> None:
    brain = at(Phase.PREPARING)
    brain.pass_time(PATIENCE_S[Phase.PREPARING] + 5.0)
    assert brain.ended[0].ending == "rolled back: no answer from instances [0, 1]"
    assert brain.take(Rollback)


@pytest.mark.parametrize("phase", [Phase.COMMITTING, Phase.EXCHANGING])
def test_members_that_do_not_answer_after_the_commit_start_anew(phase: Phase) -> None:
    brain = at(phase)
    brain.pass_time(PATIENCE_S[phase] + 5.0)
    (record,) = brain.ended
    assert record.outcome is Outcome.FAILED and record.reason is not None
    assert sorted(instance_id for instance_id, _ in brain.take(Form)) == [0, 1]
    assert brain.groups == [(0,), (1,)]
    assert not brain.controller.transitions.active
    assert len(brain.take(Submit)) == 2, "their requests are run again"


def test_long_steps_make_drops_slow_and_not_impossible() -> None:
    brain = Brain(policy="recompute")
    for _ in range(2):
        for number in range(2):
            brain.report(number, after_s=30.0, num_running=1, used_blocks=1)
    brain.controller.force_drop(None, brain.now_s)
    brain.pass_time(60.0)
    brain.prepared()
    brain.pass_time(100.0)
    brain.committed()
    brain.exchanged()
    assert brain.ended[0].outcome is Outcome.DONE


def restoring() -> Brain:
    """A pipeline of two, and an instance beside it; the two are told to load what they lack."""
    brain = Brain(num_instances=3, policy="recompute")
    for number in range(3):
        brain.report(number)
    brain.controller.force_drop(None, brain.now_s)
    brain.pass_time(0.0)
    brain.complete()
    assert brain.groups == [(2,), (0, 1)]
    for number in (0, 2):
        brain.report(number)
    brain.controller.force_restore(brain.now_s)
    brain.pass_time(0.0)
    assert [record.kind for record in brain.ended] == [Kind.DROP]
    return brain


def come(brain: Brain, number: int, after_s: float) -> None:
    """Bytes come to an instance, which says so."""
    brain.pass_time(after_s)
    brain.tell(number, TransferProgress(InstanceId(number), 1))
    brain.pass_time(0.0)


@pytest.mark.parametrize(("total_s", "each_s"), [(190.0, 6.0), (1800.0, 100.0)])
def test_layers_that_go_on_coming_are_waited_for(total_s: float, each_s: float) -> None:
    brain = restoring()
    for turn in range(int(total_s / each_s)):
        come(brain, turn % 2, each_s)
    assert not brain.ended
    brain.complete()
    assert brain.ended[0].outcome is Outcome.DONE


def test_layers_that_do_not_come_any_more_are_not_waited_for() -> None:
    brain = restoring()
    come(brain, 0, 100.0)
    for _ in range(20):
        come(brain, 2, 5.9)  # another one's bytes say nothing of these
    assert not brain.ended
    come(brain, 2, 5.9)
    assert brain.ended[0].ending == "rolled back: no answer from instances [0, 1]"


def test_an_exchange_is_waited_for_as_long_as_bytes_come() -> None:
    """One request may take longer than any patience: no whole one has come all the time."""
    brain = at(Phase.EXCHANGING)
    for _ in range(60):
        come(brain, 1, 55.0)
    assert not brain.ended
    brain.pass_time(59.0)
    assert not brain.ended
    brain.pass_time(5.0)
    assert brain.ended[0].outcome is Outcome.FAILED


def test_no_bytes_make_up_for_a_word_that_does_not_come() -> None:
    for phase in (Phase.PREPARING, Phase.COMMITTING):
        brain = at(phase)
        for _ in range(8):
            come(brain, 0, 10.0)
        assert brain.ended, phase


def test_a_word_from_before_a_failure_changes_nothing() -> None:
    """A member has committed; then another dies, and all start anew with all their layers."""
    brain = at(Phase.COMMITTING)
    ((member, commit), *_) = brain.take(Commit)
    brain.die(1 - member)
    half = LayerRange(0, NUM_LAYERS // 2)
    brain.tell(member, Committed(commit.transition_id, member, half, 99, 1, 0.0, 0.0, ()))
    state = brain.controller.state(brain.now_s)
    assert state.instances[member].held == LayerRange(0, NUM_LAYERS)
    assert state.instances[member].kv_units != 99


def test_a_drop_that_was_rolled_back_does_not_keep_its_groups_from_the_next() -> None:
    brain = Brain(dwell_s=100.0)
    brain.controller.force_drop(None, brain.now_s)
    (transition,) = brain.controller.transitions.active.values()
    brain.controller.transitions.roll_back(transition, "no memory", brain.now_s)
    brain.take(Prepare)
    brain.report(0, after_s=5.0, used_blocks=100, num_waiting=1, head_of_line_blocks=9)
    assert {instance_id for instance_id, _ in brain.take(Prepare)} == {
        InstanceId(0),
        InstanceId(1),
    }


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_is_cleared_up_behind_a_transition_is_in_its_record(has_ended: bool) -> None:
    """Of the slowest member, also when it says so after the end."""
    brain = at(Phase.EXCHANGING)
    ((transition_id, _),) = brain.controller.transitions.active.items()
    if has_ended:
        brain.exchanged()
    for number, seconds in ((0, 0.25), (1, 0.125)):
        brain.tell(number, Tidied(transition_id, InstanceId(number), seconds))
    brain.tell(0, Tidied(TransitionId(99), InstanceId(0), 9.0))
    brain.pass_time(0.0)
    (record,) = brain.controller.transitions.latest()
    assert record.tidy_s == 0.25 and (record.finished_s is not None) == has_ended
