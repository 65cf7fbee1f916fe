"""Our metrics beside those of vLLM 0.33: names, types, labels and buckets."""

import pytest

from kunserve.server.telemetry import histogram
from kunserve.server.telemetry.metric_row import Type
from kunserve.server.telemetry.metrics import ROWS
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.live_server import live_server

REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
REQUEST_S += (1920, 7680)
FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
FIRST_S += (20, 40, 80, 160, 640, 2560)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
TOKEN_S += (20, 40, 80)
STAY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120)
STAY_S += (300, 600, 1200, 1800)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Of a context of 512 tokens."""

GAUGES = {
    "num_requests_running": (),
    "num_requests_waiting": (),
    "num_requests_waiting_by_reason": ("reason",),
    "kv_cache_usage_perc": (),
    "engine_sleep_state": ("sleep_state",),
}
COUNTERS = {
    "prefix_cache_queries_total": (),
    "prefix_cache_hits_total": (),
    "num_preemptions_total": (),
    "prompt_tokens_total": (),
    "prompt_tokens_by_source_total": ("source",),
    "prompt_tokens_cached_total": (),
    "generation_tokens_total": (),
    "request_success_total": ("finished_reason",),
}
HISTOGRAMS = {
    "request_prompt_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS,
    "iteration_tokens_total": (1, *(2**power for power in range(3, 15))),
    "request_max_num_generation_tokens": LENGTHS,
    "request_params_n": (1, 2, 5, 10, 20),
    "request_params_max_tokens": LENGTHS,
    "time_to_first_token_seconds": FIRST_S,
    "inter_token_latency_seconds": TOKEN_S,
    "request_time_per_output_token_seconds": TOKEN_S,
    "e2e_request_latency_seconds": REQUEST_S,
    "request_queue_time_seconds": REQUEST_S,
    "request_inference_time_seconds": REQUEST_S,
    "request_prefill_time_seconds": REQUEST_S,
    "request_decode_time_seconds": REQUEST_S,
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
    "request_prefill_kv_computed_tokens": LENGTHS,
    "kv_block_lifetime_seconds": STAY_S,
    "kv_block_idle_before_evict_seconds": STAY_S,
    "kv_block_reuse_gap_seconds": STAY_S,
}
WITHOUT_MEANING = {
    "corrupted_requests_total": "logits are not looked through for NaN",
    "watermark_requests_total": "answers bear no watermark",
    "num_requests_kv_fetch_by_stage": "no KV comes from other servers",
    "external_prefix_cache_queries_total": "the same",
    "external_prefix_cache_hits_total": "the same",
    "prompt_tokens_cached_by_source_total": "there is one tier: prefix_cache_hits_total",
    "mm_cache_queries_total": "models of text",
    "mm_cache_hits_total": "models of text",
    "lora_requests_info": "no LoRA",
}
OF_OTHERS = {"admission_rejections_total", "cache_config_info"}
"""Whose labels are not by engine, or are a selection of vLLM's."""


@pytest.mark.parametrize("name", [*GAUGES, *COUNTERS, *HISTOGRAMS])
def test_each_is_there_by_its_name_type_and_labels(name: str) -> None:
    (row,) = [row for row in ROWS if row.name == f"vllm:{name}"]
    labels = {**GAUGES, **COUNTERS}.get(name, ())
    assert set(row.labels) == {"model_name", "engine", *labels}
    expected = Type.HISTOGRAM
    if name not in HISTOGRAMS:
        expected = Type.GAUGE if name in GAUGES else Type.COUNTER
    assert row.type is expected


def test_buckets_are_those_of_vllm() -> None:
    with live_server(EchoEngine(max_model_len=512)) as server, server.client() as http:
        text = http.get("/metrics").text
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if line.startswith("vllm:") and "_bucket{" in line and 'engine="1"' not in line:
            name = line.partition("_bucket{")[0].removeprefix("vllm:")
            bound = line.partition('le="')[2].partition('"')[0]
            found.setdefault(name, []).append(float(bound))
    for name, buckets in HISTOGRAMS.items():
        assert found[name] == [*map(float, buckets), float("inf")], name
    assert histogram.length_buckets(512) == LENGTHS


def test_nothing_else_bears_vllms_name() -> None:
    known = {*GAUGES, *COUNTERS, *HISTOGRAMS, *OF_OTHERS}
    ours = {row.name.removeprefix("vllm:") for row in ROWS if row.name.startswith("vllm:")}
    assert {name for name in ours - known if not name.startswith("spec_decode_")} == set()
    assert not ours & set(WITHOUT_MEANING)
