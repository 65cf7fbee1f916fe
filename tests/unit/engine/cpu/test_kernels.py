"""Each kernel against torch, and the bits of a row against the company it keeps."""

import errno
import functools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.errors import ConfigError
from kunserve.engine.cpu.kernels import build as build_module
from kunserve.engine.cpu.kernels.build import build
from kunserve.engine.cpu.kernels.library import set_num_threads
from kunserve.engine.cpu.kernels.ops import (
    Finish,
    argmax,
    largest,
    largest_pairs,
    linear,
    pick_rows,
    rms_norm,
)

DTYPES = [torch.float32, torch.bfloat16]
GATES = {
    Finish.SWIGLU: F.silu,
    Finish.GEGLU: functools.partial(F.gelu, approximate="tanh"),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def one_thread():
    """Threads only where a test asks: waking them on a busy machine takes most of the time."""
    torch.set_num_threads(1)
    set_num_threads(1)
    yield
    set_num_threads(1)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    scale = max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(
        actual.double() / scale, wanted.double() / scale, rtol=0, atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@given(m=st.integers(1, 40), n=st.integers(1, 70), k=st.integers(1, 20), seed=st.integers(0, 99))
def test_linear_is_torch_linear(dtype, m, n, k, seed):
    k *= 16 // dtype.itemsize
    x, w = random(m, k, dtype=dtype, seed=seed), random(n, k, dtype=dtype, seed=seed + 1)
    bias, past = random(n, dtype=dtype, seed=seed + 2), random(m, n, dtype=dtype, seed=seed + 3)
    wanted = F.linear(x.double(), w.double())
    close(linear(x, w), wanted, dtype)
    close(linear(x, w, bias), wanted + bias.double(), dtype)
    close(linear(x, w, finish=Finish.FLOAT), wanted, torch.float32)
    total = past.clone()
    linear(x, w, bias, total, Finish.RESIDUAL)
    close(total, past.double() + wanted + bias.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("finish", GATES)
@given(m=st.integers(1, 14), n=st.integers(1, 40), seed=st.integers(0, 99))
def test_linear_gated(dtype, finish, m, n, seed):
    x, w = random(m, 32, dtype=dtype, seed=seed), random(2 * n, 32, dtype=dtype, seed=seed + 1)
    bias = random(2 * n, dtype=dtype, seed=seed + 2)
    both = F.linear(x.double(), w.double())
    close(linear(x, w, finish=finish), GATES[finish](both[:, :n]) * both[:, n:], dtype)
    both += bias.double()
    wanted = GATES[finish](both[:, :n]) * both[:, n:]
    close(linear(x, w, bias, finish=finish), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("finish", GATES)
def test_extreme_gates(dtype, finish):
    gate = torch.tensor([-1e4, -200.0, -88.0, -1.0, 0.0, 1.0, 88.0, 1e4])
    x = torch.zeros(1, 16, dtype=dtype)
    x[0, 0] = 1
    w = torch.zeros(16, 16, dtype=dtype)
    w[:8, 0], w[8:, 0] = gate.to(dtype), 1
    out = linear(x, w, finish=finish)[0]
    assert out.isfinite().all()
    close(out, GATES[finish](gate.to(dtype).double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("finish", [Finish.STORE, *GATES, Finish.FLOAT])
@pytest.mark.parametrize("k", [64, 104, 1536])
def test_linear_row_does_not_depend_on_its_batch(dtype, finish, k):
    x, w = random(600, k, dtype=dtype), random(200, k, dtype=dtype, seed=1)
    whole = linear(x, w, finish=finish)
    for threads in (2, 3):
        set_num_threads(threads)
        for first, rows in enumerate([*range(1, 16), 28, 29, 32]):
            end = first + rows
            assert torch.equal(linear(x[first:end], w, finish=finish), whole[first:end])
        assert torch.equal(linear(x, w, finish=finish), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [16, 40, 64, 576])
def test_rms_norm(dtype, n):
    x, w = random(7, n, dtype=dtype), random(n, dtype=dtype, seed=1)
    wide = x.double()
    wanted = w.double() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    out = rms_norm(x, w, 1e-5)
    close(out, wanted, dtype)
    for row in range(7):
        assert torch.equal(rms_norm(x[row : row + 1], w, 1e-5)[0], out[row])
    # As Gemma's: what files hold is small, and a sum of 8 bits would lose it.
    small = w / 100
    wanted = (1 + small.double()) * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    exact = 1e-6 if dtype == torch.float32 else 2**-8
    found = rms_norm(x, small, 1e-5, offset=1).double()
    assert ((found - wanted).abs() <= exact * wanted.abs()).all()


@given(rows=st.integers(1, 9), n=st.integers(1, 3000), seed=st.integers(0, 99))
def test_argmax_takes_the_lowest_of_equals(rows, n, seed):
    logits = torch.from_numpy(np.random.default_rng(seed).integers(-2, 5, (rows, n))).float()
    assert argmax(logits).tolist() == logits.numpy().argmax(-1).tolist()
    # Few have the largest, so that stretches without any are passed.
    logits = torch.from_numpy(np.random.default_rng(seed).integers(-2, n + 5, (rows, n))).float()
    assert argmax(logits).tolist() == logits.numpy().argmax(-1).tolist()


def test_argmax_of_infinities():
    inf = float("inf")
    assert argmax(torch.tensor([[-inf, -inf], [-inf, -3.0], [inf, inf]])).tolist() == [0, 1, 0]


@given(n=st.integers(1, 3000), where=st.integers(0, 2999), seed=st.integers(0, 99))
def test_largest_tells_values_and_nans(n, where, seed):
    logits = torch.from_numpy(np.random.default_rng(seed).standard_normal((3, n), np.float32))
    logits[1, where % n] = float("nan")
    values, tokens = largest(logits)
    assert np.isnan(values[1])
    for row in (0, 2):
        assert (values[row], tokens[row]) == (logits[row].max().item(), logits[row].argmax().item())
    pairs = largest_pairs(logits[2:], 7)
    assert pairs.tolist() == [[values[2], tokens[2] + 7.0]]


def test_rows_are_picked_and_missing_ones_are_an_error():
    weight = random(9, 24, dtype=torch.bfloat16)
    rows = np.array([8, 0, 3, 3], dtype=np.int32)
    assert torch.equal(pick_rows(weight, rows), weight[rows.tolist()])
    for missing in (-1, 9):
        with pytest.raises(IndexError):
            pick_rows(weight, np.array([0, missing], dtype=np.int32))


def test_thread_counts_come_and_go():
    x, w = random(3, 64, dtype=torch.float32), random(64, 64, dtype=torch.float32)
    wanted = linear(x, w)
    for threads in (1, 4, 2, 2, 8, 1):
        set_num_threads(threads)
        for _ in range(20):
            assert torch.equal(linear(x, w), wanted)
    with pytest.raises(ConfigError):
        set_num_threads(0)


def test_kernels_run_in_a_forked_child():
    """Its workers stayed behind: a call would wait for them for ever."""
    code = """
import os, signal, torch
from kunserve.engine.cpu.kernels.library import set_num_threads
from kunserve.engine.cpu.kernels.ops import linear
set_num_threads(3)
x, w = torch.randn(9, 64), torch.randn(64, 64)
wanted = linear(x, w)
child = os.fork()
if child == 0:
    signal.alarm(60)
    same = torch.equal(linear(x, w), wanted)
    set_num_threads(2)
    os._exit(0 if same and torch.equal(linear(x, w), wanted) else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert torch.equal(linear(x, w), wanted)
"""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_build_is_cached():
    path = build()
    assert path == build() and path.exists()
    assert re.fullmatch(r"kernels-[0-9a-f]{16}\.so", path.name)


@pytest.fixture
def one_line_of_c(monkeypatch, tmp_path):
    """Compiled in no time, where it does not matter what is compiled."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "nothing.c").write_text("int kun_nothing;")
    monkeypatch.setattr(build_module, "SOURCES", sources)


@pytest.mark.usefixtures("one_line_of_c")
def test_a_compiler_is_needed_once(monkeypatch, tmp_path):
    """An image that is built with one and runs without starts."""
    monkeypatch.setattr(build_module, "_folders", lambda: (tmp_path,))
    with monkeypatch.context() as without:
        without.setattr(build_module.shutil, "which", lambda name: None)
        with pytest.raises(ConfigError, match="C compiler"):
            build()
    path = build()
    monkeypatch.setattr(build_module.shutil, "which", lambda name: None)
    monkeypatch.setattr(build_module.subprocess, "run", None)
    assert build() == path


@pytest.mark.usefixtures("one_line_of_c")
def test_a_folder_that_cannot_be_written_is_passed_over(monkeypatch, tmp_path):
    """A read-only install, whether by rights or by its file system."""
    readable, home = tmp_path / "install", tmp_path / "home"
    true_mkdir = Path.mkdir

    def mkdir(self, *args, **kwargs):
        if self == readable:
            raise OSError(errno.EROFS, "Read-only file system")
        true_mkdir(self, *args, **kwargs)

    monkeypatch.setattr(build_module.Path, "mkdir", mkdir)
    monkeypatch.setattr(build_module, "_folders", lambda: (readable, home))
    assert build().parent == home
    monkeypatch.setattr(build_module, "_folders", lambda: (readable,))
    with pytest.raises(ConfigError, match=f"no folder for them can be written: tried {readable}"):
        build()


def test_a_user_without_a_home_has_one_folder_less(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build_module.Path, "home", homeless)
    assert [folder.name for folder in build_module._folders()] == ["_build"]


def test_build_that_fails(monkeypatch, tmp_path):
    (tmp_path / "broken.c").write_text("not C")
    monkeypatch.setattr(build_module, "SOURCES", tmp_path)
    monkeypatch.setattr(build_module, "_folders", lambda: (tmp_path / "out",))
    with pytest.raises(ConfigError, match="could not compile"):
        build()
    assert list((tmp_path / "out").iterdir()) == []
