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

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kunserve.engine.triton.attention import attention_kernel
from kunserve.engine.triton.rows import (
    place_kernel, rms_norm_kernel, rotate_kernel, silu_mul_kernel,
)
POINTERS = {
    "q", "kv", "out", "x", "weight", "gate_up", "heads", "k", "v",
}
INT_POINTERS = {"tables", "q_starts", "context_lens", "entries", "offsets"}
CASES = [
    (attention_kernel, dict(KV_HEADS=8, GROUP=5, HEAD_DIM=128, HEAD_PAD=128, BLOCK_SIZE=64,
                            QUERIES=2, ROWS=16, KEYS=32)),
    (attention_kernel, dict(KV_HEADS=3, GROUP=3, HEAD_DIM=64, HEAD_PAD=64, BLOCK_SIZE=16,
                            QUERIES=4, ROWS=16, KEYS=32)),
    (rms_norm_kernel, dict(WIDTH=5120, PAD=8192)),
    (silu_mul_kernel, dict(WIDTH=13824, PIECE=1024)),
    (rotate_kernel, dict(HALF=64, PAD=64)),
    (place_kernel, dict(KV_HEADS=8, BLOCK_SIZE=64, HEAD_DIM=128, PAD=128)),
]
for kernel, constants in CASES:
    for dtype in ("fp32", "bf16"):
        signature = {}
        for name in kernel.arg_names:
            if name in constants:
                signature[name] = "constexpr"
            elif name in POINTERS:
                signature[name] = "*" + dtype
            elif name == "angles":
                signature[name] = "*fp32"
            elif name in INT_POINTERS:
                signature[name] = "*i32"
            else:
                signature[name] = "fp32" if name in ("eps", "scale") else "i32"
        source = ASTSource(kernel, signature, constants)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert built.metadata.shared <= 227 * 1024, (kernel.__name__, built.metadata.shared)
        print(kernel.__name__, dtype, "shared", built.metadata.shared)
"""


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


def test_they_compile_for_an_h100(tmp_path: Path) -> None:
    """No device is needed for that. Shared memory stays within the device's."""
    output = run(["-c", COMPILE], TRITON_CACHE_DIR=str(tmp_path))
    assert output.count("shared") == 12
