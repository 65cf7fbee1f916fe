"""From reported load to transitions: what is begun, what is called off, and what is said of it."""

from itertools import pairwise

import pytest

from kunserve.control.cluster.commands import LogReason, ScaleUp
from kunserve.control.cluster.transition import Phase
from kunserve.control.cluster.transitions import BACKOFF_S, PATIENCE_S
from kunserve.core.config import ClusterConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import InstanceId
from kunserve.core.messages import (
    AllowParking,
    LayersLoaded,
    LoadLayers,
    Prepare,
    Prepared,
    Rollback,
)
from kunserve.core.snapshots import Kind, Outcome
from kunserve.policy.drop.restore import Postponed
from tests.unit.control.cluster.brain import BLOCKS, Brain

ZERO, ONE = InstanceId(0), InstanceId(1)
SHORT = {
    "num_running": 9,
    "used_blocks": BLOCKS,
    "num_waiting": 3,
    "head_of_line_blocks": 20,
    "waiting_blocks": 60,
}
"""A load that memory holds up."""


def refuse(brain: Brain, number: int) -> None:
    (prepare,) = {message.transition_id for _, message in brain.take(Prepare)}
    brain.tell(number, Prepared(prepare, brain.group_of(number).leader, "no memory"))


def dropped(num_instances: int = 2, **overload: float) -> Brain:
    """All instances have become one pipeline, and it has reported that it is idle."""
    brain = Brain(num_instances, **overload)
    while len(brain.groups) > 1:
        brain.controller.force_drop(None, brain.now_s)
        brain.pass_time()
        brain.complete()
    assert [sorted(group) for group in brain.groups] == [list(range(num_instances))]
    brain.ended.clear()
    return brain


def test_a_short_group_is_merged_with_one_that_has_less_room_than_what_waits() -> None:
    brain = Brain()
    brain.report(1, used_blocks=50)
    brain.report(0, **SHORT)
    ((first, prepare), (second, _)) = brain.take(Prepare)
    assert {first, second} == {0, 1}
    assert [layout.members for layout in prepare.new] == [(0, 1)]
    (transition,) = brain.controller.transitions.active.values()
    assert "demand" in transition.record.trigger


def test_nothing_is_merged_for_what_an_idle_group_has_room_for() -> None:
    brain = Brain(3)
    brain.report(1)
    brain.report(0, **SHORT)
    assert not brain.take(Prepare)
    brain.report(2, used_blocks=50)
    brain.report(1, used_blocks=50)
    assert not brain.take(Prepare), "40 of 60 blocks in each of two"
    brain.report(1, num_running=9, used_blocks=BLOCKS)
    brain.report(0, **SHORT)
    assert brain.take(Prepare)


def test_a_queue_much_longer_than_what_a_drop_frees_waits_for_compute() -> None:
    long = {**SHORT, "num_waiting": 90, "waiting_blocks": 900}
    brain = Brain()
    brain.report(1, used_blocks=50)
    brain.report(0, **long)
    assert not brain.take(Prepare)
    (wish,) = brain.said(ScaleUp)
    assert "no drop is worth it: 852 blocks of requests wait for room" in wish.reason
    assert "nothing is left" not in wish.reason
    brain.report(0, **SHORT)
    assert brain.take(Prepare), "a shorter one is worth it"
    brain = Brain(max_queue_per_gain=10.0)
    brain.report(1, used_blocks=50)
    brain.report(0, **long)
    assert brain.take(Prepare), "as asked for"


@pytest.mark.parametrize(("tokens", "is_made"), [(100, True), (10_000, False)])
def test_behind_pairs_fours_are_made_for_a_short_queue_where_prompts_take_little(
    tokens: int, is_made: bool
) -> None:
    """``tokens`` of prompts in a second, of which a token takes a millisecond."""
    cost = CostCoefficients(attention_s=0.0, token_s=1e-3, chunk_s=0.0, shared_s=0.0)
    brain = Brain(4, cost=cost, min_deep_gain=0.0)
    for _ in range(2):
        brain.controller.force_drop(None, brain.now_s)
        brain.pass_time()
        brain.complete()
    leaders = [members[0] for members in brain.groups]
    capacity = brain.controller.placement.groups[brain.group_of(0).group_id].capacity_blocks
    full = {"num_running": 9, "used_blocks": capacity}
    for second in range(9):
        for leader in leaders:
            brain.report(leader, after_s=0.5, **full, prompt_tokens=tokens * second)
    assert not brain.take(Prepare)
    done = {"prompt_tokens": tokens * 8}
    brain.report(0, **full, **done, num_waiting=1, head_of_line_blocks=5, waiting_blocks=5)
    assert bool(brain.take(Prepare)) == is_made


