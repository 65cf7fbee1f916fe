"""Prometheus text, as servers write it and as they should not."""

from kunserve_lab.bench.samples import parse_prometheus, server_sample

TEXT = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b}c"} 2.0
vllm:num_requests_running{engine="1"} 3 1700000000000
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:num_preemptions_total 1e1
vllm:num_requests_waiting NaN
broken{ 4
nothing
word x
"""


def test_parsing() -> None:
    values = parse_prometheus(TEXT)
    assert values["vllm:num_requests_running"] == [2.0, 3.0]
    assert values["vllm:num_preemptions_total"] == [10.0]
    assert not {"vllm:num_requests_waiting", "broken", "word"} & set(values)


def test_a_page_that_is_no_prometheus_text_has_no_values() -> None:
    assert parse_prometheus("<html>busy</html>") == {}
    assert parse_prometheus("kunserve:drops_total 3\nvllm:num_requests_running{ 4\n") == {}


def test_counts_are_summed_and_usage_is_averaged() -> None:
    sample = server_sample(1.5, [TEXT, TEXT])
    assert (sample.time_s, sample.num_running, sample.kv_usage) == (1.5, 10.0, 0.5)
    assert (sample.num_preemptions, sample.num_waiting, sample.num_drops) == (20.0, None, None)


def test_stage_times_are_summed_over_stages() -> None:
    stages = "".join(
        f'kunserve:stage_{kind}_seconds_total{{engine="{i}"}} {value}\n'
        for i, kind, value in ((0, "busy", 3), (1, "busy", 2), (0, "active", 4), (1, "active", 4))
    )
    sample = server_sample(0.0, [stages])
    assert (sample.stage_busy_s, sample.stage_active_s) == (5.0, 8.0)


def test_blocks_say_more_than_shares() -> None:
    blocks = "kunserve:kv_capacity_blocks 100\nkunserve:kv_used_blocks 40\n"
    assert server_sample(0.0, [TEXT + blocks]).kv_usage == 0.4
    assert server_sample(0.0, [""]).kv_usage is None
