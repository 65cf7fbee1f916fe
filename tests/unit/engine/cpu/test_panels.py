"""Matrices in panels: the bits of plain ones, and the bytes that were put in."""

import os

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kunserve.engine.cpu.kernels.levels import VARIABLE
from kunserve.engine.cpu.kernels.library import library, set_num_threads
from kunserve.engine.cpu.kernels.ops import Finish, gather, linear, pick_rows
from kunserve.engine.cpu.kernels.panels import PanelMatrix, in_panels

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    yield
    set_num_threads(1)


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 70),
    steps=st.integers(1, 20),
    finish=st.sampled_from(Finish),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@example(m=16, n=64, steps=72, finish=Finish.STORE, threads=2, seed=0)
@example(m=5, n=40, steps=192, finish=Finish.SWIGLU, threads=1, seed=0)
@example(m=600, n=48, steps=72, finish=Finish.RESIDUAL, threads=3, seed=0)
def test_products_have_the_bits_of_plain_weights(dtype, m, n, steps, finish, threads, seed):
    """Whatever rows are left over, of w and of x."""
    k = steps * 16 // dtype.itemsize
    rows = 2 * n if finish.is_gated else n
    x, w = random(m, k, dtype=dtype, seed=seed), random(rows, k, dtype=dtype, seed=seed + 1)
    bias, past = (random(*shape, dtype=dtype, seed=seed) for shape in ((rows,), (m, n)))
    panels = in_panels(w, is_paired=finish.is_gated)
    set_num_threads(threads)
    for added in (None, bias):
        of_plain, of_panels = (
            linear(x, weight, added, past.clone() if finish is Finish.RESIDUAL else None, finish)
            for weight in (w, panels)
        )
        assert torch.equal(of_panels, of_plain)


@pytest.mark.skipif("amx" in os.environ.get(VARIABLE, ""), reason="AMX adds in its own order")
@given(
    m=st.integers(1, 30), n=st.integers(1, 40), steps=st.integers(1, 20), seed=st.integers(0, 99)
)
@example(m=1, n=16, steps=72, seed=0)
@example(m=300, n=24, steps=192, seed=0)
def test_sums_have_one_order_on_every_processor(m, n, steps, seed):
    """A sum for each slot of 4 bytes, of a pair the odd column first; products are exact."""
    x, w = (random(rows, steps * 8, dtype=torch.bfloat16, seed=seed + rows) for rows in (m, n))
    slots = np.zeros((4, m, n), dtype=np.float32)
    columns = x.float().numpy().T[:, :, None] * w.float().numpy().T[:, None, :]
    for pairs in columns.reshape(steps, 4, 2, m, n):
        slots += pairs[:, 1]
        slots += pairs[:, 0]
    wanted = (slots[0] + slots[2]) + (slots[1] + slots[3])
    set_num_threads(2)
    for weight in (w, in_panels(w)):
        assert np.array_equal(linear(x, weight, finish=Finish.FLOAT).numpy(), wanted)


