"""The bubble ratio from the accounts of stages."""

from dataclasses import replace

import pytest

from kunserve.core.ids import GroupId, InstanceId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.snapshots import ClusterState, StageTime
from kunserve.server.telemetry.metric_row import metrics_of
from kunserve.server.telemetry.stage_metrics import ROWS, StageMetrics

A, B = InstanceId(0), InstanceId(1)
PAIR = GroupLayout(GroupId(5), (Stage(A, LayerRange(0, 2)), Stage(B, LayerRange(2, 4))))
STATE = ClusterState(0.0, (), (PAIR,), (), (), 0, 0)


def state(busy_a: float, busy_b: float, active: float, group: int = 5) -> ClusterState:
    return replace(
        STATE,
        stage_times=(
            StageTime(A, GroupId(group), 2, busy_a, active),
            StageTime(B, GroupId(group), 2, busy_b, None),
        ),
    )


def values(metrics: StageMetrics) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels["engine"]): sample.value
        for family in metrics_of(ROWS, metrics, "m")
        for sample in family.samples
    }


def test_busy_and_working_time_of_every_stage() -> None:
    metrics = StageMetrics()
    metrics.observe(state(3.0, 2.0, 4.0))
    found = values(metrics)
    assert found["kunserve:stage_busy_seconds_total", "0"] == 3.0
    assert found["kunserve:stage_active_seconds_total", "0"] == 4.0
    assert found["kunserve:stage_active_seconds_total", "1"] == 4.0
    assert found["kunserve:bubble_ratio", "0"] == pytest.approx(3 / 8)


def test_the_ratio_is_of_the_last_window() -> None:
    metrics = StageMetrics()
    metrics.observe(state(3.0, 2.0, 4.0))
    metrics.observe(state(3.4, 2.4, 4.5))
    assert metrics.ratios[A] == pytest.approx(3 / 8), "half a second is no window"
    metrics.observe(state(4.9, 3.9, 6.0))
    assert metrics.ratios[A] == pytest.approx(1 - 3.8 / 4)


def test_sums_go_on_in_the_next_pipeline_and_the_ratio_ends_with_its_own() -> None:
    metrics = StageMetrics()
    metrics.observe(state(3.0, 2.0, 4.0))
    metrics.observe(replace(state(0.5, 0.5, 1.0, group=6), groups=()))
    assert metrics.ratios == {}
    assert values(metrics)["kunserve:stage_busy_seconds_total", "1"] == 2.5


def test_a_follower_alone_says_nothing_yet() -> None:
    metrics = StageMetrics()
    metrics.observe(replace(STATE, stage_times=(StageTime(B, GroupId(5), 2, 1.0, None),)))
    assert values(metrics) == {}
    metrics.observe(state(3.0, 2.0, 4.0))
    assert values(metrics)["kunserve:stage_busy_seconds_total", "1"] == 2.0
