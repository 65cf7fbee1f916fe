"""vLLM's server, our server with vLLM's model classes, and our own engine: the same prompts.

    python -m benchmarks.serving.vllm_body --peers DIR [--threads 2] [--rounds 3] [--dtype bfloat16]
    python -m benchmarks.serving.vllm_body --peers DIR --serve ADDRESSES.json
    python -m benchmarks.serving.vllm_body --at ADDRESSES.json [--cases prefill ...] [--rounds 1]

DIR is as for ``benchmarks.serving.peers``; DIR/vllm must have what KunServe depends on, too. All
run at once and take turns within every round. Medians over rounds and their ranges; whatever our
server with vLLM's classes loses to one of the others is named. vLLM's start takes minutes beside
other work, so ``--serve`` starts and warms all, writes where they are, and stays; ``--at``
measures those.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Report, Setting
from benchmarks.serving.peer_servers import ROOT, Server, ours, running, say, vllm
from benchmarks.serving.peers import CASES, Case, one
from kunserve.engine.cpu.kernels.levels import processor_name
from kunserve_lab.bench.server_process import free_ports
from kunserve_lab.bench.session import find_model

OURS_BY_VLLM, OURS, VLLM = "kunserve --engine vllm", "kunserve", "vllm serve"
UP_S = 900.0
"""vLLM compiles as it starts, on as few cores as all others that work."""
SHORT = dict(zip(("prefill", "decode-1", "decode-8", "decode-32"), CASES, strict=True))


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


@contextlib.contextmanager
def all_up(servers: Sequence[Server]) -> Iterator[None]:
    """Within, all of them answer."""
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(running(server, Path(logs)))
        began = time.monotonic()
        for server in servers:
            say(f"waiting for {server.name} ...")
            try:
                asyncio.run(find_model([server.url], None, None, UP_S))
            except Exception:
                say((Path(logs) / f"{server.name}.log").read_text(errors="replace")[-3000:])
                raise
            say(f"{server.name} is up after {time.monotonic() - began:.0f} s")
        yield


def main() -> None:
    """Start all, measure in turns, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-round", type=int, default=1, help="its prompts; 0 warms up")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--cases", nargs="*", choices=SHORT, default=list(SHORT))
    parser.add_argument("--without-vllm-serve", action="store_true")
    parser.add_argument("--serve", type=Path, help="only start all, write where, and stay")
    parser.add_argument("--at", type=Path, help="what --serve wrote")
    options = parser.parse_args()
    cases = [SHORT[name] for name in options.cases]
    rounds = range(options.first_round, options.first_round + options.rounds)
    settings: dict[str, Setting] = {"dtype": options.dtype, "threads": options.threads}
    if options.at is not None:
        kept = json.loads(options.at.read_text())
        servers = [Server(name, [], {}, url) for name, url in kept["urls"].items()]
        settings = kept["settings"]
        measure(servers, cases, rounds, settings)
        return
    if options.peers is None:
        parser.error("--peers DIR, or --at ADDRESSES.json")
    servers = servers_of(options.peers, options.threads, options.dtype)
    servers = servers[int(options.without_vllm_serve) :]
    with all_up(servers):
        take_turns(servers, cases, [0])
        if options.serve is None:
            measure(servers, cases, rounds, settings)
            return
        urls = {server.name: server.url for server in servers}
        options.serve.write_text(json.dumps({"urls": urls, "settings": settings}))
        say(f"all are up and warm: {options.serve}; Ctrl-C ends them")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(1.0)


Rates = dict[tuple[str, str], list[float]]
"""Of a case and a server, by round."""


def take_turns(servers: Sequence[Server], cases: Sequence[Case], rounds: Sequence[int]) -> Rates:
    """Every server computes each case once a round."""
    rates: Rates = {}
    for round_number in rounds:
        for case in cases:
            for server in servers:
                rate = asyncio.run(one(server, case, round_number))
                rates.setdefault((case.name, server.name), []).append(rate)
                say(f"round {round_number}, {case.name}, {server.name}: {rate:.1f} tokens/s")
    return rates


def measure(
    servers: Sequence[Server],
    cases: Sequence[Case],
    rounds: Sequence[int],
    settings: dict[str, Setting],
) -> None:
    """All of it, reported."""
    rates = take_turns(servers, cases, rounds)
    of = {"model": "SmolLM2-135M", "processor": processor_name(), **settings}
    with Report("vllm_body", **of, rounds=len(rounds), first_round=rounds[0]) as report:
        show(report, [server.name for server in servers], cases, rates)


def show(report: Report, names: list[str], cases: Sequence[Case], rates: Rates) -> None:
    """Medians, ranges, and by how much our server with vLLM's classes is behind, where it is."""
    for case in cases:
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
