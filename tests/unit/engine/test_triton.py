"""The Triton kernels: interpreted on the CPU, and compiled for a GPU.

Skipped where Triton is not installed, because nothing on a CPU needs it.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
HERE = Path(__file__).parent
ROOT = HERE.parents[2]

NUM_COMPILED = 2 * (4 * 3 + 4)
"""Both types; four shapes of three kernels of attention, and four others."""


def run(arguments: list[str], **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_they_do_what_plain_torch_does() -> None:
    kernels = str(HERE / "interpreted_kernels.py")
    output = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", kernels], TRITON_INTERPRET="1")
    assert "passed" in output and "skipped" not in output


def test_they_fit_an_h100(tmp_path: Path) -> None:
    """No device is needed for that. A register that is spilled is read from slow memory."""
    output = run(["-m", "tests.unit.engine.compiled_kernels"], TRITON_CACHE_DIR=str(tmp_path))
    lines = output.splitlines()
    assert len(lines) == NUM_COMPILED, output
    for line in lines:
        shared_bytes, registers, spilled_bytes = map(int, line.split()[-3:])
        assert shared_bytes <= 227 * 1024 and registers <= 255, line
        assert spilled_bytes == 0, line