def panels_of(plain: torch.Tensor, is_paired: bool) -> torch.Tensor:
    """What a matrix is to become, by the words of panel_tile.h."""
    num_rows, num_full = len(plain), len(plain) // 16
    order = np.arange(num_rows)
    if is_paired:
        gate, up = order.reshape(2, -1)
        of_panels = [part[8 * i : 8 * i + 8] for i in range(num_full) for part in (gate, up)]
        order = np.concatenate([*of_panels, gate[8 * num_full :], up[8 * num_full :]])
    words = plain[order].view(torch.int32)
    panels = words[: 16 * num_full].view(num_full, 16, words.shape[1]).transpose(1, 2)
    return torch.cat([panels.reshape(16 * num_full, words.shape[1]), words[16 * num_full :]])


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    n=st.integers(1, 150),
    steps=st.integers(1, 9),
    number=st.integers(1, 3),
    is_paired=st.booleans(),
    seed=st.integers(0, 99),
)
@example(n=1536, steps=1, number=1, is_paired=True, seed=0)
@example(n=1531, steps=1, number=2, is_paired=True, seed=0)
def test_a_matrix_becomes_panels_where_it_lies(dtype, n, steps, number, is_paired, seed):
    """Whatever rows are left over, and with no more room than a panel and a byte for each row."""
    k = steps * 16 // dtype.itemsize
    each = 2 * n if is_paired else n
    plain = random(number * each, k, dtype=dtype, seed=seed)
    data = plain.clone()
    room_bytes = library().kun_arranging_bytes(each, steps * 16)
    assert room_bytes == 16 * steps * 16 + each
    room = np.full(room_bytes + 64, 0xA5, dtype=np.uint8)
    sizes = number, each, steps * 16, int(is_paired)
    library().kun_to_panels(data.data_ptr(), *sizes, room.ctypes.data)
    assert (room[room_bytes:] == 0xA5).all()
    wanted = [panels_of(part, is_paired) for part in plain.view(number, each, k)]
    assert torch.equal(data.view(torch.int32), torch.cat(wanted))
    matrix = in_panels(plain, is_paired=is_paired, num_matrices=number)
    assert matrix.shape == plain.shape and torch.equal(
        matrix.data.view(torch.int32), data.view(torch.int32)
    )
    assert torch.equal(matrix.matrix(number - 1).data.view(torch.int32), wanted[-1])


@given(
    n=st.integers(1, 90), first=st.integers(0, 5), size=st.integers(1, 60), seed=st.integers(0, 9)
)
def test_parts_begin_with_a_panel_and_end_anywhere(n, first, size, seed):
    x = random(3, 16, dtype=torch.bfloat16, seed=seed)
    plain = random(n, 16, dtype=torch.bfloat16, seed=seed + 1)
    first, end = min(16 * first, (n - 1) // 16 * 16), min(n, 16 * first + size)
    part = in_panels(plain)[first:end]
    assert part.shape == (max(0, end - first), 16)
    if end > first:
        assert torch.equal(linear(x, part), linear(x, plain[first:end].contiguous()))
        rows = np.arange(end - first, dtype=np.int32)[::-1].copy()
        assert torch.equal(pick_rows(part, rows), plain[first:end].flip(0))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("repeats", [1, 2, 30])
def test_rows_are_picked_out_of_panels_and_behind_them(repeats, threads):
    plain = random(37, 24, dtype=torch.bfloat16, seed=0)
    matrix = in_panels(plain)
    set_num_threads(threads)
    rows = np.array([36, 0, 17, 31, 32, 0] * repeats, dtype=np.int32)
    assert torch.equal(pick_rows(matrix, rows), plain[rows.tolist()])
    assert torch.equal(gather(matrix, torch.from_numpy(rows), plain.dtype), plain[rows.tolist()])
    for missing in (-1, 37):
        with pytest.raises(IndexError):
            pick_rows(matrix, np.array([0] * repeats + [missing], dtype=np.int32))


def test_a_panel_lies_as_the_kernels_say():
    """[step][slot][row][4 bytes]."""
    plain = torch.arange(16 * 16, dtype=torch.int32).view(torch.float32).view(16, 16)
    found = in_panels(plain).data.view(torch.int32).view(4, 4, 16)
    assert torch.equal(found, plain.view(torch.int32).view(16, 4, 4).permute(1, 2, 0))


def test_gate_and_up_share_panels():
    plain = torch.arange(2 * 8 * 4, dtype=torch.int32).view(torch.float32).view(16, 4)
    wide = torch.cat([plain[:8], plain[:8], plain[8:], plain[8:]])  # gate of 16 rows, up of 16
    panels = in_panels(wide, is_paired=True).data.view(2, -1)
    assert torch.equal(panels[0].view(torch.int32), panels[1].view(torch.int32))
    alone = in_panels(plain).data.view(-1)
    assert torch.equal(panels[0].view(torch.int32), alone.view(torch.int32))


def test_products_need_to_know_whether_rows_are_paired():
    x, w = torch.ones(1, 16), torch.ones(32, 16)
    with pytest.raises(AssertionError):
        linear(x, in_panels(w), finish=Finish.SWIGLU)
    with pytest.raises(AssertionError):
        linear(x, in_panels(w, is_paired=True))
    assert isinstance(in_panels(w)[16:32], PanelMatrix)
