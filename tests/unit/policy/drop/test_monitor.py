from dataclasses import replace
from typing import Any

import pytest

from kunserve.core.config import OverloadConfig
from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad, LeaderTotals, LoadReport
from kunserve.policy.drop.monitor import (
    ClusterLoadView,
    Excuse,
    GroupTrend,
    MonitorState,
    Overloaded,
    Relaxed,
    Verdict,
    observe,
)

CONFIG = OverloadConfig()


def made(prompt_tokens: int) -> LeaderTotals:
    return LeaderTotals(prompt_tokens=prompt_tokens)


IDLE = LoadReport(GroupId(1), sequence_number=1, capacity_blocks=100)


def load_of(report: LoadReport, **known: Any) -> GroupLoad:
    fields = {"num_instances": 1, "undropped_blocks": 100, **known}
    return GroupLoad(report, report.capacity_blocks, **fields)


def waiting(report: LoadReport, *blocks: int) -> LoadReport:
    return replace(
        report,
        num_waiting=len(blocks),
        head_of_line_blocks=blocks[0] if blocks else 0,
        waiting_blocks=sum(blocks),
    )


class Watch:
    """A monitor of one group and its reports, 0.1 s apart."""

    def __init__(self, transition_s: float = 0.0, **known: Any) -> None:
        self.state = MonitorState()
        self.now_s = 50.0
        self.transition_s = transition_s
        self.known = known
        self.number = 0

    def report(
        self, report: LoadReport, after_s: float = 0.1, **known: Any
    ) -> Verdict | Overloaded | Relaxed:
        self.now_s += after_s
        self.number += 1
        load = load_of(replace(report, sequence_number=self.number), **{**self.known, **known})
        view = ClusterLoadView((load,), block_size=16, transition_s=self.transition_s)
        self.state, verdict = observe(self.state, view, self.now_s, CONFIG)
        return verdict.overloaded or verdict.relaxed or verdict


def test_a_shortage_is_seen_with_the_first_report_that_shows_it():
    report = waiting(replace(IDLE, num_running=9, used_blocks=90, growth_blocks=7), 20, 30, 40)
    verdict = Watch().report(report)
    assert verdict == Overloaded(
        required_blocks=90 + 7 + 90 - 100,
        group_ids=(GroupId(1),),
        trigger="demand 187 blocks, capacity 100",
        waiting_blocks=87,
        largest_waiting_blocks=20,
    )


def test_the_wait_for_memory_is_that_of_the_slowest_group():
    short = waiting(replace(IDLE, used_blocks=95), 25)
    groups = tuple(load_of(replace(short, group_id=GroupId(i))) for i in (1, 2))
    trends = {
        GroupId(i): GroupTrend(1, 0.0, 95, 0, 0, release_rate, False, None)
        for i, release_rate in ((1, 2.0), (2, 4.0))
    }
    _, verdict = observe(MonitorState(trends), ClusterLoadView(groups, 16), 0.1, CONFIG)
    assert verdict.overloaded is not None
    assert verdict.overloaded.wait_s == 20 / 2.0


def test_what_was_sent_and_not_reported_is_required_too():
    report = waiting(replace(IDLE, used_blocks=90), 20)
    verdict = Watch().report(report, unreported_blocks=33)
    assert isinstance(verdict, Overloaded)
    assert verdict.required_blocks == 90 + 20 + 33 - 100


def test_a_head_held_back_by_the_watermark_is_blocked():
    assert isinstance(Watch().report(waiting(replace(IDLE, used_blocks=89), 10)), Overloaded)
    assert isinstance(Watch().report(waiting(replace(IDLE, used_blocks=88), 10)), Verdict)


def test_several_groups_add_up_and_the_calm_one_is_not_named():
    short = waiting(replace(IDLE, used_blocks=95), 25)
    view = ClusterLoadView(
        (
            load_of(short),
            load_of(replace(IDLE, group_id=GroupId(2), used_blocks=50)),
            load_of(replace(short, group_id=GroupId(3), used_blocks=97)),
        ),
        block_size=16,
    )
    _, verdict = observe(MonitorState(), view, 0.0, CONFIG)
    assert verdict.overloaded is not None
    assert verdict.overloaded.group_ids == (1, 3)
    assert verdict.overloaded.required_blocks == 20 + 22


