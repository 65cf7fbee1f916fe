"""Products by AMX: their order of additions, whatever rows share a step, and the instructions.

Of bfloat16, in attention, and of packed weights. No processor here has AMX, so its instructions are
done in C (``amx/instructions.h``).
"""

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.engine.cpu.kernels import library as library_module
from kunserve.engine.cpu.kernels.build import FLAGS, SOURCES
from kunserve.engine.cpu.kernels.levels import LEVELS
from kunserve.engine.cpu.kernels.ops import Finish, linear
from kunserve.engine.cpu.kernels.tiles import why_not
from tests.unit.engine import test_attention
from tests.unit.engine.cpu import test_packed

HERE = Path(__file__).parent / "amx"
SLOW_FLAGS = {"-O3"}
Linear = Callable[..., torch.Tensor]


NOT_COMPILED = {"f32.c", "ends.c"}
"""Kernels for float32, which take half of the time, and what calls them."""


def compile_for_bfloat16(target: Path, *flags: str) -> None:
    command = ["gcc", "-O1", *(flag for flag in FLAGS if flag not in SLOW_FLAGS), *flags]
    sources = sorted(path for path in SOURCES.glob("*.c") if path.name not in NOT_COMPILED)
    subprocess.run([*command, "-o", target, *sources], check=True)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels with tiles that are done in C."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    target = tmp_path_factory.mktemp("amx") / "kernels.so"
    emulation = ("-DKUN_AMX", "-DKUN_AMX_INSTRUCTIONS=<instructions.h>", f"-I{HERE}")
    compile_for_bfloat16(target, "-march=native", *emulation)
    return target


@pytest.fixture
def through_tiles(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test calls goes through tiles, and some of it must."""
    with_tiles = library_module.load(str(emulated), is_other=True)
    products = ctypes.c_uint64.in_dll(with_tiles, "tile_products_in_c")
    monkeypatch.setattr(library_module, "library", lambda: with_tiles)
    before = products.value
    yield
    assert products.value > before


@pytest.fixture(scope="module")
def by_amx(emulated: Path) -> Linear:
    """``ops.linear`` of bfloat16 through tiles."""
    library = ctypes.CDLL(str(emulated))
    library.kun_linear_bf16.argtypes = (*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3, ctypes.c_int)

    def run(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        finish: Finish = Finish.STORE,
        threads: int = 1,
    ) -> torch.Tensor:
        (m, k), n = x.shape, w.shape[0] // (2 if finish.is_gated else 1)
        if out is None:
            out = torch.empty(m, n, dtype=torch.float32 if finish is Finish.FLOAT else x.dtype)
        assert library.kun_set_threads(threads)
        addresses = [None if t is None else t.data_ptr() for t in (x, w, bias, out)]
        library.kun_linear_bf16(*addresses, m, n, k, finish)
        library.kun_set_threads(1)
        return out

    return run


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def in_order(x: torch.Tensor, w: torch.Tensor) -> np.ndarray:
    """The sums as the instruction's manual orders them; a product of bfloat16 is exact."""
    steps = [range(at, min(at + 32, x.shape[1])) for at in range(0, x.shape[1], 32)]
    rows, panel = x.float().numpy(), w.float().numpy()
    total = np.zeros((len(rows), len(panel)), dtype=np.float32)
    for step in steps:
        sums = [np.zeros_like(total), np.zeros_like(total)]
        for k in step:
            sums[k % 2] += np.outer(rows[:, k], panel[:, k])
        total += sums[0] + sums[1]
    return total


@settings(max_examples=40)
@given(m=st.integers(1, 140), n=st.integers(1, 40), k=st.integers(1, 17), seed=st.integers(0, 99))
def test_sums_have_the_instructions_order(by_amx: Linear, m: int, n: int, k: int, seed: int):
    x, w = random(m, 8 * k, seed=seed), random(n, 8 * k, seed=seed + 1)
    assert np.array_equal(by_amx(x, w, finish=Finish.FLOAT).numpy(), in_order(x, w))


@pytest.mark.parametrize("k", [64, 104])
@pytest.mark.parametrize("finish", [Finish.STORE, Finish.SWIGLU, Finish.GEGLU, Finish.FLOAT])
def test_a_row_does_not_depend_on_its_batch(by_amx: Linear, finish: Finish, k: int):
    """Not on one row alone, not on heights of tiles, and not on where tiles begin."""
    x, w = random(131, k, seed=0), random(2 * 37, k, seed=1)
    whole = by_amx(x, w, finish=finish)
    for first, end in [(0, 1), (5, 7), (3, 16), (20, 36), (60, 77), (30, 94), (1, 131)]:
        part = by_amx(x[first:end], w, finish=finish, threads=1 + first % 3)
        assert torch.equal(part, whole[first:end])


@given(
    m=st.integers(1, 70),
    n=st.integers(1, 40),
    k=st.integers(1, 9),
    finish=st.sampled_from(sorted(Finish)),
    seed=st.integers(0, 99),
)
def test_exact_sums_are_those_of_other_kernels(
    by_amx: Linear, m: int, n: int, k: int, finish: Finish, seed: int
):
    """Of small whole numbers any order gives the same bits, so all that follows must, too."""
    generator = torch.Generator().manual_seed(seed)
    columns, rows = 8 * k, n * (2 if finish.is_gated else 1)

    def whole_numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).bfloat16()

    x, w, bias = whole_numbers(m, columns), whole_numbers(rows, columns), whole_numbers(rows)
    past = whole_numbers(m, n) if finish is Finish.RESIDUAL else None
    results = [
        run(x, w, bias, None if past is None else past.clone(), finish) for run in (by_amx, linear)
    ]
    if finish.is_gated:  # compilers differ in which products and sums they fuse
        torch.testing.assert_close(*results, rtol=2**-7, atol=2**-7)
    else:
        assert torch.equal(*results)


