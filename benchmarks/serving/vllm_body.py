"""vLLM's server, our server with vLLM's model classes, and our own engine: the same prompts.

    python -m benchmarks.serving.vllm_body --peers DIR [--threads 2] [--rounds 3] [--dtype bfloat16]

DIR is as for ``benchmarks.serving.peers``; DIR/vllm must have what KunServe depends on, too. All
run at once and take turns within every round. Medians over rounds and their ranges; whatever our
server with vLLM's classes loses to one of the others is named.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Report
from benchmarks.serving.peer_servers import ROOT, Server, ours, vllm
from benchmarks.serving.peers import CASES, Rates, in_turns
from kunserve.engine.cpu.kernels.levels import processor_name
from kunserve_lab.bench.server_process import free_ports

OURS_BY_VLLM, OURS, VLLM = "kunserve --engine vllm", "kunserve", "vllm serve"


def body(root: Path, threads: int, dtype: str) -> Server:
    """Start this checkout's server by the Python that has vLLM."""
    (port,) = free_ports(1)
    command = [str(root / "vllm/bin/python"), "-m", "kunserve.cli", "serve"]
    command += [str(root / "smollm2-135m-hf"), "--engine", "vllm", "--num-instances", "1"]
    command += ["--num-threads", str(threads), "--port", str(port), "--dtype", dtype]
    command += ["--instance-memory", "2GiB", "--no-enable-prefix-caching"]
    command += ["--served-model-name", "m"]
    return Server(OURS_BY_VLLM, command, {"PYTHONPATH": str(ROOT)}, f"http://127.0.0.1:{port}")


def servers_of(root: Path, threads: int, dtype: str) -> list[Server]:
    """All three, in one type."""
    own, theirs = ours(threads, name=OURS), vllm(root, threads)
    at = theirs.command.index("--dtype") + 1
    theirs_command = [*theirs.command[:at], dtype, *theirs.command[at + 1 :]]
    return [
        replace(theirs, name=VLLM, command=theirs_command),
        body(root, threads, dtype),
        replace(own, command=[*own.command, "--dtype", dtype]),
    ]


def main() -> None:
    """Start all, measure in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--without-vllm-serve", action="store_true")
    options = parser.parse_args()
    servers = servers_of(options.peers, options.threads, options.dtype)
    servers = servers[int(options.without_vllm_serve) :]
    rates = in_turns(servers, options.rounds)
    with Report(
        "vllm_body",
        model="SmolLM2-135M",
        processor=processor_name(),
        dtype=options.dtype,
        threads=options.threads,
        rounds=len(next(iter(rates.values()))),
    ) as report:
        show(report, [server.name for server in servers], rates)


def show(report: Report, names: list[str], rates: Rates) -> None:
    """Medians, ranges, and by how much our server with vLLM's classes is behind, where it is."""
    for case in CASES:
        medians = {}
        for name in names:
            values = rates[case.name, name]
            medians[name] = statistics.median(values)
            report.add(name, medians[name], "tokens/s", case=case.name)
            report.add(f"{name}, least", min(values), "tokens/s", case=case.name)
            report.add(f"{name}, most", max(values), "tokens/s", case=case.name)
        for name in [other for other in names if other != OURS_BY_VLLM]:
            ratio = medians[OURS_BY_VLLM] / medians[name]
            lost = "  LOST" if ratio < 1.0 else ""
            report.add(f"{OURS_BY_VLLM} / {name}{lost}", ratio, "x", case=case.name)


if __name__ == "__main__":
    main()
