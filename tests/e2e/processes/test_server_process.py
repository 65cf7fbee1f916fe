"""Server processes from outside: they end with who started them, and survive their front."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kunserve.cluster.processes.process_mark import mark_of
from tests.conftest import wait_until
from tests.tiny_models import save_tiny, save_tokenizer

SIZES = ["--load-format", "dummy", "--instance-memory", "16MiB"]
_HOLD = """
import sys, time
from kunserve_lab.bench.server_process import running_server
with running_server(sys.argv[1:]) as server:
    print(server.url, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny one with a tokenizer: to start and to end is the same for all."""
    folder = save_tiny(tmp_path_factory.mktemp("served"), "llama")
    save_tokenizer(folder)
    return str(folder)


def test_a_comparison_that_is_terminated_stops_its_server(model: str) -> None:
    command = [sys.executable, "-c", _HOLD, model, *SIZES, "--num-instances", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        host, port = holder.stdout.readline().strip().removeprefix("http://").split(":")
        socket.create_connection((host, int(port)), timeout=5.0).close()
        holder.terminate()
        assert holder.wait(60.0) == 143
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5.0)


def _serve(model: str, port: int, log: Path) -> subprocess.Popen[bytes]:
    flags = [*SIZES, "--port", str(port)]
    flags += ["--front-grace", "200"]  # a busy machine takes longer to start one than 30 s
    command = [sys.executable, "-m", "kunserve.cli", "serve", model, *flags]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def _text(url: str) -> str:
    body = {"prompt": "The sea", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.mark.timeout(300)
def test_the_same_command_takes_the_instances_of_a_killed_server_over(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weights are loaded: the processes are the same, and so is what they say."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    state = tmp_path / f"kunserve-{os.getuid()}-127.0.0.1-{port}" / "state.json"

    def is_whole() -> bool:
        try:
            health = client.get(f"{url}/health")
        except httpx.HTTPError:
            return False
        known = health.json()
        return bool(known["status"] == "ok" and known["instances"] == 2)

    client = httpx.Client(timeout=10.0)  # each new one reads all certificates of the system
    first = _serve(model, port, log)
    second = None
    try:
        wait_until(is_whole, 100.0)
        text, marks = _text(url), json.loads(state.read_bytes())["marks"]
        first.kill()
        first.wait()
        second = _serve(model, port, log)
        wait_until(is_whole, 100.0)
        assert json.loads(state.read_bytes())["marks"] == marks
        assert _text(url) == text
        second.terminate()
        assert second.wait(60.0) == 0
        assert not state.exists()
        assert not [mark for mark in marks.values() if mark_of(int(mark.split(":")[0])) == mark]
    except BaseException:
        print(log.read_text())
        raise
    finally:
        client.close()
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()