@pytest.mark.parametrize(
    ("window", "cap", "group", "dim"),
    [(None, None, 3, 64), (50, 2.0, 3, 64), (None, None, 1, 96), (None, None, 7, 32)],
)
def test_attention_of_a_row_does_not_depend_on_its_batch(through_tiles, window, cap, group, dim):
    test_attention.test_bits_do_not_depend_on_batching("bfloat16", window, cap, group, dim)


def test_attention_is_the_plain_one_however_threads_share_it(through_tiles):
    test_attention.test_threads_share_a_long_context_and_no_bit_tells("bfloat16", 600, (0,))


@pytest.mark.parametrize("kind", test_packed.FORMATS)
def test_rows_of_packed_weights_need_no_tiles_for_their_bits(through_tiles, kind):
    """Integers have one sum, and what follows is in the same order: fewer than 16 go without."""
    weight = test_packed.matrix(kind, test_packed.stored(kind, 40, 512), 512)
    x = random(50, 512, seed=1)
    few = torch.cat([linear(part, weight, finish=Finish.FLOAT) for part in x.split(15)])
    for rows in (16, 19, 50):
        assert torch.equal(linear(x[:rows], weight, finish=Finish.FLOAT), few[:rows])


def test_numbers_too_small_to_be_normal_count_as_zero(by_amx: Linear):
    """As in all other kernels of AVX-512 BF16: its instructions do the same."""
    x, w = torch.zeros(1, 8).bfloat16(), torch.zeros(1, 8).bfloat16()
    x[0, 0], w[0, 0] = 2.0**-127, 2.0**10
    x[0, 1], w[0, 1] = 2.0**-70, 2.0**-60
    assert by_amx(x, w, finish=Finish.FLOAT).item() == 0


def test_kernels_with_tiles_pass_their_trial(emulated: Path):
    """As they are tried before a server takes them."""
    assert why_not(emulated) is None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64")
@pytest.mark.skipif(
    shutil.which("gcc") is None or shutil.which("objdump") is None, reason="no gcc or no binutils"
)
def test_the_real_level_has_the_instructions(tmp_path: Path):
    """They are only compiled here, never run."""
    (level,) = (level for level in LEVELS if "-DKUN_AMX" in level.flags)
    probe = ["gcc", *level.flags, "-E", "-x", "c", "/dev/null"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this gcc knows no AMX")
    compile_for_bfloat16(tmp_path / "kernels.so", *level.flags)
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(tmp_path / "kernels.so")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for instruction in ("ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tdpbsud"):
        assert instruction in text, instruction
    assert "tilestored" in text and "tilerelease" in text
    assert "vdpbf16ps" not in text
