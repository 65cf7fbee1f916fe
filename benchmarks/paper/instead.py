"""What else an operator could do about bursts: the table of docs/vllm-fleets.md."""

import statistics

from benchmarks.markdown import Row
from benchmarks.paper.kept_results import ranged, runs_of

WEIGHTS = {"light": "longbench_14b", "heavy": "heavy_14b"}
"""Endings of experiments: weights take 36 and 63 % of the memory."""
CLAIMS, INSTEAD = "claims_{}", "instead_{}"
WAYS = (
    ("nothing: `recompute`", CLAIMS, "recompute", "-"),
    ("`--gpu-memory-utilization` 0.95 instead of 0.9", INSTEAD, "more-memory", "room for peaks"),
    ("KV offload: `swap`", INSTEAD, "swap", "copies"),
    ("KV in fp8", INSTEAD, "fp8-kv", "answers change, at all times"),
    ("waking sleepers in 3 s", INSTEAD, "sleepers", "as many idle GPUs again"),
    ("tensor parallelism in pairs", CLAIMS, "tp-pairs", "fast links, at all times"),
    ("pods that come after 100 s", f"{INSTEAD}_pods", "autoscale", "GPUs that nobody else has"),
    ("`drop`", CLAIMS, "drop", ""),
)
"""In words, where its runs are, the system, and what it costs."""
INSTEAD_EXPERIMENTS = sorted(
    {name.format(ending) for _, name, _, _ in WAYS for ending in WEIGHTS.values()}
)


def instead() -> list[Row]:
    """P99 TTFT of each way, medians of the draws at the load of the claims."""
    rows: list[Row] = [
        ("P99 TTFT (s)", "weights take 36 %", "weights take 63 %", "what it costs"),
    ]
    for title, experiment, system, cost in WAYS:
        cells = []
        for ending in WEIGHTS.values():
            runs = runs_of(experiment.format(ending))
            draws = runs.draws(system, runs.fixed).values()
            cells.append(ranged((run.ttft_p99_s for run in draws), ""))
        rows.append((title, *cells, cost or _time_per_token()))
    return rows


def _time_per_token() -> str:
    """Of drops: P50 TPOT over that of `recompute` in the same draw, in either memory."""
    more = []
    for ending in WEIGHTS.values():
        gains = runs_of(CLAIMS.format(ending)).gains("recompute", "tpot_p50_s")
        more.append(f"{statistics.median(100 / gain - 100 for gain in gains):+.0f} %")
    return f"P50 TPOT {' and '.join(more)}"