class TestNotWorthADrop:
    def test_waiting_for_a_seat_or_the_token_budget_is_not_memory(self):
        """Requests wait, memory has room: ``max_num_seqs`` or compute is the limit."""
        watch = Watch()
        report = waiting(replace(IDLE, num_running=8, used_blocks=40, growth_blocks=20), *[12] * 50)
        for _ in range(100):
            verdict = watch.report(report)
            assert isinstance(verdict, Verdict)

    def test_growth_that_never_comes_to_pass_is_not_a_shortage(self):
        """Requests end as fast as others grow: use stays flat far below the capacity."""
        watch = Watch()
        report = replace(IDLE, num_running=8, used_blocks=60, growth_blocks=60)
        for _ in range(50):
            verdict = watch.report(report)
            assert verdict == Verdict(
                excuses=(
                    Excuse(
                        GroupId(1),
                        "not short",
                        "demand exceeds capacity, but memory holds nothing up",
                    ),
                )
            )

    @pytest.mark.parametrize(
        ("transition_s", "expected"), [(0.2, Overloaded), (0.0, Overloaded), (2.0, Verdict)]
    )
    def test_memory_that_frees_itself_sooner_than_a_drop_would(self, transition_s, expected):
        """Requests of 10 blocks end at 100 ms intervals: 20 missing blocks are 0.2 s away."""
        watch = Watch(transition_s)
        for step in range(100):
            tokens = 160 * step
            busy = replace(IDLE, num_running=9, used_blocks=95, totals=made(tokens))
            watch.report(busy)
        verdict = watch.report(waiting(replace(busy, totals=made(16000)), 20, 50))
        assert isinstance(verdict, expected)

    @pytest.mark.parametrize(("per_report", "expected"), [(10, Verdict), (1, Overloaded)])
    def test_where_tokens_do_not_tell_blocks_those_that_were_taken_do(self, per_report, expected):
        """In a ring: as many tokens, in ten times fewer blocks."""
        watch = Watch(2.0)
        for step in range(101):
            busy = replace(
                IDLE,
                num_running=9,
                used_blocks=95,
                totals=made(160 * step),
                taken_blocks=per_report * step,
            )
            verdict = watch.report(waiting(busy, 20, 50) if step == 100 else busy)
        assert isinstance(verdict, expected)

    def test_a_burst_with_nothing_known_to_end_is_worth_one(self):
        assert isinstance(Watch(60.0).report(waiting(replace(IDLE, used_blocks=99), 9)), Overloaded)


class TestTrend:
    def test_demand_on_its_way_past_the_capacity_is_none_yet(self):
        watch = Watch()
        for used in range(10, 100, 4):
            report = replace(IDLE, num_running=5, used_blocks=used, growth_blocks=30)
            assert isinstance(watch.report(report), Verdict)

    def test_falling_demand_is_no_threat(self):
        watch = Watch()
        for used in range(99, 10, -2):
            assert isinstance(watch.report(replace(IDLE, used_blocks=used)), Verdict)

    def test_the_same_report_twice_is_not_news(self):
        state, view = MonitorState(), ClusterLoadView((load_of(IDLE),), 16)
        for step in range(5):
            state, _ = observe(state, view, 0.1 * step, CONFIG)
        assert state.trends[GroupId(1)].seen_s == 0.0

    def test_an_older_report_does_not_turn_the_trend(self):
        watch = Watch()
        watch.report(replace(IDLE, used_blocks=50))
        before = watch.state.trends[GroupId(1)]
        watch.number -= 2
        watch.report(replace(IDLE, used_blocks=10))
        assert watch.state.trends[GroupId(1)] == before


def test_a_preemption_is_a_shortage_even_if_the_head_fits_by_now():
    watch = Watch()
    watch.report(replace(IDLE, used_blocks=80))
    preempted = waiting(replace(IDLE, used_blocks=70, totals=LeaderTotals(1, lost_tokens=200)), 15)
    assert isinstance(watch.report(preempted), Overloaded)
    assert isinstance(watch.report(preempted), Verdict)


def test_a_group_in_transition_or_just_formed_has_no_say():
    report = waiting(replace(IDLE, used_blocks=99), 50)
    assert isinstance(Watch(in_transition=True).report(report), Verdict)
    assert isinstance(Watch(formed_s=50.0).report(report), Verdict)
    assert isinstance(Watch(formed_s=50.1 - CONFIG.dwell_s).report(report), Overloaded)


