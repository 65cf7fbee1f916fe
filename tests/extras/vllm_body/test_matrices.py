"""A row's product does not depend on how many others there are, nor on where they stand."""

import pytest
import torch

from kunserve.engine.cpu.kernels.ops import Finish
from kunserve_extras.vllm_body.matrices import HeadProduct, Product, is_known, put_in_panels

SHAPES = [(48, 64), (90, 32), (16, 160)]


def product_of(kind: str, weight: torch.Tensor) -> tuple[Product, torch.Tensor]:
    kept = weight.clone()
    if kind == "head":
        return HeadProduct(), kept
    return put_in_panels(kept, Finish.SWIGLU if kind == "gated" else Finish.STORE), kept


@pytest.mark.parametrize("kind", ["panels", "gated", "head"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_are_its_own(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = torch.randn(*shape).to(dtype)
    rows = torch.randn(130, shape[1]).to(dtype)
    product, kept = product_of(kind, weight)
    whole = product(rows, kept, None)
    exact = rows.double() @ weight.double().t()
    if kind == "gated":
        gate, up = exact.chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
    tolerance = 0.05 if whole.dtype == torch.bfloat16 else 2e-4
    assert torch.allclose(whole.double(), exact, atol=tolerance, rtol=tolerance)
    for first, end in [(0, 1), (5, 7), (3, 11), (90, 130), (0, 129)]:
        assert torch.equal(product(rows[first:end], kept, None), whole[first:end])


def test_a_head_gives_what_was_not_rounded() -> None:
    rows, weight = torch.randn(3, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    logits = HeadProduct()(rows, weight, None)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


def test_a_bias_is_added_and_any_number_of_dimensions_kept() -> None:
    x, weight, bias = torch.randn(2, 5, 64), torch.randn(48, 64), torch.randn(48)
    product, kept = product_of("panels", weight)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert torch.allclose(product(x, kept, bias), expected, atol=1e-4)


def test_what_the_kernels_do_not_know() -> None:
    assert is_known(torch.zeros(3, 8, dtype=torch.bfloat16))
    assert not is_known(torch.zeros(3, 4, dtype=torch.bfloat16)), "rows of 8 bytes"
    assert not is_known(torch.zeros(3, 8, dtype=torch.float16))
    assert not is_known(torch.zeros(2, 3, 8))
    assert not is_known(torch.zeros(8, 6).t())
