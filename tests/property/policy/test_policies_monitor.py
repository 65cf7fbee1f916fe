"""The monitor in a closed loop with a cluster that does as it says, under any load."""

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.config import OverloadConfig
from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad, LoadReport
from kunserve.policy.drop.monitor import (
    ClusterLoadView,
    MonitorState,
    Overloaded,
    Relaxed,
    observe,
)

CONFIG = OverloadConfig()
UNDROPPED_BLOCKS = 100
DROPPED_BLOCKS = 600
STEPS_OF_A_TRANSITION = 4


@dataclass
class Pair:
    """Two instances, apart or as one group. Demand beyond the capacity waits."""

    is_dropped: bool = False
    formed_s: float | None = None
    busy_until_s: float = 0.0
    generation: int = 0
    number: int = 0

    def loads(self, demand: int, growth: int, now_s: float) -> tuple[GroupLoad, ...]:
        self.number += 1
        count = 1 if self.is_dropped else 2
        return tuple(
            self._load(GroupId(10 * self.generation + k), demand // count, growth // count, now_s)
            for k in range(count)
        )

    def _load(self, group_id: GroupId, demand: int, growth: int, now_s: float) -> GroupLoad:
        capacity = DROPPED_BLOCKS if self.is_dropped else UNDROPPED_BLOCKS
        queued = max(0, demand - capacity)
        report = LoadReport(
            group_id=group_id,
            sequence_number=self.number,
            num_running=1,
            num_waiting=-(-queued // 9),
            used_blocks=demand - queued,
            capacity_blocks=capacity,
            growth_blocks=growth,
            head_of_line_blocks=min(9, queued),
            waiting_blocks=queued,
            largest_request_blocks=9,
            largest_expected_blocks=9,
        )
        return GroupLoad(
            report,
            capacity,
            num_instances=2 if self.is_dropped else 1,
            undropped_blocks=UNDROPPED_BLOCKS * (2 if self.is_dropped else 1),
            formed_s=self.formed_s,
            in_transition=now_s < self.busy_until_s,
        )

    def change(self, now_s: float) -> None:
        self.is_dropped = not self.is_dropped
        self.generation += 1
        self.busy_until_s = self.formed_s = now_s + 0.1 * STEPS_OF_A_TRANSITION


# Each piece of load: (reports it lasts, blocks, expected growth).
loads = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 700), st.integers(0, 100)), min_size=1, max_size=8
)


@given(loads)
def test_it_never_flaps_and_never_sleeps(pieces):
    pair, state, now_s = Pair(), MonitorState(), 0.0
    changes: list[float] = []
    low_since_s: float | None = None
    blocked_since_s: float | None = None
    for num_reports, demand, growth in pieces:
        for _ in range(num_reports):
            now_s += 0.1
            view = ClusterLoadView(pair.loads(demand, growth, now_s), block_size=16)
            frozen = dict(state.trends)
            new_state, judged = observe(state, view, now_s, CONFIG)
            assert dict(state.trends) == frozen
            assert observe(state, view, now_s, CONFIG) == (new_state, judged)
            verdict = judged.overloaded or judged.relaxed
            state = new_state
            is_low = demand + growth < CONFIG.restore_below * 2 * UNDROPPED_BLOCKS
            low_since_s = (now_s if low_since_s is None else low_since_s) if is_low else None
            assert not isinstance(verdict, Relaxed) or pair.is_dropped
            if isinstance(verdict, Relaxed):
                assert low_since_s is not None
                assert now_s - low_since_s >= CONFIG.restore_hold_s - 1e-6
            is_blocked = any(load.report.num_waiting for load in view.groups)
            if isinstance(verdict, Overloaded):
                named = [load for load in view.groups if load.report.group_id in verdict.group_ids]
                missing = sum(load.need_blocks - load.report.capacity_blocks for load in named)
                assert verdict.required_blocks >= max(1, missing)
            if isinstance(verdict, Relaxed) or (
                isinstance(verdict, Overloaded) and not pair.is_dropped
            ):
                changes.append(now_s)
                pair.change(now_s)
                blocked_since_s = None
            elif is_blocked and not pair.is_dropped:
                # Nothing is ever released here, so only the dwell may delay the drop.
                blocked_since_s = now_s if blocked_since_s is None else blocked_since_s
                assert now_s - blocked_since_s <= CONFIG.dwell_s + 0.5
            else:
                blocked_since_s = None
    for before, after in itertools.pairwise(changes):
        assert after - before >= CONFIG.dwell_s - 1e-6


@given(st.integers(0, 98), st.integers(0, 500), st.lists(st.integers(1, 98), max_size=30))
def test_steady_use_below_the_capacity_never_drops(used, growth, queue):
    """Whatever is expected to grow or waits: if memory does not fill, it is not what is short."""
    fits = [blocks for blocks in queue[:1] if used + blocks <= 98]
    queue = queue if fits else []
    state = MonitorState()
    for step in range(30):
        report = LoadReport(
            GroupId(0),
            sequence_number=step,
            num_running=1,
            num_waiting=len(queue),
            used_blocks=used,
            capacity_blocks=100,
            growth_blocks=growth,
            head_of_line_blocks=sum(fits),
            waiting_blocks=sum(queue),
            largest_request_blocks=9,
            largest_expected_blocks=9,
        )
        view = ClusterLoadView((GroupLoad(report, 100, 1, 100),), 16)
        state, verdict = observe(state, view, 0.1 * step, CONFIG)
        assert verdict.overloaded is None
