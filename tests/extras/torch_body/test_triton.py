"""The Triton kernels: interpreted on the CPU, and compiled for a GPU.

The first of each pair of tests is small, for every commit. What it leaves out is slow.
"""

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kunserve.core.config import InstanceConfig, ModelConfig, SchedulerConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve_extras.torch_body.cuda.backend import CudaBackend
from kunserve_extras.triton_ops.attention import part_kernel
from kunserve_extras.triton_ops.ops import TritonOps
from tests.direct_engine import DirectEngine
from tests.fakecuda.library import KIB, FakeCuda, build
from tests.tiny_models import VOCAB, tiny_model
from tests.unit.engine.gpu_kernels.sass import faults
from tests.unit.engine.quantised_models import save_quantised

ROOT = Path(__file__).parents[3]
KERNELS, PRODUCTS, MODELS = (
    f"tests/unit/engine/gpu_kernels/interpreted_{what}.py"
    for what in ("kernels", "products", "models")
)
COMPILED = Path(tempfile.gettempdir()) / f"kunserve-triton-{os.getuid()}"
"""Kept for the next run. Triton looks for a kernel there by all that it was made of."""
EXPERTS = "tests/unit/engine/gpu_kernels/interpreted_experts.py"
ATTENTION, OTHERS, SPARSE = 3, 3, 6
"""Kernels of each shape, those of each type, and those of a sparse MLP in place of one of these.
Two of the last have tiles of two kinds for half precision."""
QUANTISED = 3
"""Products of the formats that fleets serve, in each tile of bfloat16."""


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


def interpret(*what: str) -> None:
    # One thread: several meet after each tiny operation, on cores that other tests have, too.
    output = run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", *what],
        TRITON_INTERPRET="1",
        OMP_NUM_THREADS="1",
    )
    assert "passed" in output and "skipped" not in output


@pytest.mark.dear
def test_they_do_what_plain_torch_and_a_cpu_do() -> None:
    """One process for all, because torch and Triton take as long to load as most of them do."""
    interpret(KERNELS, EXPERTS, PRODUCTS)


@pytest.mark.slow
def test_so_they_do_in_every_shape_and_in_whole_models() -> None:
    interpret("-m", "slow", KERNELS)
    interpret(MODELS)


def check_fit(output: str, num_kernels: int) -> None:
    lines = output.splitlines()
    assert len(lines) == num_kernels, output
    for line in lines:
        shared_bytes, registers, spilled_bytes = map(int, line.split()[-3:])
        assert shared_bytes <= 227 * 1024 and registers <= 255, line
        assert spilled_bytes == 0, line


def test_they_fit_an_h100() -> None:
    """No device is needed for that. A register that is spilled is read from slow memory."""
    output = run(
        ["-m", "tests.unit.engine.gpu_kernels.compiled_kernels"], TRITON_CACHE_DIR=str(COMPILED)
    )
    num_sparse = 2 * SPARSE + 2
    check_fit(output, num_kernels=3 * ATTENTION + 2 * OTHERS + num_sparse + 3 * QUANTISED)


@pytest.mark.slow
def test_so_they_do_in_every_shape(tmp_path: Path) -> None:
    output = run(
        ["-m", "tests.unit.engine.gpu_kernels.compiled_kernels", "all"],
        TRITON_CACHE_DIR=str(tmp_path),
    )
    num_sparse = 3 * (2 * SPARSE + 2)
    check_fit(output, num_kernels=8 * ATTENTION + 2 * OTHERS + num_sparse + 4 * 8)


@pytest.mark.slow
def test_machine_code_is_wide_and_uses_tensor_cores(tmp_path: Path) -> None:
    """Of every variant of some models: ``make test-gpu-kernels``."""
    run(["-m", "tests.unit.engine.gpu_kernels.sass"], TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize(
    ("dtype", "sass", "used", "found"),
    [
        ("bfloat16", "LDGSTS.E.BYPASS.128 R1; HMMA.16816.F32.BF16 R2", (1024, 128, 0), []),
        ("bfloat16", "LDG.E.64 R1; HMMA.16816.F32.BF16", (1024, 128, 0), ["no load of 16 bytes"]),
        ("bfloat16", "LDG.E.128 R1; FFMA R2", (1024, 128, 0), ["no tensor cores"]),
        ("float32", "LDG.E.128 R1; HMMA.1688.F32.TF32", (0, 9, 0), ["tensor cores for float32"]),
        (
            "float32",
            "LDG.E.128 R1",
            (1 << 18, 99, 4),
            ["4 bytes spilled", "262144 bytes"],
        ),
    ],
)
def test_slow_machine_code_is_seen(
    dtype: str, sass: str, used: tuple[int, int, int], found: list[str]
) -> None:
    told = faults(part_kernel, dtype, {}, sass, used)
    assert len(told) == len(found)
    assert all(one.startswith(words) for one, words in zip(told, found, strict=True)), told


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[str]]]:
    """What Triton would compile for each kernel that is launched; nothing is computed."""
    found: dict[str, set[str]] = defaultdict(set)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binders: dict[str, Any] = {}

    def launch(kernel: Any, *arguments: Any, grid: object, warmup: bool, **options: Any) -> None:
        name = kernel.__name__
        if name not in binders:
            binders[name] = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, rest = binders[name](*arguments, **options)
        found[name].add(f"{specialization} {rest}")

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(CudaBackend, "open_ops", lambda _, spec, config: TritonOps(spec))
    yield found


@pytest.mark.parametrize(
    ("kind", "how", "num_others"),
    [
        ("mistral", None, OTHERS),
        ("qwen3", None, OTHERS),
        ("qwen3_moe", None, OTHERS - 1 + SPARSE),
        ("llama3", "int4", OTHERS + 1),
        ("llama", "int8", OTHERS + 1),
    ],
)
def test_nothing_is_compiled_after_the_start(
    kind: str,
    how: str | None,
    num_others: int,
    variants: dict[str, set[str]],
    tmp_path: Path,
) -> None:
    """Whatever the batch, and in whatever layer: numbers of 1 and of 16 are among them."""
    num_layers = 18
    model, read = tiny_model(kind, num_layers), ModelConfig(dtype="float32")
    if how is None:
        model.save_pretrained(tmp_path)
    else:  # tiles of bfloat16 depend on the number of tokens
        save_quantised(tmp_path, model, how)
        read = ModelConfig(dtype="bfloat16", quantization="auto")
    FakeCuda()
    body = EngineBody(
        InstanceId(0),
        replace(read, model=str(tmp_path), max_model_len=160),
        InstanceConfig(memory_bytes=16 << 20, granule_bytes=8 * KIB, block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=96),
        backend=CudaBackend(torch.device("cpu"), build()),
    )
    with closing(body):
        at_start = {name: set(keys) for name, keys in variants.items()}
        assert len(at_start) == ATTENTION + num_others
        engine = DirectEngine([(body, LayerRange(0, num_layers))])
        draw = np.random.default_rng(0)
        for lengths, chunk_size in (([1], 64), ([1] * 16, 64), ([3, 130], 96), ([16] * 3, 16)):
            prompts = [draw.integers(3, VOCAB, length).tolist() for length in lengths]
            engine.generate(prompts, 2, chunk_size)
        assert variants == at_start
