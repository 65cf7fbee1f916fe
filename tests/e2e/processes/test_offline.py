"""``LLM`` with real processes: whatever ends the program ends its instances."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).parent / "offline_program.py"
PATIENCE_S = 100.0


@contextlib.contextmanager
def running(how: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), how],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline().split()
    assert line[:1] == ["pids"], process.stderr.read()
    return [int(one) for one in line[1:]]


def are_gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_program_that_never_closes_it() -> None:
    with running("drop") as process:
        pids = pids_of(process)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1 and "same tokens" in out, err
    assert err.startswith("Traceback") and err.endswith("a mistake of the program's own\n")
    assert len(pids) == 2 and are_gone(pids)


@pytest.mark.usefixtures("interruptible")
def test_a_program_that_is_interrupted_and_then_killed() -> None:
    with running("wait") as process:
        pids = pids_of(process)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line == "interrupted length\n", process.stderr.read()
        assert not are_gone(pids)
        process.kill()
        _, err = process.communicate(timeout=PATIENCE_S)
    assert err == ""
    wait_until(lambda: are_gone(pids), PATIENCE_S)