def test_other_policies_drop_nothing() -> None:
    brain = Brain(policy="recompute")
    brain.report(0, **SHORT)
    assert not brain.take(Prepare)


def test_after_a_refusal_the_next_drop_waits() -> None:
    brain = Brain()
    brain.report(0, **SHORT)
    refuse(brain, 1)
    assert brain.ended[0].outcome is Outcome.ROLLED_BACK
    brain.report(0, after_s=BACKOFF_S / 2, **SHORT)
    assert not brain.take(Prepare), "a refused drop is tried again at once"
    brain.report(0, after_s=BACKOFF_S, **SHORT)
    assert brain.take(Prepare)


def test_after_no_answer_too() -> None:
    brain = Brain()
    brain.report(0, **SHORT)
    brain.take(Prepare)
    (transition,) = brain.controller.transitions.active.values()
    brain.controller.transitions.roll_back(transition, "no answer", brain.now_s)
    brain.report(0, after_s=BACKOFF_S / 2, **SHORT)
    assert not brain.take(Prepare)


def test_one_that_refuses_is_asked_ever_more_rarely_and_the_others_merge() -> None:
    brain = Brain(4)
    for number in range(1, 4):
        brain.report(number, used_blocks=BLOCKS, num_running=9)
    brain.report(0, **SHORT)
    asked_s: list[float] = []
    for _ in range(600):
        for member, prepare in brain.take(Prepare):
            asked_s += [brain.now_s] if member == ZERO else []
            refusal = "no memory" if member == ZERO else None
            brain.tell(member, Prepared(prepare.transition_id, member, refusal))
        brain.committed()
        brain.exchanged()
        brain.report(0, **SHORT)
        brain.pass_time()
    assert 4 <= len(asked_s) <= 7, "in a minute or two"
    gaps_s = [after - before for before, after in pairwise(asked_s)]
    assert all(after > 1.5 * before for before, after in pairwise(gaps_s))
    assert [0] in [sorted(group) for group in brain.groups], "it stands alone"
    assert len(brain.groups) < 4, "others have merged without it"
    reasons = brain.controller.state(brain.now_s).reasons
    assert any(text.startswith("instance 0 refused a drop: it is asked") for text in reasons)
    brain.die(0)
    brain.start(0)
    reasons = brain.controller.state(brain.now_s).reasons
    assert not any("refused" in text for text in reasons), "another process may not"


def test_who_does_not_answer_is_left_out_too() -> None:
    brain = Brain(3)
    for number in range(1, 3):
        brain.report(number, used_blocks=BLOCKS, num_running=9)
    brain.report(0, **SHORT)
    asked = {int(i) for i, _ in brain.take(Prepare)}
    (other,) = {0, 1, 2} - asked
    silent = (asked - {0}).pop()
    (transition,) = brain.controller.transitions.active.values()
    brain.tell(0, Prepared(transition.transition_id, ZERO, None))
    brain.pass_time(PATIENCE_S[Phase.PREPARING] + 5.0)
    assert [record.outcome for record in brain.ended] == [Outcome.ROLLED_BACK]
    brain.pass_time(BACKOFF_S / 2)
    brain.report(other, after_s=0.0, used_blocks=BLOCKS, num_running=9)
    brain.report(0, after_s=BACKOFF_S / 2, **SHORT)
    assert {int(i) for i, _ in brain.take(Prepare)} == {0, other}, silent


def test_a_member_that_refuses_a_restore_may_be_dropped() -> None:
    brain = dropped()
    brain.report(0)
    brain.pass_time()
    brain.report(0)
    ((leader, load),) = brain.take(LoadLayers)
    brain.tell(1, LayersLoaded(load.transition_id, ONE, "no memory", 0, 0.0, seconds=0.0))
    transitions = brain.controller.transitions
    assert transitions.refusing(Kind.RESTORE, brain.now_s) == {brain.group_id(0)}
    assert not transitions.refusing(Kind.DROP, brain.now_s)
    brain.report(0, after_s=BACKOFF_S / 2)
    assert not brain.take(LoadLayers)
    assert any("refused the last restore" in x for x in brain.controller.state(0.0).reasons)
    brain.report(0, after_s=BACKOFF_S)
    brain.complete()
    assert brain.groups == [(0,), (1,)] and leader == ZERO
    assert not transitions.refusers.held(brain.now_s), "it has done it now"


