"""Tests that forks run: each once, with its report, whatever becomes of a fork."""

import os
import subprocess
import sys
from collections import Counter
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


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_shared.py").write_text(SHARED)
    (folder / "test_alone.py").write_text(ALONE)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-rs"]
    return subprocess.run(
        [*command, "-p", "tests.running.forks", "-p", "no:cacheprovider", *flags],
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
