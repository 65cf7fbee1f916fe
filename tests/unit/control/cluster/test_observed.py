"""The overload policy ``observe``, and the pause: what is decided, counted and said, not done."""

import pytest

from kunserve.control.cluster.commands import LogObserved, LogReason, ScaleUp
from kunserve.core.ids import InstanceId
from kunserve.core.messages import LoadLayers, Prepare
from kunserve.core.place import Place
from kunserve.core.snapshots import ObservedDrops
from tests.unit.control.cluster.brain import BLOCKS, Brain
from tests.unit.control.cluster.test_overload import SHORT, dropped


def observed(brain: Brain) -> ObservedDrops:
    totals = brain.controller.state(brain.now_s).observed
    assert totals is not None
    return totals


def observed_names(brain: Brain) -> list[str]:
    """Groups of each merge that was told since this was last asked for, as ``0+1``."""
    texts = [one.text.split() for one in brain.said(LogObserved)]
    return [words[1].removeprefix("groups=") for words in texts if words[0] == "drop"]


def test_other_policies_observe_nothing() -> None:
    assert Brain(policy="drop").controller.state(0.0).observed is None


def test_a_drop_is_told_and_not_made() -> None:
    brain = Brain(policy="observe")
    brain.report(1, used_blocks=50)
    brain.report(0, **SHORT)
    assert not brain.take(Prepare) and not brain.said(ScaleUp)
    (said,) = brain.said(LogObserved)
    assert said.text.startswith("drop groups=") and "trigger='demand 160 blocks" in said.text
    totals = observed(brain)
    assert (totals.num_drops, totals.num_merged) == (1, 1)
    assert 0 <= 4 * 3200 - totals.freed_bytes < 100, "one copy of the layers"
    brain.report(0, **SHORT)
    assert not brain.said(LogObserved), "it is told once, not at every look"
    assert observed(brain).num_drops == 1


def test_requests_that_would_run_are_counted_once() -> None:
    brain = Brain(policy="observe")
    brain.report(1, used_blocks=50)
    brain.report(0, **SHORT)
    brain.report(0, **SHORT)
    assert observed(brain).num_requests_now == observed(brain).num_requests == 3
    assert observed(brain).wait_s == 0.0
    brain.report(0, after_s=2.0, **SHORT)
    totals = observed(brain)
    assert totals.num_requests == 3, "the same requests are not counted again"
    assert 5.9 < totals.wait_s < 6.1, "three requests wait two seconds each"
    reasons = brain.controller.state(brain.now_s).reasons
    assert len(reasons) == 1 and "3 more requests would run" in reasons[0]
    assert not brain.said(LogReason), "the log has had its line"


def test_only_what_fits_would_run() -> None:
    brain = Brain(policy="observe", max_queue_per_gain=100.0)
    full = {"num_running": 9, "used_blocks": BLOCKS}
    brain.report(1, **full)
    queue = {"num_waiting": 100, "head_of_line_blocks": 20, "waiting_blocks": 2000}
    brain.report(0, **full, **queue)
    brain.report(0, **full, **queue)
    # The copy of the layers that is freed is all the room there is.
    assert 0 < observed(brain).num_requests_now < 100
    assert brain.said(LogObserved)[0].text.count("drop") == 1


def test_a_queue_that_is_too_long_for_a_drop_is_none_that_one_would_have_served() -> None:
    brain = Brain(policy="observe")
    brain.report(1, num_running=9, used_blocks=BLOCKS)
    long = {"num_waiting": 100, "head_of_line_blocks": 20, "waiting_blocks": 2000}
    for _ in range(3):
        brain.report(0, num_running=9, used_blocks=BLOCKS, **long)
    assert observed(brain).num_drops == 0


def test_requests_that_wait_for_compute_gain_nothing() -> None:
    brain = Brain(policy="observe")
    brain.report(1, used_blocks=50)
    brain.report(0, **SHORT)
    for _ in range(3):
        brain.report(0, num_running=9, used_blocks=50, num_waiting=40, head_of_line_blocks=1)
    assert observed(brain).num_requests_now == 0


