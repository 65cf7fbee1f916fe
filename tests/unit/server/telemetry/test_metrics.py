"""Names, labels and arithmetic of the metrics."""

import json
import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kunserve.cluster.api import Vitals
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.load import LeaderTotals
from kunserve.core.request import FinishReason, Request, SamplingParams
from kunserve.core.snapshots import Kind, Outcome
from kunserve.server.telemetry.cluster_metrics import ClusterMetrics
from kunserve.server.telemetry.histogram import FIRST_TOKEN_BUCKETS, Histogram, length_buckets
from kunserve.server.telemetry.metrics import FrontMetrics
from kunserve.server.telemetry.request_metrics import RecentValues
from kunserve.server.telemetry.stats_log import StatsLog
from kunserve_extras.dashboard.timeline import Timeline
from tests.unit.server.echo_engine import EchoEngine, group_of, idle_load, run_now
from tests.unit.server.live_server import MODEL, live_server


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labels(**pairs: str) -> frozenset[tuple[str, str]]:
    return frozenset({"model_name": MODEL, **pairs}.items())


def scrape(metrics: FrontMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return samples(metrics.exposition().decode())


def seen(timeline: Timeline, since_s: float | None = None) -> dict[str, Any]:
    return json.loads(timeline.view(since_s))


def request(prompt_tokens: int = 5) -> Request:
    return Request(RequestId("r"), (1,) * prompt_tokens, SamplingParams(8), arrival_s=100.0)


def test_buckets_are_cumulative_and_bounds_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 12.0


def test_first_token_buckets_are_vllms() -> None:
    assert FIRST_TOKEN_BUCKETS[0] == 0.001 and FIRST_TOKEN_BUCKETS[-1] == 2560.0
    assert len(FIRST_TOKEN_BUCKETS) == 22
    assert list(FIRST_TOKEN_BUCKETS) == sorted(FIRST_TOKEN_BUCKETS)


def test_lengths_fall_into_1_2_5_buckets_up_to_the_longest() -> None:
    assert length_buckets(99) == (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    assert length_buckets(100)[-1] == 100.0


def test_a_request_is_timed_from_its_arrival() -> None:
    metrics = FrontMetrics(EchoEngine(), MODEL)
    clock = metrics.timing(request())
    clock.token(100.5, 0.25)
    clock.token(100.7)
    clock.token(101.1)
    clock.ended(FinishReason.LENGTH, 101.1)
    got = scrape(metrics)
    front = labels(engine="all")
    assert got["vllm:prompt_tokens_total", front] == 5
    assert got["vllm:generation_tokens_total", front] == 3
    assert got["vllm:time_to_first_token_seconds_sum", front] == 0.5
    assert got["vllm:time_to_first_token_seconds_count", front] == 1
    assert got["vllm:inter_token_latency_seconds_count", front] == 2
    assert got["vllm:request_time_per_output_token_seconds_sum", front] == pytest.approx(0.3)
    assert got["vllm:e2e_request_latency_seconds_sum", front] == pytest.approx(1.1)
    assert got["vllm:request_queue_time_seconds_sum", front] == pytest.approx(0.25)
    assert got["vllm:request_prefill_time_seconds_sum", front] == pytest.approx(0.25)
    assert got["vllm:request_decode_time_seconds_sum", front] == pytest.approx(0.6)
    assert got["vllm:request_inference_time_seconds_sum", front] == pytest.approx(0.85)
    assert got["vllm:request_prompt_tokens_sum", front] == 5
    assert got["vllm:request_generation_tokens_sum", front] == 3
    assert got["vllm:request_params_max_tokens_sum", front] == 8
    reasons = {
        reason: got["vllm:request_success_total", labels(engine="all", finished_reason=reason)]
        for reason in ("stop", "length", "abort", "error")
    }
    assert reasons == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_a_prompt_counts_once_for_all_its_choices() -> None:
    metrics = FrontMetrics(EchoEngine(), MODEL)
    metrics.answered([3, 7, 5])
    got = scrape(metrics)
    assert got["vllm:request_params_n_sum", labels(engine="all")] == 3
    assert got["vllm:request_params_n_count", labels(engine="all")] == 1
    assert got["vllm:request_max_num_generation_tokens_sum", labels(engine="all")] == 7


def test_an_aborted_request_has_no_latency() -> None:
    metrics = FrontMetrics(EchoEngine(), MODEL)
    metrics.timing(request()).ended(FinishReason.ABORT, 101.0)
    got = scrape(metrics)
    assert got["vllm:e2e_request_latency_seconds_count", labels(engine="all")] == 0


def test_groups_and_instances() -> None:
    engine = EchoEngine()
    metrics = FrontMetrics(engine, MODEL)
    load = replace(
        idle_load(0),
        num_running=3,
        num_waiting=2,
        used_blocks=25,
        growth_blocks=10,
        head_of_line_blocks=5,
    )
    engine.snapshot = replace(engine.snapshot, loads=(load, engine.snapshot.loads[1]))
    got = scrape(metrics)
    first = labels(engine="0")
    assert got["vllm:num_requests_running", first] == 3
    assert got["vllm:num_requests_waiting", first] == 2
    assert got["vllm:kv_cache_usage_perc", first] == 0.25
    assert got["kunserve:kv_capacity_blocks", first] == 100
    assert got["kunserve:kv_used_blocks", first] == 25
    assert got["kunserve:demand_blocks", first] == 40
    assert got["kunserve:group_size", first] == 1
    assert got["kunserve:dropped_bytes", first] == 0
    info = labels(engine="1", block_size="16", num_gpu_blocks="100")
    assert got["vllm:cache_config_info", info] == 1
    assert got["vllm:num_requests_running", labels(engine="1")] == 0


def test_a_drop_shows() -> None:
    engine = EchoEngine()
    metrics = FrontMetrics(engine, MODEL)
    run_now(engine.drop(None))
    for _ in range(2):  # looking twice counts nothing twice
        got = scrape(metrics)
        assert got["kunserve:drops_total", labels()] == 1
        assert got["kunserve:restores_total", labels()] == 0
        assert got["kunserve:group_size", labels(engine="0")] == 2
        assert ("kunserve:group_size", labels(engine="1")) not in got
        assert got["kunserve:dropped_layers", labels(engine="1")] == 2
        assert got["kunserve:dropped_bytes", labels(engine="1")] == 2 * 4096
        assert got["kunserve:exchange_bytes_total", labels(kind="drop")] == 5000
        ended = labels(kind="drop", trigger="forced", outcome="done")
        assert got["kunserve:transitions_total", ended] == 1
        assert got["kunserve:exchanged_requests_total", labels(kind="drop")] == 3
        assert got["kunserve:exchange_max_stall_seconds_sum", labels(kind="drop")] == 0.05
        assert got["kunserve:transition_gap_seconds_sum", labels(kind="drop")] == 0.01
        assert got["kunserve:transitions_under_way", labels(kind="drop")] == 0
        durations = "kunserve:transition_duration_seconds"
        assert got[f"{durations}_count", labels(kind="drop")] == 1
        assert got[f"{durations}_sum", labels(kind="drop")] == pytest.approx(0.3)
        assert got[f"{durations}_count", labels(kind="restore")] == 0


def test_counters_are_those_of_instances() -> None:
    engine = EchoEngine()
    metrics = FrontMetrics(engine, MODEL)
    done = LeaderTotals(7, 70, prompt_tokens=50, generation_tokens=9, steps=(2, *[1] * 13))
    first, second = engine.snapshot.instances
    engine.snapshot = replace(engine.snapshot, instances=(replace(first, totals=done), second))
    for _ in range(2):
        got = scrape(metrics)
        assert got["vllm:num_preemptions_total", labels(engine="0")] == 7
        assert got["kunserve:lost_tokens_total", labels(engine="0")] == 70
        assert got["vllm:num_preemptions_total", labels(engine="1")] == 0
        assert got["vllm:iteration_tokens_total_count", labels(engine="0")] == 15
        assert got["vllm:iteration_tokens_total_sum", labels(engine="0")] == 59
        assert got["vllm:iteration_tokens_total_bucket", labels(engine="0", le="8.0")] == 3
        assert got["vllm:iteration_tokens_total_count", labels(engine="1")] == 0
        if engine.snapshot.num_drops == 0:
            run_now(engine.drop(None))  # no matter who leads what, and what was reported of it
        engine.snapshot = replace(
            engine.snapshot,
            instances=(replace(engine.snapshot.instances[0], totals=done), second),
        )


def test_what_is_in_host_memory_is_counted_in_bytes_and_seconds() -> None:
    engine = EchoEngine()
    metrics = FrontMetrics(engine, MODEL)
    first, second = engine.snapshot.instances
    done = LeaderTotals(
        swapped_out_blocks=5, swapped_back_blocks=3, pauses=(0, 2, 1, *[0] * 11), paused_s=0.8
    )
    loads = (replace(idle_load(0), num_away=2), idle_load(1))
    engine.snapshot = replace(
        engine.snapshot, instances=(replace(first, totals=done), second), loads=loads
    )
    got = scrape(metrics)
    block_bytes = first.spec.unit_bytes * first.spec.num_layers
    swapped = "kunserve:swapped_bytes_total"
    assert got[swapped, labels(engine="0", direction="out")] == 5 * block_bytes
    assert got[swapped, labels(engine="0", direction="back")] == 3 * block_bytes
    assert got["kunserve:num_requests_away", labels(engine="0")] == 2
    pause = "kunserve:request_pause_seconds"
    assert got[f"{pause}_count", labels(engine="0")] == 3
    assert got[f"{pause}_sum", labels(engine="0")] == 0.8
    assert got[f"{pause}_bucket", labels(engine="0", le="0.25")] == 2
    assert got[f"{pause}_count", labels(engine="1")] == 0


def test_requests_that_no_engine_has_are_waiting_too() -> None:
    engine = EchoEngine()
    engine.snapshot = replace(engine.snapshot, num_unplaced=3)
    got = scrape(FrontMetrics(engine, MODEL))
    waiting = {key: value for key, value in got.items() if key[0] == "vllm:num_requests_waiting"}
    assert sum(waiting.values()) == waiting["vllm:num_requests_waiting", labels(engine="none")] == 3
    by_reason = "vllm:num_requests_waiting_by_reason"
    assert got[by_reason, labels(engine="none", reason="capacity")] == 3
    assert sum(value for (name, _), value in got.items() if name == by_reason) == 3


def test_a_transition_under_way_has_an_age_and_counts_when_it_has_ended() -> None:
    engine = EchoEngine()
    metrics = FrontMetrics(engine, MODEL)
    record = replace(engine._record(Kind.DROP), trigger="demand 9 blocks", moved_bytes=0)
    running = replace(record, finished_s=None, outcome=Outcome.RUNNING)
    engine.snapshot = replace(engine.snapshot, now_s=41.0, transitions=(running,))
    got = scrape(metrics)
    assert got["kunserve:transitions_under_way", labels(kind="drop")] == 1
    assert got["kunserve:transition_age_seconds", labels()] == pytest.approx(40.0, abs=0.1)
    for outcome, label in (
        (Outcome.ROLLED_BACK, "rolled_back"),
        (Outcome.FAILED, "failed"),
        (Outcome.DONE, "done"),
    ):
        number = TransitionId(len(label))
        ended = replace(record, transition_id=number, outcome=outcome)
        engine.snapshot = replace(engine.snapshot, transitions=(ended,))
        got = scrape(metrics)
        which = labels(kind="drop", trigger="automatic", outcome=label)
        assert got["kunserve:transitions_total", which] == 1
    assert got["kunserve:transition_age_seconds", labels()] == 0
    assert got["kunserve:transition_duration_seconds_count", labels(kind="drop")] == 1


def test_memory_by_part_sums_to_the_memory() -> None:
    engine = EchoEngine()
    metrics = FrontMetrics(engine, MODEL)
    run_now(engine.drop(None))
    got = scrape(metrics)
    parts = {
        part: got["kunserve:memory_bytes", labels(engine="0", part=part)]
        for part in ("weights", "kv", "freed")
    }
    assert sum(parts.values()) == engine.snapshot.instances[0].spec.memory_bytes
    assert parts["freed"] == 2 * 4096 and parts["kv"] == 400 * 1024


def test_what_the_processes_use() -> None:
    engine = EchoEngine(wholeness=Vitals(2, 1, 0, pids=((InstanceId(1), os.getpid()),)))
    metrics = FrontMetrics(engine, MODEL)
    got = scrape(metrics)
    assert got["kunserve:instance_resident_memory_bytes", labels(engine="1")] > 1e6
    seconds = got["kunserve:instance_cpu_seconds_total", labels(engine="1")]
    assert seconds > 0
    engine.wholeness = Vitals(2, 1, 0)
    got = scrape(metrics)
    assert got["kunserve:instance_cpu_seconds_total", labels(engine="1")] == seconds
    assert ("kunserve:instance_resident_memory_bytes", labels(engine="1")) not in got
    assert got["process_resident_memory_bytes", frozenset()] > 1e6
    engine.wholeness = Vitals(2, 0, 0, pids=((InstanceId(1), os.getppid()),))
    got = scrape(metrics)
    assert got["kunserve:instance_cpu_seconds_total", labels(engine="1")] >= seconds


def test_recent_values_forget() -> None:
    recent = RecentValues(window_s=5.0)
    assert recent.percentiles(0.0, 0.5) == [None]
    for number in range(100):
        recent.add(number / 100, float(number))
    assert recent.percentiles(1.0, 0.5, 0.99) == [50.0, 99.0]
    assert recent.percentiles(7.0, 0.5) == [None]


def test_stats_lines_only_for_groups_that_do_something() -> None:
    engine = EchoEngine()
    log = StatsLog(ClusterMetrics(engine, MODEL))
    log.lines(0.0)
    assert log.lines(10.0) == []
    load = replace(idle_load(1), num_running=2, num_waiting=1, used_blocks=33)
    first, second = engine.snapshot.instances
    second = replace(second, totals=LeaderTotals(prompt_tokens=500, generation_tokens=200))
    engine.snapshot = replace(
        engine.snapshot, loads=(idle_load(0), load), instances=(first, second)
    )
    (line,) = log.lines(20.0)
    assert line.startswith(
        "Engine 001: Avg prompt throughput: 50.0 tokens/s, "
        "Avg generation throughput: 20.0 tokens/s, Running: 2 reqs, Waiting: 1 reqs, "
        "GPU KV cache usage: 33.0%"
    )


def test_timeline_is_bounded_and_incremental() -> None:
    engine = EchoEngine()
    metrics = FrontMetrics(engine, MODEL)
    timeline = Timeline(metrics, period_s=1.0, kept_s=5.0)
    clock = metrics.timing(request())
    clock.accepted()
    clock.token(100.5)
    for _ in range(9):
        timeline.sample(metrics.cluster.observe())
    run_now(engine.drop(None))
    timeline.sample(metrics.cluster.observe())
    view = seen(timeline)
    assert len(view["samples"]) == 5
    last = view["samples"][-1]
    assert last["arrivals"] == 1 and last["num_dropped_instances"] == 2
    assert [group["num_stages"] for group in last["groups"]] == [2]
    (transition,) = view["transitions"]
    assert transition["kind"] == "drop" and transition["outcome"] == "done"
    assert transition["groups_after"][0]["stages"][0]["layers"] == {"first": 0, "end": 4}
    assert seen(timeline, view["samples"][-2]["t_s"])["samples"] == [last]
    assert seen(timeline, last["t_s"])["samples"] == []


def test_a_timeline_of_many_groups_has_a_bound_and_reaches_back() -> None:
    groups = tuple(group_of(number, (number, 0, 4)) for number in range(1000))
    loads = tuple(idle_load(number) for number in range(1000))
    engine = EchoEngine()
    engine.snapshot = replace(engine.snapshot, groups=groups, loads=loads)
    max_bytes, kept = 4 << 20, 60
    metrics = FrontMetrics(engine, MODEL)
    timeline = Timeline(metrics, 1.0, float(kept), max_bytes)
    for _ in range(2 * kept):
        timeline.sample(metrics.cluster.observe())
    assert len(timeline.view(None)) < max_bytes + 1000
    now_s = engine.snapshot.now_s
    ages = [round((now_s - one["t_s"]) / 0.001) for one in seen(timeline)["samples"]]
    assert ages[-5:] == [4, 3, 2, 1, 0]  # what was seen lately was seen as often as ever
    assert kept > ages[0] > 0.8 * kept
    distances = [before - after for before, after in pairwise(ages)]
    assert max(distances) < kept / 4

    engine.snapshot = replace(engine.snapshot, groups=groups[:8], loads=loads[:8])
    for _ in range(2 * kept):
        timeline.sample(metrics.cluster.observe())
    assert len(seen(timeline)["samples"]) == kept  # few groups: all of them


def test_the_endpoints() -> None:
    with live_server() as server, server.client() as client:
        body = {"prompt": "hello", "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
        answer = client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        got = samples(answer.text)
        assert got["vllm:generation_tokens_total", labels(engine="all")] == 4
        state = client.get("/kunserve/state").json()
        assert [group["leader"] for group in state["groups"]] == [0, 1]
        assert state["groups"][0]["load"]["capacity_blocks"] == 100
        assert state["instances"][0]["held"] == {"first": 0, "end": 4}
        timeline = client.get("/kunserve/timeline").json()
        assert timeline["samples"] and timeline["transitions"] == []
        assert client.get("/kunserve/timeline?since=1e9").json()["samples"] == []
        assert client.get("/kunserve/timeline?since=x").status_code == 400
