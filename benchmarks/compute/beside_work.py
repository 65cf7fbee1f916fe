"""Decoding alone, beside two busy loops of low priority, and in the first seconds after "ready".

    python -m benchmarks.compute.beside_work [--other CHECKOUT] [--peers DIR] [--rounds 3]

Each server is started anew, this checkout's, the other one's and vLLM's (``DIR/vllm``, as
``benchmarks.serving.peers`` has it) in turns, so that what else the machine does hits them alike.
Figures are medians over rounds; "of alone" is what work beside leaves, and "this / other" what a
change does, quiet or not. Two instances, a pair and four instances have a thread each.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.report import Report, Setting
from benchmarks.serving.peer_servers import Server, say, vllm
from kunserve_lab.bench.server_process import ServerProcess, free_ports, unwinding_on_sigterm

LAYOUTS = {
    "one instance": ["--num-instances", "1", "--num-threads", "2"],
    "two instances": ["--num-instances", "2"],
    "a pair": ["--num-instances", "2", "--pipeline-parallel-size", "2"],
    "four instances": ["--num-instances", "4"],
}
STATES = ("after ready", "alone", "beside loops")
FILLED, FILLED_S = "memory in pages of 2 MiB", 30.0
"""What the log says when memory is filled; after so long it is not waited for."""
LOOP = "while True: pass"
WARM_UP_TOKENS = 4
ASKED = {"prompt": "The quick brown fox", "temperature": 0, "ignore_eos": True}


def ours(name: str, checkout: Path, flags: Sequence[str], memory: str) -> Server:
    """A checkout's server."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "kunserve.cli", "serve", "smollm2-135m", *flags]
    command += ["--port", str(port), "--instance-memory", memory, "--overload-policy", "recompute"]
    url = f"http://127.0.0.1:{port}"
    return Server(name, command, {"PYTHONPATH": str(checkout)}, url)


@contextlib.contextmanager
def busy_loops(number: int) -> Generator[None, None, None]:
    """Processes of the lowest ordinary priority, which Linux may also give to their session."""
    lower = "import os; os.setsid(); os.nice(19)\n"
    lower += "try: open('/proc/self/autogroup', 'w').write('19')\nexcept OSError: pass\n"
    command = [sys.executable, "-c", lower + LOOP]
    loops = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def model_of(url: str) -> str:
    """What the server calls its model."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def tokens_per_s(url: str, streams: int, tokens: int) -> float:
    """Of so many requests at once."""
    body = {**ASKED, "model": model_of(url), "max_tokens": tokens}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )

    def ask(_: int) -> int:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])

    begin = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        made = sum(pool.map(ask, range(streams)))
    return made / (time.monotonic() - begin)


def measured(server: Server, args: argparse.Namespace) -> Iterator[tuple[str, int, float]]:
    """State, streams, and tokens per second of one start."""
    port = int(server.url.rpartition(":")[2])
    with tempfile.TemporaryDirectory() as folder, unwinding_on_sigterm():
        process = ServerProcess(
            server.command, port, Path(folder) / "log", environment=server.environment
        )
        try:
            process.wait_ready()
            ready_s = time.monotonic()
            for state in STATES:
                while (
                    state == "alone"
                    and time.monotonic() < ready_s + FILLED_S
                    and FILLED not in process.log_path.read_text(errors="replace")
                ):
                    time.sleep(0.5)
                number = args.loops if state == "beside loops" else 0
                with busy_loops(number):
                    tokens_per_s(server.url, 1, WARM_UP_TOKENS)
                    for streams in args.streams:
                        yield state, streams, tokens_per_s(server.url, streams, args.tokens)
        finally:
            process.stop()


def main() -> None:
    """Every layout, server and round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--other", type=Path, help="a checkout with its kernels compiled")
    parser.add_argument("--peers", type=Path, help="the folder of `benchmarks.serving.peers`")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loops", type=int, default=2)
    parser.add_argument("--memory", default="2GiB", help="of each instance")
    args = parser.parse_args()
    found: dict[tuple[str, str, str, int], list[float]] = {}
    for turn in range(args.rounds):
        for layout in args.layouts:
            flags = LAYOUTS[layout]
            servers = [ours("this", Path.cwd(), flags, args.memory)]
            if args.other is not None:
                servers.append(ours("other", args.other.resolve(), flags, args.memory))
            if args.peers is not None and layout == "one instance":
                servers.append(vllm(args.peers, len(os.sched_getaffinity(0))))
            for server in servers if turn % 2 == 0 else reversed(servers):
                for state, streams, speed in measured(server, args):
                    say(f"{layout}, {server.name}, {state}, {streams}: {speed:.1f} tok/s")
                    found.setdefault((layout, server.name, state, streams), []).append(speed)
    medians = {key: statistics.median(speeds) for key, speeds in found.items()}
    with Report("beside_work", loops=args.loops, rounds=args.rounds) as report:
        for (layout, name, state, streams), speed in medians.items():
            case: dict[str, Setting] = {"layout": layout, "state": state, "streams": streams}
            report.add("speed", speed, "tokens/s", server=name, **case)
            alone = medians[layout, name, "alone", streams]
            report.add("of alone", speed / alone, "x", server=name, **case)
            other = medians.get((layout, "other", state, streams))
            if name == "this" and other is not None:
                report.add("this / other", speed / other, "x", server=name, **case)


if __name__ == "__main__":
    main()
