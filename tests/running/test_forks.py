"""Tests that forks run: each once, with its report, whatever becomes of a fork."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SHARED = """
import os, pytest

@pytest.fixture(scope="module", params=["a", "b"])
def shared(request, tmp_path_factory):
    with open("made", "a") as file:
        file.write(request.param)
    yield tmp_path_factory.mktemp("shared")

@pytest.mark.parametrize("number", range(5))
def test_shared(shared, number):
    print("this is", number)
    assert shared.is_dir() and number != 3, "three"
"""
ALONE = """
import os, signal, pytest

@pytest.fixture(scope="session")
def whole():
    yield 1
    with open("torn", "a") as file:
        file.write("x")

@pytest.mark.parametrize("number", range(40))
def test_alone(number, tmp_path, capfd, whole):
    os.write(1, b"said %d" % number)
    assert capfd.readouterr().out == f"said {number}"

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.parametrize("number", range(5))
def test_after(number, whole):
    pass

@pytest.mark.skip(reason="why not")
def test_skipped():
    pass
"""


STAYS = """
import os, subprocess, sys, time

def test_quick():
    pass

def test_stays():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
        start_new_session=True)
    with open("part", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename("part", "pids")
    time.sleep(300)
"""
HEARS_SLOWLY = """
import os, time

def pytest_report_from_serializable():
    while not os.path.exists("pids"):
        time.sleep(0.01)
    time.sleep(1)
"""
DIES_BEHIND = """
import os, pytest

@pytest.fixture(scope="session")
def whole():
    yield 1
    os._exit(7)

def test_last(whole):
    pass
"""


def command_of(*flags: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-rs"]
    return [*command, "-p", "tests.running.forks", "-p", "no:cacheprovider", *flags]


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_shared.py").write_text(SHARED)
    (folder / "test_alone.py").write_text(ALONE)
    return subprocess.run(
        command_of(*flags),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("num_forks", ["1", "3"])
def test_each_test_runs_once_and_a_process_that_dies_fails_one(
    tmp_path: Path, num_forks: str
) -> None:
    said = run(tmp_path, "--forks", num_forks, "--junitxml", "all.xml")
    assert "3 failed, 53 passed, 1 skipped" in said.stdout, said
    assert "status -9" in said.stdout and "why not" in said.stdout and said.returncode == 1
    assert "AssertionError: three" in said.stdout and "this is 3" in said.stdout
    cases = ElementTree.parse(tmp_path / "all.xml").getroot().iter("testcase")
    names = Counter(case.get("name") for case in cases)
    assert len(names) == 57 and set(names.values()) == {1}
    assert Counter((tmp_path / "made").read_text()) == {"a": 1, "b": 1}, (
        "one process has the module"
    )
    assert 1 <= len((tmp_path / "torn").read_text()) <= int(num_forks)


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    said = run(tmp_path, "--forks", "2", "-x")
    assert "1 failed" in said.stdout and said.returncode == 1
    assert "stopping after 1 failures" in said.stdout


def test_what_is_said_of_a_test_stays_together(tmp_path: Path) -> None:
    lines = run(tmp_path, "--forks", "3", "-v").stdout.splitlines()
    tests = [line for line in lines if line.startswith("test_") and "::" in line]
    ends = Counter(line.split()[1] for line in tests)
    assert ends == {"PASSED": 53, "FAILED": 3, "SKIPPED": 1}, lines


def test_a_process_that_dies_behind_its_last_test_is_seen(tmp_path: Path) -> None:
    (tmp_path / "test_behind.py").write_text(DIES_BEHIND)
    said = run(tmp_path, "--forks", "1", "test_behind.py")
    assert "1 failed, 1 passed" in said.stdout and said.returncode == 1, said
    assert "status 7 behind this test" in said.stdout


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_who_ends_leaves_nobody(
    tmp_path: Path, eventually: Callable[..., object], end: signal.Signals, is_slow: bool
) -> None:
    """Neither a process of the tests, nor what a test has started in a session of its own. One
    that is ended while it hears of an earlier test still names the one that runs.
    """
    (tmp_path / "test_stays.py").write_text(STAYS)
    if is_slow:
        (tmp_path / "conftest.py").write_text(HEARS_SLOWLY)
    with subprocess.Popen(
        command_of("--forks", "2"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        eventually((tmp_path / "pids").exists)
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        assert not any(map(is_gone, pids))
        process.send_signal(end)
        said = process.communicate(timeout=100)[0]
    eventually(lambda: all(map(is_gone, pids)))
    if end == signal.SIGINT:
        assert process.returncode == pytest.ExitCode.INTERRUPTED
        assert "test_stays.py::test_stays" in said and "KeyboardInterrupt" in said
    else:
        assert process.returncode == -end
