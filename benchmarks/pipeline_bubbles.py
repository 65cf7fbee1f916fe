"""Lookahead off and on, on a real pipeline over a real queue: bubbles, latency, throughput.

    python -m benchmarks.pipeline_bubbles --longbench lengths.csv --sharegpt lengths.csv.gz

Two instances of SmolLM2 with one thread each become a pipeline of two stages by a forced drop, and
stay one. All requests of a queue are sent at once, long prompts (LongBench-like) first, then chat
(ShareGPT-like), to a server with `--no-lookahead` and to one with lookahead. Bubbles are the
stages' own account (`docs/metrics.md`). Each stage needs a core to itself: where two share one,
waiting for it counts as busy. Without the files lengths are drawn like the published means.
"""

import argparse
import json
import urllib.request
from pathlib import Path

from kunserve.bench.versus import Result, System, run_systems, table

from benchmarks.lookahead import lengths_of
from kunserve.bench.runfile import write_run
from kunserve.bench.timeline import whole_bubbles
from kunserve.workload.lengths import clip_total
from kunserve.workload.workload import Lengths, Workload

DROP_TIMEOUT_S = 60.0


def queue_of(kind: str, path: Path | None, options: argparse.Namespace) -> Workload:
    """That many requests, all at time 0, none longer than ``--max-total-tokens``."""
    count = options.num_long if kind == "longbench" else options.num_chat
    pairs = lengths_of(kind, path, count, options.seed)
    source = f"{kind}, {'as published on average' if path is None else path.name}"
    most_output = options.max_total_tokens // 2
    inputs, outputs = zip(*((i, min(o, most_output)) for i, o in pairs), strict=True)
    lengths = clip_total(Lengths(inputs, outputs, source), options.max_total_tokens)
    return Workload((0.0,) * len(lengths), lengths, "all at once")


def systems_of(options: argparse.Namespace) -> list[System]:
    """The same servers but for formation. Nothing drops or restores by itself."""
    common: tuple[str, ...] = (
        *("smollm2-135m", "--num-instances", "2", "--num-threads", "1"),
        *("--instance-memory", options.instance_memory, "--overload-policy", "recompute"),
        *("--max-num-batched-tokens", str(options.max_num_batched_tokens), "--enable-admin"),
    )
    if options.profile is not None:
        common = (*common, "--profile", str(options.profile))
    return [
        System("lookahead", common),
        System("no-lookahead", (*common, "--no-lookahead")),
    ]


def drop(url: str) -> None:
    """Make one pipeline of the two instances."""
    request = urllib.request.Request(
        f"{url}/kunserve/drop",
        data=b"{}",
        headers={"content-type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=DROP_TIMEOUT_S) as answer:
        state = json.load(answer)["state"]
    assert len(state["groups"]) == 1, state["groups"]


def queued_bubbles(result: Result) -> float | None:
    """Bubbles until the last request was admitted: while there was a queue to look ahead over."""
    samples = result.run.samples
    queued = [index for index, sample in enumerate(samples) if sample.num_waiting]
    return whole_bubbles(samples[: queued[-1] + 1]) if queued else None


def as_line(kind: str, result: Result) -> dict[str, object]:
    """What one system did, for a machine to read."""
    metrics = result.metrics
    line: dict[str, object] = {
        "queue": kind,
        "system": result.run.label,
        "bubbles_queued": queued_bubbles(result),
        "bubbles_whole_run": whole_bubbles(result.run.samples),
        "tokens_per_s": metrics.total_token_throughput,
        "completed": metrics.num_completed,
        "failed": metrics.num_failed,
    }
    for name, stats in (("ttft", metrics.ttft), ("tpot", metrics.tpot)):
        for percentile in (50.0, 90.0, 99.0):
            line[f"{name}_p{percentile:g}_s"] = stats.percentile_s(percentile)
    return {key: round(v, 4) if isinstance(v, float) else v for key, v in line.items()}


def main() -> None:
    """Both queues, both systems; a round more of each with ``--rounds``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longbench", type=Path, help="CSV with input_tokens and output_tokens")
    parser.add_argument("--sharegpt", type=Path, help="the same; .gz too")
    parser.add_argument("--num-long", type=int, default=24, help="0 leaves the queue out")
    parser.add_argument("--num-chat", type=int, default=160, help="0 leaves the queue out")
    parser.add_argument("--max-total-tokens", type=int, default=4096, help="of one request")
    parser.add_argument("--instance-memory", default="420MiB")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--profile", type=Path, help="of `kunserve profile`; else serve's choice")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("pipeline-bubbles"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    queues = [
        (kind, queue_of(kind, path, options))
        for kind, path, count in (
            ("longbench", options.longbench, options.num_long),
            ("sharegpt", options.sharegpt, options.num_chat),
        )
        if count
    ]
    lines = []
    for number in range(options.rounds):
        for kind, queue in queues:
            tokens = sum(queue.input_tokens), sum(queue.output_tokens)
            print(f"\n== round {number}, {kind}: {len(queue)} requests, {tokens[0]} tokens in, "
                  f"{tokens[1]} out ({queue.provenance})", flush=True)  # fmt: skip
            results = run_systems(systems_of(options), queue, seed=options.seed, prepare=drop)
            print(table(results), flush=True)
            for result in results:
                lines.append(as_line(kind, result) | {"round": number})
                print(json.dumps(lines[-1]), flush=True)
                write_run(options.out / f"{kind}-{result.run.label}-{number}.jsonl", result.run)
            on, off = (result.metrics.total_token_throughput for result in results)
            print(f"tokens/s with lookahead over without: {on / off:.3f}", flush=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (options.out / "summary.jsonl").write_text(text)


if __name__ == "__main__":
    main()
