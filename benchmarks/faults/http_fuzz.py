"""What breaks under hostile requests by the thousand, slow and half-closed clients beside them.

A server of its own (fake bodies, or a model with ``--model``) is asked by well-behaved clients
beside and after. Run: ``python -m benchmarks.faults.http_fuzz --requests 10000``. Prints one
line of JSON with the counts; exit status 1 when something broke or leaked.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.faults.hostile_requests import Hostile, hostile_requests
from benchmarks.serving.front_overhead import ByteTokenizer
from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import FakeSettings
from kunserve.core.config import ClusterConfig, KunServeConfig, ModelConfig, ServerConfig
from kunserve.core.plan import Plan
from kunserve.server.start.app import create_app
from kunserve.server.start.serve import serve
from kunserve_lab.bench.server_process import unwinding_on_sigterm
from kunserve_lab.world.fake_main import MODULE as FAKE_MODULE

HOST = "127.0.0.1"
FAKE = FakeSettings(FAKE_MODULE, vocab_size=256, step_s=0.001)
MAX_MODEL_LEN = 512
"""Short, because a chat that names no length is answered up to it."""
PATIENCE_S = 120.0
"""How long an answer to a sound request may take on a busy machine."""
IMPATIENCE_S = 0.2
"""How long a client waits that sent no sound request."""
ENOUGH_BYTES = 1 << 18
"""Of an answer; then the client leaves, in the middle of it."""
NUM_SHOWN = 10
NUM_WINDOWS = 7
NUM_TOKENS = 64
STREAM = {"prompt": "hello", "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}


@dataclass
class Findings:
    """What came back."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def fault(self, kind: str, request: Hostile, answer: bytes) -> None:
        """Count a fault, and show the first few."""
        self.faults[kind] += 1
        if self.faults.total() <= NUM_SHOWN:
            sent = b"".join(request.pieces)[:600]
            print(f"{kind}: {request.name}\n  {sent!r}\n  {answer[:600]!r}", file=sys.stderr)


def judge(request: Hostile, answer: bytes, findings: Findings) -> None:
    """Count one answer, and what is wrong with it."""
    head, _, content = answer.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head, _, content = content.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        findings.statuses["none"] += 1
        if request.is_sound and not (request.half_close or request.reset):
            findings.fault("unanswered", request, answer)
        return
    status = int(head[9:12])
    findings.statuses[str(status)] += 1
    if status >= 500 and status != 503:
        findings.fault("server error", request, answer)
    if b"Traceback" in content or b'File "/' in content:
        findings.fault("traceback", request, answer)
    if b'"code":500' in content:
        findings.fault("server error in a stream", request, answer)
    if status >= 400 and not head.startswith(b"HTTP/1.1 405") and b"HEAD" not in request.pieces[0]:
        with contextlib.suppress(IndexError):
            if b'"error":{' not in content and b'"error": {' not in content:
                findings.fault("no error object", request, answer)


async def send(port: int, request: Hostile, findings: Findings) -> None:
    """One hostile connection."""
    reader, writer = await asyncio.open_connection(HOST, port)
    answer = b""
    try:
        for piece in request.pieces:
            if not writer.transport.is_closing():
                writer.write(piece)
                await asyncio.sleep(0)
        if request.reset:
            writer.transport.abort()
            findings.statuses["left"] += 1
            return
        if request.half_close and not writer.transport.is_closing():
            writer.write_eof()
        async with asyncio.timeout(PATIENCE_S if request.is_sound else IMPATIENCE_S):
            while len(answer) < ENOUGH_BYTES and (part := await reader.read(65536)):
                answer += part
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    judge(request, answer, findings)


async def fuzz(port: int, seed: int, count: int, num_workers: int, max_s: float) -> Findings:
    """Send ``count`` requests, a few at a time; stop after ``max_s`` in any case."""
    findings = Findings()
    requests = hostile_requests(seed, count)

    async def work() -> None:
        for request in requests:
            await send(port, request, findings)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max_s), asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(work())
    return findings


