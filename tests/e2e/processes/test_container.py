"""An installed wheel as deploy/Dockerfile runs it: what a container rests on, without one.

The server runs from an installed wheel with nothing else of this tree: without a compiler, without
a home, with a read-only root, as a nameless user, under a cgroup's memory limit.
"""

import json
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kunserve.core.config import MIB
from kunserve_lab.bench.server_process import free_ports

ROOT = Path(__file__).parents[3]
CONTAINED = Path(__file__).with_name("contained.sh")
UID = 10001
PATIENCE_S = 180.0


def _can_contain() -> bool:
    probe = ["unshare", "-m", "--propagation", "private", "mount", "-o", "remount,bind,ro", "/"]
    tools = all(shutil.which(name) for name in ("unshare", "setpriv"))
    return tools and os.getuid() == 0 and subprocess.run(probe, capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _can_contain(), reason="only root may make file systems read-only"),
]


@pytest.fixture(scope="module")
def installed() -> Generator[Path, None, None]:
    """The Python of an environment that has the wheel, where any user may read it."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="kunserve-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        build = ["build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
        subprocess.run([sys.executable, "-m", *build], check=True, capture_output=True)
        venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        (packages,) = (venv / "lib").glob("python*/site-packages")
        (wheel,) = folder.glob("*.whl")
        shutil.unpack_archive(wheel, packages, "zip")
        # Everything else from the environment of the tests, whose own .pth files are not read.
        (packages / "others.pth").write_text("\n".join(_package_folders()))
        yield venv / "bin" / "python"


def _package_folders() -> list[str]:
    folders = [path for path in sys.path if path.endswith("site-packages")]
    return folders or site.getsitepackages()


@contextmanager
def memory_limit(limit_bytes: int) -> Generator[Path, None, None]:
    """A cgroup with this limit; skips where none can be made."""
    first = Path("/sys/fs/cgroup/memory")
    top, name = (first, "limit_in_bytes") if first.is_dir() else (Path("/sys/fs/cgroup"), "max")
    group = top / f"kunserve-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / f"memory.{name}").write_text(str(limit_bytes))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no cgroup with a memory limit can be made: {error}")
    try:
        yield group
    finally:
        group.rmdir()


@contextmanager
def contained(
    python: Path, *args: str, group: Path | None = None
) -> Generator[subprocess.Popen[str], None, None]:
    """``kunserve serve`` with these flags, as in a container."""
    writable = python.parent.parent.parent / "tmp"
    writable.mkdir(exist_ok=True)
    join = [] if group is None else [f"echo $$ > {group}/cgroup.procs;"]
    script = " ".join([*join, 'exec unshare -m --propagation private sh "$@"'])
    command = [str(CONTAINED), str(writable), sys.base_prefix, str(UID)]
    serve = [str(python), "-m", "kunserve.cli", "serve", "smollm2-135m", *args]
    process = subprocess.Popen(
        ["sh", "-c", script, "sh", *command, *serve],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ask(port: int, path: str, body: object = None) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        answer: dict[str, object] = json.load(response)
        return answer


def is_ready(process: subprocess.Popen[str], port: int) -> bool:
    if process.poll() is not None:
        assert process.stdout is not None
        pytest.fail(f"the server ended:\n{process.stdout.read()}")
    try:
        return ask(port, "/health/ready")["status"] == "ready"
    except OSError:
        return False


def test_it_serves_and_drains(installed: Path, eventually: Callable[..., object]) -> None:
    """The wheel's own kernels, no file written but under /tmp, and SIGTERM ends it well."""
    (port,) = free_ports(1)
    flags = ("--num-instances", "2", "--instance-memory", "400MiB", "--port", str(port))
    with memory_limit(1600 * MIB) as group, contained(installed, *flags, group=group) as process:
        eventually(lambda: is_ready(process, port), PATIENCE_S)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        answer = ask(
            port,
            "/v1/chat/completions",
            {
                "model": "smollm2-135m",
                "messages": messages,
                "temperature": 0,
                "max_tokens": 32,
            },
        )
        assert "Paris" in str(answer["choices"])
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert f"Uid:\t{UID}" in status and "CapEff:\t0000000000000000" in status
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, output
    assert "kernels file=kernels-x86-64-" in output or "kernels file=kernels-armv8" in output
    assert "drain ended interrupted=0" in output and "Traceback" not in output


def test_more_than_the_container_may_take_is_refused(installed: Path) -> None:
    """Before anything is loaded, with the numbers; the kernel would kill without a word."""
    (port,) = free_ports(1)
    flags = ("--num-instances", "2", "--instance-memory", "600MiB", "--port", str(port))
    with memory_limit(1200 * MIB) as group, contained(installed, *flags, group=group) as process:
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
    assert "2 instances of 600 MiB (--instance-memory)" in output and "cgroup" in output
    assert "Traceback" not in output


def test_the_docker_health_check_tells(installed: Path, eventually: Callable[..., object]) -> None:
    """The Dockerfile's HEALTHCHECK command itself, on a server at the port that it asks."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    line = next(line for line in text.splitlines() if line.strip().startswith('CMD ["python'))
    check = json.loads(line.strip().removeprefix("CMD "))
    (port,) = free_ports(1)
    command = [installed, *(part.replace("8000", str(port)) for part in check[1:])]
    flags = ("--num-instances", "1", "--instance-memory", "400MiB", "--port", str(port))
    assert subprocess.run(command, capture_output=True).returncode != 0
    with contained(installed, *flags) as process:
        eventually(lambda: is_ready(process, port), PATIENCE_S)
        subprocess.run(command, check=True)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