def test_by_hand_whoever_refused_may_be_asked_again() -> None:
    brain = Brain()
    brain.report(0, **SHORT)
    refuse(brain, 1)
    assert not brain.take(Prepare)
    assert brain.controller.force_drop(None, brain.now_s)


def test_where_nothing_is_left_to_drop_an_instance_is_wished_for() -> None:
    brain = dropped()
    short = {**SHORT, "used_blocks": 1000, "waiting_blocks": 90}
    brain.report(0, **short)
    (wish,) = brain.said(ScaleUp)
    assert "nothing is left to drop" in wish.reason
    brain.report(0, **short)
    assert not brain.said(ScaleUp), "it is said now and then only"


def test_where_only_instances_of_other_ranks_are_left_that_is_said() -> None:
    brain = Brain(num_ranks={1: 2})
    brain.report(0, **SHORT)
    assert not brain.take(Prepare), "their KV could not be exchanged"
    (wish,) = brain.said(ScaleUp)
    assert "nothing is left to drop: instances of 1 and 2 ranks do not merge" in wish.reason


def test_where_weights_are_shared_nothing_is_dropped_and_that_is_said() -> None:
    brain = Brain(park_behind_drop=True, shared_weights_bytes=1 << 20)
    brain.report(0, **SHORT)
    assert not brain.take(Prepare), "it would free nothing"
    (wish,) = brain.said(ScaleUp)
    assert "nothing is left to drop: weights are shared" in wish.reason
    assert brain.take(AllowParking), "what comes behind a drop comes at once"
    assert not brain.controller.force_drop(None, brain.now_s)


def test_parking_is_allowed_where_nothing_is_left_to_drop() -> None:
    brain = Brain(park_behind_drop=True)
    brain.report(0, **SHORT)
    assert brain.take(Prepare) and not brain.take(AllowParking), "a drop comes first"
    brain = dropped(park_behind_drop=True)
    short = {**SHORT, "used_blocks": 1000, "waiting_blocks": 90}
    brain.report(0, **short)
    ((leader, allowed),) = brain.take(AllowParking)
    assert (leader, allowed.group_id) == (0, brain.group_id(0))
    brain.report(0, **short)
    assert not brain.take(AllowParking), "it is remembered for a while"
    brain.report(0, after_s=5.0, **short)
    assert brain.take(AllowParking)


def test_an_idle_pipeline_is_restored() -> None:
    brain = dropped()
    brain.report(0)
    ((leader, load),) = brain.take(LoadLayers)
    assert leader == 0 and [member.instance_id for member in load.members] == [0, 1]
    for member in load.members:
        (source,) = member.sources
        assert source.instance_id == 1 - member.instance_id, "layers come from the other"


def test_a_long_pipeline_parts_into_whole_instances() -> None:
    brain = dropped(4)
    brain.report(0)
    assert brain.take(LoadLayers)
    (transition,) = brain.controller.transitions.active.values()
    assert [len(layout.stages) for layout in transition.record.groups_after] == [1, 1, 1, 1]


def test_why_a_restore_is_postponed_is_said_once_and_shown() -> None:
    brain = dropped()
    for _ in range(5):
        brain.report(0, largest_request_blocks=BLOCKS + 1)
    (said,) = brain.said(LogReason)
    assert said.group_id == brain.group_id(0)
    assert "restore postponed: a request of 101 blocks" in said.reason
    assert brain.controller.state(brain.now_s).reasons == (f"group {said.group_id}: {said.reason}",)
    brain.report(0)
    assert brain.controller.state(brain.now_s).reasons == ()
    assert brain.take(LoadLayers)


def test_a_reason_that_comes_back_after_a_while_is_said_again() -> None:
    brain = dropped(restore_hold_s=1.0)
    brain.report(0, after_s=2.0, largest_request_blocks=BLOCKS + 1)
    brain.report(0, after_s=2.0, largest_request_blocks=BLOCKS + 1)
    assert len(brain.said(LogReason)) == 1
    busy = {"used_blocks": 80, "growth_blocks": 40}
    for _ in range(12):
        brain.report(0, after_s=2.0, **busy)
    assert not brain.said(LogReason)
    brain.report(0, after_s=2.0, largest_request_blocks=BLOCKS + 1)
    brain.report(0, after_s=2.0, largest_request_blocks=BLOCKS + 1)
    assert len(brain.said(LogReason)) == 1


def test_demand_that_does_not_fill_memory_is_explained() -> None:
    brain = Brain()
    brain.report(0, used_blocks=50, growth_blocks=80)
    (said,) = brain.said(LogReason)
    assert "memory holds nothing up" in said.reason


