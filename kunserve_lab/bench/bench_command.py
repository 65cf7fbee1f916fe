"""``kunserve bench``: the flags, and nothing else. What they start is in `run`.

Heavy imports happen when the command runs, so that ``kunserve --help`` stays fast.
"""

from pathlib import Path
from typing import Any

import click

from kunserve.server.start.flags.grouped import GroupedCommand
from kunserve_lab.bench.config import BenchConfig
from kunserve_lab.bench.flag_groups import option

_CONFIG = BenchConfig()
_server = option("Server", _CONFIG)
_workload = option("Workload", _CONFIG)
_random = option("Workload: random lengths", _CONFIG)
_turns = option("Workload: conversations (multi-turn)", _CONFIG)
_trace = option("Workload: traces", _CONFIG)
_client = option("Client", _CONFIG)
_report = option("Report", _CONFIG)

_DATASETS = [
    "random", "lengths", "bursty", "multi-turn", "burstgpt", "azure", "mooncake", "timed_trace",
]  # fmt: skip
_FILE = click.Path(dir_okay=False, path_type=Path)
_POSITIVE = click.FloatRange(min=0, min_open=True)

_EPILOG = """\b
Examples
  Poisson arrivals at 4 req/s against the server on port 8000:
    kunserve bench --request-rate 4 --num-prompts 200 --ignore-eos

\b
  The built-in bursty window (two overload spikes), with its timeline:
    kunserve bench --dataset-name bursty --request-rate 2 --ignore-eos --plot burst.png

\b
  Arrivals of one file, lengths of another, twice the rate over the whole window:
    kunserve bench --dataset-name azure --dataset-path azure.csv.gz \\
      --lengths-path sharegpt.csv.gz --max-total-tokens 4096 \\
      --trace-scale 2 --trace-keep-window --ignore-eos --save-result

\b
  Two saved runs on the same axes:
    kunserve bench --load-result vllm.jsonl kunserve.jsonl --plot compare.png
"""


