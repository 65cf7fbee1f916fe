"""What drops have saved, by hand."""

from dataclasses import replace

import pytest

from kunserve.core.ids import GroupId
from kunserve.core.layout import LayerRange
from kunserve.core.snapshots import ClusterState, InstanceSnapshot
from kunserve.server.telemetry.metric_row import metrics_of
from kunserve.server.telemetry.queueing_avoided import DROPPED_ROWS, DroppedTime, QueueingAvoided
from tests.e2e.api.dashboard_story import halves, spec_of, whole
from tests.unit.server.echo_engine import idle_load

UNDROPPED = spec_of(0).blocks_when_holding(30)


def state_at(now_s: float, used_blocks: int, dropped: bool) -> ClusterState:
    layouts = (halves(4, 0, 1),) if dropped else (whole(0, 0), whole(1, 1))
    loads = tuple(
        replace(idle_load(GroupId(layout.group_id)), used_blocks=used_blocks, num_running=12)
        for layout in layouts
    )
    instances = tuple(
        InstanceSnapshot(spec_of(number), True, LayerRange(0, 30), spec_of(number).kv_units)
        for number in (0, 1)
    )
    return ClusterState(
        now_s=now_s,
        instances=instances,
        groups=layouts,
        loads=loads,
        transitions=(),
        num_drops=0,
        num_restores=0,
    )


def test_nothing_is_saved_where_undropped_memory_would_do() -> None:
    savings = QueueingAvoided()
    savings.observe(state_at(0.0, 2 * UNDROPPED, dropped=True))
    savings.observe(state_at(9.0, UNDROPPED, dropped=False))
    assert savings.num_requests == savings.request_s == 0


def test_requests_beyond_undropped_memory_count_as_long_as_they_run() -> None:
    savings = QueueingAvoided()
    savings.observe(state_at(0.0, 3 * UNDROPPED, dropped=True))
    assert savings.num_requests == pytest.approx(4)  # a third of the memory, of twelve requests
    savings.observe(state_at(2.5, 2 * UNDROPPED, dropped=True))
    assert savings.request_s == pytest.approx(10)
    savings.observe(state_at(9.0, 2 * UNDROPPED, dropped=True))
    assert savings.request_s == pytest.approx(10)


def test_dropped_time_counts_each_instance_as_long_as_it_lives() -> None:
    time = DroppedTime()
    undropped = state_at(10.0, 0, dropped=False)
    first, second = undropped.instances
    half = replace(first, held=LayerRange(0, 15))
    dead = replace(second, alive=False, held=LayerRange(0, 0))
    time.observe(undropped)
    time.observe(replace(undropped, now_s=20.0, instances=(half, second)))
    time.observe(replace(undropped, now_s=24.0, instances=(half, dead)))
    time.observe(replace(undropped, now_s=90.0, instances=(first, second)))
    time.observe(replace(undropped, now_s=99.0, instances=(first, second)))
    got = {
        (sample.name, sample.labels["engine"]): sample.value
        for family in metrics_of(DROPPED_ROWS, time, "m")
        for sample in family.samples
    }
    assert got == {
        ("kunserve:dropped_seconds_total", "0"): 70.0,
        ("kunserve:dropped_seconds_total", "1"): 0.0,
        ("kunserve:dropped_share_seconds_total", "0"): 35.0,
        ("kunserve:dropped_share_seconds_total", "1"): 0.0,
    }
