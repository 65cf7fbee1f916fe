"""What vLLM and SGLang call the numbers that an observer needs."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names of one kind of server. Of several names the first that is there counts."""

    name: str
    prefix: str
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    kv_usage: tuple[str, ...]
    """Share of the KV memory, 0 to 1."""
    capacity_tokens: tuple[str, ...] = ()
    """KV tokens, where a gauge has them."""
    block_size: tuple[str, ...] = ()
    cache_info: tuple[str, str, str] | None = None
    """A series whose labels tell of blocks: its name, their number, their size in tokens."""
    counters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Our name -> theirs."""
    histograms: dict[str, tuple[str, ...]] = field(default_factory=dict)
    advice: str = ""
    """Where the numbers are missing."""


COUNTERS = ("finished", "prompt_tokens", "generation_tokens", "preemptions")
HISTOGRAMS = ("ttft", "itl", "tpot", "e2e", "input_tokens", "output_tokens")

VLLM = Dialect(
    name="vllm",
    prefix="vllm:",
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    cache_info=("vllm:cache_config_info", "num_gpu_blocks", "block_size"),
    counters={
        "finished": ("vllm:request_success_total",),
        "prompt_tokens": ("vllm:prompt_tokens_total",),
        "generation_tokens": ("vllm:generation_tokens_total",),
        "preemptions": ("vllm:num_preemptions_total",),
    },
    histograms={
        "ttft": ("vllm:time_to_first_token_seconds",),
        "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "tpot": ("vllm:request_time_per_output_token_seconds",),
        "e2e": ("vllm:e2e_request_latency_seconds",),
        "input_tokens": ("vllm:request_prompt_tokens",),
        "output_tokens": ("vllm:request_generation_tokens",),
    },
    advice="is it started with --disable-log-stats?",
)
"""0.32 and 0.33; older names second."""

SGLANG = Dialect(
    name="sglang",
    prefix="sglang:",
    running=("sglang:num_running_reqs",),
    waiting=("sglang:num_queue_reqs",),
    kv_usage=("sglang:token_usage", "sglang:full_token_usage"),
    capacity_tokens=("sglang:max_total_num_tokens",),
    block_size=("sglang:page_size",),
    cache_info=("sglang:cache_config_info", "num_pages", "page_size"),
    counters={
        "finished": ("sglang:num_requests_total",),
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "generation_tokens": ("sglang:generation_tokens_total",),
        "preemptions": ("sglang:num_retracted_requests_total", "sglang:num_retracted_reqs_total"),
    },
    histograms={
        "ttft": ("sglang:time_to_first_token_seconds",),
        "itl": ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        "e2e": ("sglang:e2e_request_latency_seconds",),
        "input_tokens": ("sglang:prompt_tokens_histogram",),
        "output_tokens": ("sglang:generation_tokens_histogram",),
    },
    advice="is it started with --enable-metrics?",
)

DIALECTS = (VLLM, SGLANG)
DATA_RANK = "dp_rank"
"""SGLang's label for parts of a server with memories of their own."""


def series_names(dialect: Dialect) -> tuple[str, ...]:
    """Every series that is read, those of histograms with their endings."""
    plain = (*dialect.running, *dialect.waiting, *dialect.kv_usage)
    plain += (*dialect.capacity_tokens, *dialect.block_size)
    plain += tuple(name for names in dialect.counters.values() for name in names)
    if dialect.cache_info is not None:
        plain += (dialect.cache_info[0],)
    ends = ("_bucket", "_sum", "_count")
    return plain + tuple(
        name + end for names in dialect.histograms.values() for name in names for end in ends
    )
