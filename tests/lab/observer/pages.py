"""Small pages by hand: vLLM's and SGLang's."""

from kunserve_lab.observer.readings.histogram import Histogram
from kunserve_lab.observer.readings.page import Reading

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen2.5-14B"} 3.0
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen2.5-14B"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="Qwen/Qwen2.5-14B",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen2.5-14B"} 0.5
vllm:num_preemptions_total{engine="0",model_name="Qwen/Qwen2.5-14B"} 7.0
vllm:prompt_tokens_total{engine="0",model_name="Qwen/Qwen2.5-14B"} 1000.0
vllm:generation_tokens_total{engine="0",model_name="Qwen/Qwen2.5-14B"} 400.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="Qwen/Qwen2.5-14B"} 8.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="Qwen/Qwen2.5-14B"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="Qwen/Qwen2.5-14B"} 4.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="1.0",model_name="Qwen/Qwen2.5-14B"} 9.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="Qwen/Qwen2.5-14B"} 10.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="Qwen/Qwen2.5-14B"} 10.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="Qwen/Qwen2.5-14B"} 5.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
process_cpu_seconds_total 3.5
"""
SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="Qwen/Qwen2.5-14B",tp_rank="0"} 4.0
sglang:num_queue_reqs{model_name="Qwen/Qwen2.5-14B",tp_rank="0"} 1.0
sglang:token_usage{model_name="Qwen/Qwen2.5-14B",tp_rank="0"} 0.25
sglang:max_total_num_tokens{model_name="Qwen/Qwen2.5-14B",tp_rank="0"} 64000.0
sglang:page_size{model_name="Qwen/Qwen2.5-14B",tp_rank="0"} 16.0
sglang:num_requests_total{model_name="Qwen/Qwen2.5-14B"} 12.0
sglang:prompt_tokens_total{model_name="Qwen/Qwen2.5-14B"} 1200.0
sglang:generation_tokens_total{model_name="Qwen/Qwen2.5-14B"} 500.0
"""


def reading(time_s: float, replica: str = "a:1", **values: object) -> Reading:
    """One replica at a moment; what is not given is that of an idle one."""
    plain: dict[str, object] = {
        "kind": "vllm",
        "model": "Qwen/Qwen2.5-14B",
        "num_running": 0.0,
        "num_waiting": 0.0,
        "kv_usage": 0.0,
        "capacity_blocks": 3000,
        "block_size": 16,
        "counters": {"finished": 0.0, "prompt_tokens": 0.0, "generation_tokens": 0.0},
        "histograms": {"input_tokens": Histogram((1000.0,), (10.0, 0.0), 5000.0)},
    }
    return Reading(replica, time_s, **(plain | values))  # type: ignore[arg-type]