def as_post(body: dict[str, Any]) -> bytes:
    """A sound request."""
    content = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)
    )


async def linger(port: int, number: int) -> None:
    """A client that is slow in its own way, over and over, until it is cancelled."""
    message = as_post(STREAM | {"max_tokens": 500})
    while True:
        with contextlib.suppress(ConnectionError):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                match number % 5:
                    case 0:  # headers, then a body, byte by byte
                        for at in range(len(message)):
                            if writer.transport.is_closing():
                                break
                            writer.write(message[at : at + 1])
                            await asyncio.sleep(0.05)
                    case 1:  # reads slowly
                        writer.write(message)
                        for _ in range(200):
                            await reader.read(64)
                            await asyncio.sleep(0.05)
                    case 2:  # half-closed in the middle of a request
                        writer.write(message[:-5])
                        writer.write_eof()
                        await reader.read()
                    case 3:  # says nothing
                        await reader.read()
                    case _:  # asks for a stream and vanishes
                        writer.write(message)
                        await reader.read(100)
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.01)


async def compare(port: int, fresh_port: int, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second here and at a server that was never attacked.

    Asked in turns, because other work on the machine disturbs both alike; so a window before the
    attack says less than one beside it.
    """
    pairs = []
    await throughput(fresh_port, options.clients, 1.0)
    for _ in range(NUM_WINDOWS):
        fresh = await throughput(fresh_port, options.clients, options.window_s)
        pairs.append((fresh, await throughput(port, options.clients, options.window_s)))
    return {
        "never_attacked": round(statistics.median(fresh for fresh, _ in pairs)),
        "after": round(statistics.median(after for _, after in pairs)),
        "ratio": round(statistics.median(after / fresh for fresh, after in pairs), 3),
    }


async def throughput(port: int, num_clients: int, seconds: float) -> float:
    """Tokens per second of well-behaved clients that ask one request after another."""
    num_tokens = 0
    end_s = time.monotonic() + seconds

    async def ask() -> None:
        nonlocal num_tokens
        while time.monotonic() < end_s:
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(as_post(STREAM))
            answer = await reader.read(-1)
            writer.close()
            if answer.endswith(b"0\r\n\r\n"):
                num_tokens += NUM_TOKENS

    started_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(ask())
    return num_tokens / (time.monotonic() - started_s)


async def get_json(port: int, path: str) -> Any:
    """The JSON object of a GET."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read(-1)
    writer.close()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


async def idle_blocks(port: int, pid: int, num_files: int) -> int:
    """Blocks in use once nothing runs and no connection is open; at most a minute from now."""
    deadline_s = time.monotonic() + 60.0
    while True:
        state = await get_json(port, "/kunserve/state")
        ready = await get_json(port, "/health/ready")
        used = sum(
            (group["load"] or {"used_blocks": 1})["used_blocks"] for group in state["groups"]
        )
        is_idle = not used and not ready["unfinished"] and open_files(pid) <= num_files
        if is_idle or time.monotonic() > deadline_s:
            return int(used) + int(ready["unfinished"])
        await asyncio.sleep(0.1)


def open_files(pid: int) -> int:
    """Descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_mib(pid: int) -> float:
    """Memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def attack(port: int, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """The requests; the first tenth of them warms up what stays in memory."""
    warm = options.requests // 10
    limit_s, num_workers = options.max_seconds, options.workers
    await throughput(port, options.clients, 1.0)
    await asyncio.sleep(1.0)
    files = open_files(pid)
    findings = await fuzz(port, options.seed + 1, warm, num_workers, limit_s)
    await idle_blocks(port, pid, files)
    memory_mib = resident_mib(pid)
    slow = [asyncio.create_task(linger(port, number)) for number in range(options.slow)]
    started_s = time.monotonic()
    beside = asyncio.create_task(throughput(port, options.clients, 10.0))
    more = await fuzz(port, options.seed, options.requests - warm, num_workers, limit_s)
    seconds = time.monotonic() - started_s
    beside_tokens_s = await beside
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    held = await idle_blocks(port, pid, files)
    statuses, faults = findings.statuses + more.statuses, findings.faults + more.faults
    return {
        "benchmark": "http_fuzz",
        "model": options.model or "fake",
        "requests": statuses.total(),
        "statuses": dict(sorted(statuses.items())),
        "faults": dict(faults),
        "seconds": round(seconds, 1),
        "blocks_and_requests_held": held,
        "files": [files, open_files(pid)],
        "memory_mib": [round(memory_mib, 1), round(resident_mib(pid), 1)],
        "tokens_per_s": {"beside": round(beside_tokens_s)},
    }


def is_well(line: dict[str, Any], max_growth_mib: float) -> bool:
    """Whether nothing broke, nothing leaked, and nothing became slow."""
    files, memory = line["files"], line["memory_mib"]
    return (
        not line["faults"]
        and not line["blocks_and_requests_held"]
        and files[1] <= files[0]
        and memory[1] - memory[0] <= max_growth_mib
        and line["tokens_per_s"]["ratio"] >= 0.9
    )


async def serve_fake(port: int) -> None:
    """A real front and real processes around bodies without a model."""
    server = ServerConfig(port=port, enable_admin=True, shutdown_timeout_s=1.0)
    config = KunServeConfig(
        model=ModelConfig(max_model_len=MAX_MODEL_LEN),
        cluster=ClusterConfig(num_instances=2),
        server=server,
    )
    cluster = await LocalCluster.start(Plan(config), vocab_size=FAKE.vocab_size, fake=FAKE)
    try:
        await serve(create_app(cluster, ByteTokenizer(), "fuzz", config), config)
    finally:
        await cluster.close()


@contextlib.contextmanager
def running_server(model: str | None) -> Generator[tuple[int, int], None, None]:
    """A ready server's port and process id. Its log is shown when it says something is wrong."""
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    module = [sys.executable, "-m"]
    if model is None:
        command = [*module, "benchmarks.faults.http_fuzz", "--serve-fake", str(port)]
    else:
        flags = ["--port", str(port), "--num-instances", "2", "--instance-memory", "400MiB"]
        flags += ["--max-model-len", str(MAX_MODEL_LEN)]
        command = [*module, "kunserve.cli", "serve", model, *flags, "--enable-admin"]
    with unwinding_on_sigterm(), tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline_s = time.monotonic() + 180.0
            while socket.socket().connect_ex((HOST, port)):
                assert process.poll() is None and time.monotonic() < deadline_s, "no server"
                time.sleep(0.05)
            yield port, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60.0)
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            wrong = [line for line in lines if "ERROR" in line or "Traceback" in line]
            print(*wrong[:NUM_SHOWN], sep="\n", file=sys.stderr)


def main() -> None:
    """Read the flags, run, print one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--max-seconds", type=float, default=900.0, help="For the requests.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=16, help="Hostile connections at once.")
    parser.add_argument("--slow", type=int, default=20, help="Slow clients beside them.")
    parser.add_argument("--clients", type=int, default=4, help="Well-behaved clients.")
    parser.add_argument("--window-s", type=float, default=2.0, help="Of a throughput.")
    parser.add_argument("--max-growth-mib", type=float, default=32.0)
    parser.add_argument("--model", help="Serve this model instead of fake bodies.")
    parser.add_argument("--serve-fake", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_fake is not None:
        uvloop.run(serve_fake(options.serve_fake))
        return
    with running_server(options.model) as (port, pid):
        line = uvloop.run(attack(port, pid, options))
        with running_server(options.model) as (fresh_port, _):
            line["tokens_per_s"] |= uvloop.run(compare(port, fresh_port, options))
    print(json.dumps(line), flush=True)
    sys.exit(not is_well(line, options.max_growth_mib))


if __name__ == "__main__":
    main()