def test_a_merge_that_is_not_needed_any_more_is_told_with_what_it_gained() -> None:
    brain = Brain(policy="observe", restore_hold_s=1.0)
    brain.report(1, used_blocks=50)
    brain.report(0, **SHORT)
    brain.report(0, after_s=1.0, **SHORT)
    brain.report(0, after_s=1.0)
    brain.said(LogObserved)
    brain.report(0, after_s=0.5)
    assert not brain.said(LogObserved), "demand must stay low for a while"
    brain.report(0, after_s=0.6)
    (said,) = brain.said(LogObserved)
    assert said.text.startswith("restore groups=")
    assert "requests_admitted=3 waiting_avoided_s=3.0" in said.text
    totals = observed(brain)
    assert (totals.num_restores, totals.num_merged, totals.num_requests) == (1, 0, 3)
    assert not brain.take(LoadLayers)


def test_an_imagined_pipeline_gets_deeper_where_a_real_one_would() -> None:
    brain = Brain(4, policy="observe", min_deep_gain=0.0, max_queue_per_gain=100.0)
    full = {"num_running": 9, "used_blocks": BLOCKS}
    queue = {"num_waiting": 10, "head_of_line_blocks": 20, "waiting_blocks": 200}
    for number in range(4):
        brain.report(number, num_running=9, used_blocks=BLOCKS - 10)
    brain.report(0, **SHORT)
    assert len(observed_names(brain)) == 1
    for number in (0, 1, 2, 3, 0):
        brain.report(number, **full, **queue)
    totals = observed(brain)
    assert totals.num_merged == 1 and totals.num_drops > 1
    assert any(names.count("+") == 3 for names in observed_names(brain))


def test_a_death_ends_what_was_imagined_of_its_group() -> None:
    brain = Brain(policy="observe")
    brain.report(1, used_blocks=50)
    brain.report(0, **SHORT)
    brain.report(0, **SHORT)
    brain.die(1)
    brain.report(0, **SHORT)
    assert observed(brain).num_merged == 0 and observed(brain).num_drops == 1


def test_nothing_is_dropped_while_paused() -> None:
    brain = Brain()
    brain.controller.set_paused(True)
    brain.report(1, used_blocks=50)
    brain.report(0, **SHORT)
    assert not brain.take(Prepare)
    (wish,) = brain.said(ScaleUp)
    assert "drops are paused" in wish.reason
    state = brain.controller.state(brain.now_s)
    assert state.paused and any("drops are paused; demand" in text for text in state.reasons)
    brain.controller.set_paused(False)
    assert not brain.controller.state(brain.now_s).paused
    brain.report(0, **SHORT)
    assert brain.take(Prepare), "what was remembered of the load still counts"


def test_nothing_is_restored_while_paused_but_by_hand() -> None:
    brain = dropped()
    brain.controller.set_paused(True)
    brain.report(0)
    assert not brain.take(LoadLayers)
    (said,) = brain.said(LogReason)
    assert "restores are paused" in said.reason
    brain.controller.force_restore(brain.now_s)
    brain.pass_time()
    assert brain.take(LoadLayers)


def test_a_restore_that_squeezes_is_called_off_while_paused() -> None:
    brain = dropped()
    brain.report(0)
    assert brain.take(LoadLayers)
    brain.controller.set_paused(True)
    brain.report(0, **{**SHORT, "used_blocks": 1000})
    (transition,) = brain.ended
    assert "overloaded again" in transition.ending


