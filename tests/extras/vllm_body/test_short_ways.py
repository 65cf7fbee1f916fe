"""Norms in one call, against their arithmetic."""

import pytest
import torch

from kunserve_extras.vllm_body.short_ways import normed

EPS = 1e-5


def exactly(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
    return (wide * scale * weight.double()).to(x.dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_a_sum_is_normalised_and_given_too(dtype: torch.dtype, tolerance: float) -> None:
    """In bfloat16 two roundings of numbers below 4."""
    torch.manual_seed(0)
    x, residual = torch.rand(2, 5, 64).to(dtype).unbind()
    weight = torch.rand(64).to(dtype)
    before = residual.clone()
    found, total = normed(weight, EPS, x, residual)
    assert torch.equal(total, x + before) and torch.equal(residual, before)
    torch.testing.assert_close(found, exactly(total, weight), rtol=tolerance, atol=tolerance)


def test_heads_are_normalised_where_they_lie_among_others() -> None:
    torch.manual_seed(0)
    heads = torch.rand(5, 6, 32)[:, 1:4]
    weight = torch.rand(32)
    found = normed(weight, EPS, heads)
    assert isinstance(found, torch.Tensor) and found.shape == heads.shape
    torch.testing.assert_close(found, exactly(heads, weight))