class TestRelaxed:
    def dropped(self, **known: Any) -> Watch:
        return Watch(num_instances=2, undropped_blocks=200, **known)

    def until_relaxed(self, watch: Watch, report: LoadReport, limit: int = 200) -> float | None:
        start_s = watch.now_s
        for _ in range(limit):
            verdict = watch.report(report)
            if isinstance(verdict, Relaxed):
                assert verdict.group_ids == (GroupId(1),)
                return watch.now_s - start_s
        return None

    def test_after_the_hold_below_the_threshold(self):
        report = replace(IDLE, capacity_blocks=700, used_blocks=50, growth_blocks=49)
        after_s = self.until_relaxed(self.dropped(), report)
        assert after_s == pytest.approx(CONFIG.restore_hold_s + 0.1)

    def test_not_at_the_threshold(self):
        """50 % of the undropped memory, not of the dropped one; queue and growth included."""
        report = replace(IDLE, capacity_blocks=700, used_blocks=50, growth_blocks=50)
        assert self.until_relaxed(self.dropped(), report) is None
        queued = waiting(replace(IDLE, capacity_blocks=700, used_blocks=20), 40, 40)
        assert self.until_relaxed(self.dropped(), queued) is None

    def test_one_busy_report_starts_the_hold_anew(self):
        watch = self.dropped()
        low = replace(IDLE, capacity_blocks=700, used_blocks=50)
        assert self.until_relaxed(watch, low, limit=29) is None
        assert isinstance(watch.report(replace(low, used_blocks=150)), Verdict)
        after_s = self.until_relaxed(watch, low)
        assert after_s == pytest.approx(CONFIG.restore_hold_s + 0.1)

    def test_requests_on_their_way_end_the_hold_without_a_report(self):
        watch = self.dropped()
        low = replace(IDLE, capacity_blocks=700, used_blocks=50)
        self.until_relaxed(watch, low, limit=29)
        watch.number -= 1
        watch.report(low, unreported_blocks=100)
        assert watch.state.trends[GroupId(1)].low_since_s is None

    def test_not_within_the_dwell(self):
        low = replace(IDLE, capacity_blocks=700, used_blocks=5)
        watch = self.dropped(formed_s=60.0)
        after_s = self.until_relaxed(watch, low)
        assert after_s == pytest.approx(60.0 + CONFIG.dwell_s - 50.0)

    def test_an_undropped_group_is_never_relaxed(self):
        watch = Watch(num_instances=1, undropped_blocks=100)
        assert self.until_relaxed(watch, IDLE) is None

    def test_another_groups_overload_holds_up_nobody(self):
        low = load_of(replace(IDLE, capacity_blocks=700), num_instances=2, undropped_blocks=200)
        short = load_of(
            waiting(replace(IDLE, group_id=GroupId(2), used_blocks=99), 50),
            num_instances=1,
            undropped_blocks=100,
        )
        state = MonitorState()
        for step in range(60):
            view = ClusterLoadView((low, short), 16)
            state, verdict = observe(state, view, 0.1 * step, CONFIG)
            assert verdict.overloaded is not None and verdict.overloaded.group_ids == (2,)
        assert verdict.relaxed is not None and verdict.relaxed.group_ids == (1,)


class TestSqueezed:
    """A group whose restore is being prepared has given most of its memory back already."""

    def test_its_own_shortage_calls_the_restore_off(self):
        watch = Watch(in_transition=True, is_restoring=True, num_instances=2)
        narrowed = replace(IDLE, capacity_blocks=24, used_blocks=24)
        assert watch.report(narrowed) == Verdict()
        assert watch.report(waiting(narrowed, 5)) == Verdict(squeezed=(GroupId(1),))

    def test_nobody_elses_does(self):
        calm = load_of(IDLE, in_transition=True, is_restoring=True, num_instances=2)
        short = load_of(waiting(replace(IDLE, group_id=GroupId(2), used_blocks=99), 50))
        _, verdict = observe(MonitorState(), ClusterLoadView((calm, short), 16), 0.0, CONFIG)
        assert verdict.squeezed == () and verdict.overloaded is not None

    def test_past_its_commit_it_is_too_late(self):
        watch = Watch(in_transition=True, num_instances=2)
        assert watch.report(waiting(replace(IDLE, used_blocks=99), 50)) == Verdict()