def test_memory_of_a_group_that_would_be_merged_is_not_spare() -> None:
    brain = Brain(4, policy="observe")
    for waiting_blocks in (50, 50, 160, 160, 160):
        queue = {"num_waiting": waiting_blocks // 10, "waiting_blocks": waiting_blocks}
        for number in (2, 3):
            brain.report(number, num_running=9, used_blocks=BLOCKS)
        brain.report(1, num_running=1, used_blocks=60)
        brain.report(0, num_running=9, used_blocks=BLOCKS, head_of_line_blocks=10, **queue)
    drops = [said.text.split()[1] for said in brain.said(LogObserved)]
    assert drops == ["groups=0+1", "groups=2+3"]


def merges_of(brain: Brain) -> list[set[int]]:
    """Groups that a drop has merged, in deed or in thought: each instance is one of its own."""
    begun = brain.controller.transitions.active.values()
    made = [set(layout.members) for t in begun for layout in t.record.groups_after]
    return made + [set(map(int, names.split("+"))) for names in observed_names(brain)]


@pytest.mark.parametrize("policy", ["drop", "observe"])
class TestDropAndObserveAlike:
    """What ``drop`` does not do, ``observe`` does not promise."""

    def test_instances_that_do_not_reach_each_other_stay_apart(self, policy: str) -> None:
        brain = Brain(policy=policy)
        brain.controller.transitions.cuts.found(InstanceId(0), InstanceId(1), brain.now_s)
        brain.report(1, used_blocks=50)
        brain.report(0, **SHORT)
        assert merges_of(brain) == []

    @pytest.mark.parametrize(("gbps", "is_made"), [(1e-6, False), (1.0, True)])
    def test_no_exchange_takes_longer_than_memory_is_short(
        self, policy: str, gbps: float, is_made: bool
    ) -> None:
        """Half of 100 requests' blocks are given back each second."""
        places = {i: Place(f"h{i}", "", gbps) for i in range(2)}
        brain = Brain(policy=policy, places=places)
        brain.report(1, used_blocks=50)
        for tokens in (0, 200, 400):
            brain.report(0, used_blocks=BLOCKS, num_running=9, prompt_tokens=tokens, after_s=1.0)
        brain.report(0, **SHORT, prompt_tokens=600, after_s=1.0)
        assert merges_of(brain) == ([{0, 1}] if is_made else [])

    @pytest.mark.parametrize(("is_aware", "pair"), [(True, {0, 2}), (False, {0, 1})])
    def test_near_instances_merge_where_it_is_looked_at(
        self, policy: str, is_aware: bool, pair: set[int]
    ) -> None:
        places = {i: Place(f"h{i % 2}") for i in range(3)}
        brain = Brain(3, policy=policy, places=places, place_aware=is_aware)
        for number in (1, 2):
            brain.report(number, num_running=9, used_blocks=BLOCKS - 10)
        brain.report(0, **SHORT)
        assert merges_of(brain) == [pair]

    def test_what_a_drop_under_way_will_free_is_not_wanted_again(self, policy: str) -> None:
        """Pairs free as much as waits, so no deeper pipeline is refused for it."""
        brain = Brain(4, policy=policy, max_queue_per_gain=1.0)
        brain.report(1, used_blocks=BLOCKS)
        brain.report(3, used_blocks=BLOCKS)
        brain.report(2, used_blocks=BLOCKS)
        brain.controller.force_drop(None, brain.now_s)
        (forced,) = merges_of(brain)
        (short, _) = {0, 1, 2, 3} - forced
        queue = {"num_waiting": 7, "head_of_line_blocks": 10, "waiting_blocks": 70}
        brain.report(short, num_running=9, used_blocks=BLOCKS, **queue)
        assert merges_of(brain)[-1] == {0, 1, 2, 3} - forced

    def test_an_instance_that_is_sent_away_is_not_merged(self, policy: str) -> None:
        brain = Brain(3, policy=policy)
        for _ in range(3):
            brain.request()
        for number in range(3):
            brain.report(number, num_running=9, used_blocks=BLOCKS - 10)
        brain.controller.resize(2)
        (leaving,) = brain.controller.placement.leaving
        short, _ = staying = {0, 1, 2} - {leaving}
        brain.report(short, **SHORT)
        assert merges_of(brain) == [staying]
