"""`recompute` against `drop` on a real model, over several loads of one bursty trace.

    python benchmarks/overload_curve.py --trace azure_merged_640s_off225.csv.gz
    python benchmarks/overload_curve.py --systems drop drop-no-lookahead --loads 0.095

Each point starts every server afresh, one after the other, and replays the same requests: the
arrivals of the trace's window thinned to a load, BurstGPT-like lengths, client-side clocks. The
output is one table per load, a curve over the loads as a figure, and every run as JSON lines.
Without ``--trace`` the built-in bursty arrivals stand in.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from kunserve.bench.versus import Result, System, run_systems, table, violations
from matplotlib.figure import Figure

from kunserve.bench.plot import plot_comparison
from kunserve.bench.runfile import write_run
from kunserve.bench.timeline import whole_bubbles
from kunserve.workload.bursty import bursty_workload
from kunserve.workload.lengths import burstgpt_lengths, scale_lengths
from kunserve.workload.traces import read_azure
from kunserve.workload.transform import thin, window, with_lengths
from kunserve.workload.workload import Workload

LOADS = (0.045, 0.06, 0.075, 0.095, 0.125)
"""Shares of the trace's requests that are kept."""
SYSTEMS: dict[str, tuple[tuple[str, ...], str]] = {
    "recompute": (("--overload-policy", "recompute"), "#c53030"),
    "drop": (("--overload-policy", "drop"), "#2b6cb0"),
    "drop-no-lookahead": (("--overload-policy", "drop", "--no-lookahead"), "#dd8a1b"),
}
"""Each one's flags, and its colour."""


def workload_of(options: argparse.Namespace, share: float) -> Workload:
    """The window at a load: the same seed gives the same arrivals and lengths."""
    if options.trace is None:
        mean_rate = 8.0 * share
        duration_s = options.end - options.start
        base = bursty_workload(duration_s, mean_rate, options.seed)
    else:
        trace = window(read_azure(options.trace), options.start, options.end)
        base = thin(trace, share, options.seed)
    lengths = scale_lengths(burstgpt_lengths(len(base), options.seed), options.length_scale)
    return with_lengths(base, lengths)


def systems_of(options: argparse.Namespace, share: float) -> list[System]:
    """Several systems with the same model, memory, block size and batch limits."""
    common = (
        "smollm2-135m",
        "--num-instances",
        str(options.instances),
        "--instance-memory",
        options.instance_memory,
        "--max-num-batched-tokens",
        str(options.max_num_batched_tokens),
    )
    systems = []
    for name in options.systems:
        trace = options.out / f"{name}-{share:g}.trace.json"
        kept = ("--trace-out", str(trace)) if options.traces else ()
        systems.append(System(name, (*common, *SYSTEMS[name][0], *kept)))
    return systems


def main() -> None:
    """Run every load, print each table, draw the curve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="CSV with arrival_s (Azure's form)")
    parser.add_argument("--start", type=float, default=20.0, help="window in the trace, seconds")
    parser.add_argument("--end", type=float, default=220.0)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=["recompute", "drop"],
        metavar="SYSTEM",
        help=f"of {', '.join(SYSTEMS)}; ratios are of the first to each other",
    )
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--instance-memory", default="367MiB", help="367MiB: weights take 70 %%")
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--length-scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", action="store_true", help="keep every server's step trace")
    parser.add_argument("--out", type=Path, default=Path("overload"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    points: list[tuple[float, list[Result]]] = []
    for share in options.loads:
        workload = workload_of(options, share)
        rate = len(workload) / workload.duration_s
        print(f"\n== load {share:g}: {len(workload)} requests, mean {rate:.2f} req/s", flush=True)
        print(f"   {workload.provenance}", flush=True)
        results = run_systems(systems_of(options, share), workload, seed=options.seed)
        print(table(results), flush=True)
        for result in results:
            for line in result.transitions:
                print(f"   {line}", flush=True)
            write_run(options.out / f"{result.run.label}-{share:g}.jsonl", result.run)
        plot_comparison([r.run for r in results], options.out / f"timeline-{share:g}.png")
        points.append((rate, results))
        save(options, points)
    print(f"\nCurve, timelines and runs: {options.out}")


def save(options: argparse.Namespace, points: list[tuple[float, list[Result]]]) -> None:
    """The summary as JSON and as a figure; rewritten after each load, so nothing is lost."""
    summary: list[dict[str, Any]] = [
        {
            "rate": rate,
            "system": result.run.label,
            "ttft_p50_s": result.metrics.ttft.median_s,
            "ttft_p99_s": result.metrics.ttft.percentile_s(99.0),
            "tpot_p50_s": result.metrics.tpot.median_s,
            "tpot_p99_s": result.metrics.tpot.percentile_s(99.0),
            "bubbles": whole_bubbles(result.run.samples),
            "output_tokens_per_s": result.metrics.output_throughput,
            "slo_violations": violation.either,
            "slo_violations_ttft": violation.ttft,
            "preemptions": result.num_preemptions,
            "drops": result.num_drops,
            "restores": result.num_restores,
            "failed": result.metrics.num_failed,
        }
        for rate, results in sorted(points, key=lambda point: point[0])
        for result, violation in zip(results, violations(results), strict=True)
    ]
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(summary, options)


def draw(summary: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The curve over the loads."""
    panels = (
        ("ttft_p99_s", "P99 TTFT (s)", True),
        ("tpot_p50_s", "P50 TPOT (s)", False),
        ("output_tokens_per_s", "output tokens/s", False),
        ("slo_violations_ttft", "requests over 5x P50 TTFT", False),
    )
    figure = Figure(figsize=(11, 3), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, (key, title, is_log) in zip(axes, panels, strict=True):
        for system in options.systems:
            color = SYSTEMS[system][1]
            rows = [row for row in summary if row["system"] == system]
            axis.plot(
                [r["rate"] for r in rows], [r[key] for r in rows], "o-", color=color, label=system
            )
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("mean requests/s", fontsize=8)
        if is_log:
            axis.set_yscale("log")
        axis.grid(color="#e4e4e4", linewidth=0.6)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"SmolLM2-135M, {options.instances} instances of {options.instance_memory}", fontsize=9
    )
    figure.savefig(options.out / "curve.png", dpi=130)


if __name__ == "__main__":
    main()