# fmt: off
@click.command(
    "bench",
    cls=GroupedCommand,
    epilog=_EPILOG,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
@_server("--backend", type=click.Choice(["openai", "openai-chat"]),
         help="openai: /v1/completions; openai-chat: /v1/chat/completions.")
@_server("--base-url", "base_urls", many=True, metavar="URL...",
         help="Server address, such as http://127.0.0.1:8000. Several take turns.")
@_server("--host", help="Used without --base-url.")
@_server("--port", type=click.IntRange(1, 65535),
         help="Used without --base-url.")
@_server("--endpoint", default=None, metavar="PATH",
         help="Path of the API; the default follows --backend.")
@_server("--model", default=None, help="Model to ask for; default: the first the server lists.")
@_server("--api-key", envvar="OPENAI_API_KEY", default=None,
         help="Sent as a Bearer token. [env: OPENAI_API_KEY]")
@_server("--metrics-url", "metrics_urls", many=True, metavar="URL...",
         help="Prometheus pages to sample; default: /metrics of each server. 'none' turns it off.")
@_server("--ready-check-timeout-sec", type=click.FloatRange(min=0),
         help="How long to wait for the servers to answer.")
@_workload("--dataset-name", type=click.Choice(_DATASETS),
           help="random, lengths: drawn lengths at --request-rate; bursty: a built-in window "
           "with two overload spikes; multi-turn: conversations; the others replay a file at its "
           "own times.")
@_workload("--dataset-path", type=_FILE,
           help="The trace; for lengths, a CSV of input,output. Or a name of `kunserve data`.")
@_workload("--lengths-path", type=_FILE,
           help="CSV (.csv, .csv.gz), or a name of `kunserve data`, whose lengths replace those of "
           "the dataset.")
@_workload("--num-prompts", type=click.IntRange(min=1),
           help="Requests at most. Default: 1000; for bursty and traces, all there are.")
@_workload("--request-rate", type=_POSITIVE,
           help="Requests per second, or 'inf' for all at once (the default; bursty: 1).")
@_workload("--burstiness", type=_POSITIVE,
           help="Shape of the Gamma gaps: 1 is Poisson (the default), less is burstier "
           "(bursty: 0.5).")
@_workload("--bursty-duration", type=_POSITIVE, metavar="SEC",
           help="Length of the bursty window. Default: num-prompts / request-rate if both are "
           "given, else 640.")
@_workload("--length-scale", type=_POSITIVE,
           help="Multiplies every length, for small models and machines.")
@_workload("--max-total-tokens", type=click.IntRange(min=2),
           help="Cut inputs of --lengths-path, or of bursty, so that input + output fits (the "
           "paper's rule for "
           "ShareGPT: 4096).")
@_workload("--seed", type=click.IntRange(min=0),
           help="Equal seeds give equal arrivals, lengths and prompts.")
@_random("--random-input-len", type=click.IntRange(min=1),
         help="Input tokens.")
@_random("--random-output-len", type=click.IntRange(min=1),
         help="Output tokens.")
@_random("--random-range-ratio", type=click.FloatRange(0, 1, max_open=True),
         help="Lengths are drawn from [len * (1 - r), len * (1 + r)].")
@_turns("--turns", type=click.IntRange(min=1), help="Of each conversation.")
@_turns("--system-tokens", type=click.IntRange(min=0),
        help="Of the prompt that all conversations begin with.")
@_turns("--turn-tokens", type=click.IntRange(min=1), help="What the user says in a turn.")
@_turns("--answer-tokens", type=click.IntRange(min=1), help="What is asked for, and comes back in "
        "the next turn's prompt.")
@_turns("--think-time", type=click.FloatRange(min=0), metavar="SEC",
        help="Mean time from a turn to the next, whenever its answer ends.")
@_trace("--trace-start", type=click.FloatRange(min=0), show_default=False, metavar="SEC",
        help="Replay from here, in the trace's own time. Default: its first arrival.")
@_trace("--trace-end", type=_POSITIVE, metavar="SEC", help="Replay up to here.")
@_trace("--trace-scale", type=_POSITIVE,
        help="Multiply the rate, keeping the pattern (TraceUpscaler). Stops at the original "
        "number of requests.")
@_trace("--trace-keep-window", is_flag=True,
        help="Let --trace-scale cover the whole window, with more requests.")
@_trace("--trace-time-scale", type=_POSITIVE,
        help="Multiply arrival times: 0.1 plays ten times as fast.")
@_trace("--thin", type=click.FloatRange(0, 1, min_open=True),
        help="Keep this fraction of the requests.")
@_trace("--trace-model", help="Only the requests of this model (burstgpt).")
@_trace("--timed-trace-sec-multiplier", type=_POSITIVE,
        help="Seconds per unit of 'timestamp'. Default: 0.001 for mooncake, 1 for timed_trace.")
@_client("--ignore-eos", is_flag=True,
         help="Generate exactly the lengths of the workload (vLLM's extension of the API).")
@_client("--temperature", type=click.FloatRange(min=0),
         help="0 is greedy.")
@_client("--tokenizer", metavar="ID_OR_PATH",
         help="Makes text prompts of exact length (needs transformers). Without it, completions "
         "get token ids and chat gets common words.")
@_client("--prompt-format", type=click.Choice(["auto", "token-ids", "text"]),
         help="What prompts are made of.")
@_client("--prompt-vocab-size", type=click.IntRange(min=2),
         help="Token ids are drawn below this.")
@_client("--max-concurrency", type=click.IntRange(min=1),
         help="Requests in flight at most. Hides queueing: never use it in overload runs.")
@_client("--num-warmups", type=click.IntRange(min=0),
         help="Requests sent and finished before the clock starts.")
@_client("--request-timeout-sec", type=_POSITIVE,
         help="A request that takes longer has failed.")
@_client("--extra-body", metavar="JSON", help="Further fields of every request.")
@_client("--disable-tqdm", is_flag=True, help="No progress line.")
@_report("--goodput", many=True, metavar="KEY:MS...",
         help="Objectives in milliseconds, such as ttft:500 tpot:50 (also e2el).")
@_report("--percentile-metrics",
         help="Latencies to print: ttft, tpot, itl, e2el.")
@_report("--metric-percentiles",
         help="Percentiles to compute.")
@_report("--save-result", is_flag=True,
         help="Write vLLM's JSON, and beside it a .jsonl with every request and sample.")
@_report("--save-detailed", is_flag=True, help="Put per-request arrays in the JSON too.")
@_report("--result-dir", type=click.Path(file_okay=False, path_type=Path), help="Default: here.")
@_report("--result-filename", help="Default: label, rate, model and time.")
@_report("--label", help="Name of the run on figures and in file names. Default: the backend.")
@_report("--metadata", many=True, metavar="KEY=VALUE...", help="Stored with the result.")
@_report("--plot", "plot_path", type=_FILE, help="Draw the timeline to this image (png, svg, pdf).")
@_report("--load-result", "load_results", many=True, type=_FILE, metavar="JSONL...",
         help="Do not run: report saved runs, and with --plot draw them (several: compared).")
@click.pass_context
def bench_command(ctx: click.Context, /, **flags: Any) -> None:
    """Send a workload to an OpenAI server and measure what its users would see.

    Open loop: each request leaves when the workload says, however busy the server is. Latencies
    are taken at the client. Flags, JSON keys and report are those of `vllm bench serve`; any
    server with /v1/completions or /v1/chat/completions will do.
    """
    from kunserve_lab.bench.run import run_command

    ctx.exit(run_command(BenchConfig(**flags)))
