"""What ``kunserve bench`` is asked to do. A field is the flag of that name; defaults live here."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """The flags of one run. `bench_command` says what each one means."""

    # Server
    backend: str = "openai"
    base_urls: tuple[str, ...] = ()
    """Empty: ``host`` and ``port``."""
    host: str = "127.0.0.1"
    port: int = 8000
    endpoint: str | None = None
    model: str | None = None
    api_key: str | None = None
    metrics_urls: tuple[str, ...] = ()
    ready_check_timeout_sec: float = 30.0
    # Workload
    dataset_name: str = "random"
    dataset_path: Path | None = None
    lengths_path: Path | None = None
    num_prompts: int | None = None
    request_rate: float | None = None
    burstiness: float | None = None
    bursty_duration: float | None = None
    length_scale: float = 1.0
    max_total_tokens: int | None = None
    seed: int = 0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    turns: int = 10
    system_tokens: int = 500
    turn_tokens: int = 50
    answer_tokens: int = 100
    think_time: float = 10.0
    trace_start: float = 0.0
    trace_end: float | None = None
    trace_scale: float = 1.0
    trace_keep_window: bool = False
    trace_time_scale: float = 1.0
    thin: float = 1.0
    trace_model: str | None = None
    timed_trace_sec_multiplier: float | None = None
    # Client
    ignore_eos: bool = False
    temperature: float = 0.0
    tokenizer: str | None = None
    prompt_format: str = "auto"
    prompt_vocab_size: int = 32_000
    max_concurrency: int | None = None
    num_warmups: int = 0
    request_timeout_sec: float = 3600.0
    extra_body: str | None = None
    """JSON."""
    disable_tqdm: bool = False
    # Report
    goodput: tuple[str, ...] = ()
    percentile_metrics: str = "ttft,tpot,itl"
    metric_percentiles: str = "50,90,99,99.9"
    save_result: bool = False
    save_detailed: bool = False
    result_dir: Path | None = None
    result_filename: str | None = None
    label: str | None = None
    metadata: tuple[str, ...] = ()
    plot_path: Path | None = None
    load_results: tuple[Path, ...] = ()