def restoring() -> tuple[Brain, int, int]:
    """A pipeline that loads its layers, its leader, and an instance that stands alone."""
    brain = Brain(4, max_queue_per_gain=9.0)
    brain.controller.force_drop(None, brain.now_s)
    brain.pass_time()
    brain.complete()
    pair = next(members for members in brain.groups if len(members) == 2)
    (single, *_) = (members for members in brain.groups if len(members) == 1)
    brain.report(pair[0])
    assert brain.take(LoadLayers)
    return brain, pair[0], single[0]


def test_a_restore_is_called_off_by_the_group_that_it_squeezes() -> None:
    brain, leader, _ = restoring()
    narrowed = {"capacity_blocks": 100, "num_running": 4, "used_blocks": 20}
    brain.report(leader, **narrowed)
    assert not brain.take(Rollback)
    brain.report(leader, **narrowed, num_waiting=9, head_of_line_blocks=81, waiting_blocks=99)
    members = set(brain.group_of(leader).members)
    assert {instance_id for instance_id, _ in brain.take(Rollback)} == members


def test_a_restore_that_is_called_off_holds_up_no_other_group() -> None:
    brain, leader, single = restoring()
    crowded = {"num_waiting": 9, "head_of_line_blocks": 81, "waiting_blocks": 99}
    brain.report(leader, capacity_blocks=100, num_running=4, used_blocks=20, **crowded)
    assert brain.take(Rollback)
    brain.now_s += 0.2
    brain.report(single, **{**SHORT, "waiting_blocks": 400})
    assert {instance_id for instance_id, _ in brain.take(Prepare)} >= {single}


def test_a_restore_goes_on_while_another_group_is_short() -> None:
    brain, _, single = restoring()
    brain.report(single, **{**SHORT, "waiting_blocks": 400})
    assert not brain.take(Rollback)
    assert brain.take(Prepare), "and the short group is relieved meanwhile"


def test_a_pipeline_is_restored_while_another_group_is_short() -> None:
    brain = Brain(3, max_group_size=2)
    brain.controller.force_drop(None, brain.now_s)
    brain.pass_time()
    brain.complete()
    (leader,) = (members[0] for members in brain.groups if len(members) == 2)
    (single,) = (members[0] for members in brain.groups if len(members) == 1)
    brain.report(single, **SHORT)
    brain.report(leader)
    assert brain.take(LoadLayers)


def test_a_drop_by_hand_is_one_merge_or_as_many_as_the_bytes_need() -> None:
    assert len(Brain(8).controller.force_drop(None, 0.0)) == 1
    layer_bytes = Brain(8).controller.placement.specs[InstanceId(0)].layer_bytes
    assert len(Brain(8).controller.force_drop(4 * 3 * layer_bytes, 0.0)) > 1


def test_a_restore_by_hand_takes_every_pipeline() -> None:
    brain = Brain(4)
    for _ in range(2):
        brain.controller.force_drop(None, brain.now_s)
        brain.pass_time()
        brain.complete()
    assert brain.groups == [(0, 1), (2, 3)]
    brain.report(0, used_blocks=1)
    brain.report(2, used_blocks=1)
    brain.take(LoadLayers)
    for transition in tuple(brain.controller.transitions.active.values()):
        brain.controller.transitions.roll_back(transition, "by hand instead", brain.now_s)
    assert len(brain.controller.force_restore(brain.now_s)) == 2


def test_a_restore_by_hand_leaves_the_group_of_a_test_alone() -> None:
    """A suspect of deaths runs alone there: parted, it would run among others."""
    brain = Brain(4)
    for _ in range(2):
        brain.controller.force_drop(None, brain.now_s)
        brain.pass_time()
        brain.complete()
    brain.report(0, used_blocks=1)
    brain.report(2, used_blocks=1)
    brain.take(LoadLayers)
    for transition in tuple(brain.controller.transitions.active.values()):
        brain.controller.transitions.roll_back(transition, "by hand instead", brain.now_s)
    brain.controller.placement.reserve(brain.group_of(0).group_id)
    assert len(brain.controller.force_restore(brain.now_s)) == 1


def test_pipelines_from_the_start_are_not_restored_by_hand() -> None:
    brain = Brain(2, ClusterConfig(num_instances=2, pipeline_stages=2), policy="recompute")
    brain.pass_time()
    brain.complete()
    assert brain.groups == [(0, 1)]
    brain.report(0, used_blocks=1)
    (refusal,) = brain.controller.force_restore(brain.now_s)
    assert isinstance(refusal, Postponed) and "for good" in refusal.reason
