"""Products with quantised weights in Triton's interpreter, against float64 and plain torch.

``test_triton`` runs this file as it does ``interpreted_kernels``.
"""

import pytest
import torch

from kunserve.model.packed import PackedField, Run, WeightFormat
from kunserve_extras.torch_body.ops.reference import ReferenceOps
from kunserve_extras.torch_body.quantised import FORMS
from kunserve_extras.triton_ops.ops import TritonOps
from tests.specs import model_spec
from tests.unit.engine.device_matrices import matrix, on_device, stored, values_of
from tests.unit.engine.gpu_kernels import interpreted_kernels  # patches the interpreter

assert interpreted_kernels.CPU.type == "cpu"

NAMES = {torch.float32: "float32", torch.float16: "float16"}


def triton_ops(dtype: torch.dtype) -> TritonOps:
    return TritonOps(model_spec(dtype=NAMES[dtype]))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def columns_of(kind: WeightFormat) -> int:
    """Of groups several; where a row is one group, no whole step."""
    return 96 if FORMS[kind].group is None else 2 * kind.block_columns


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-6), (torch.float16, 6e-4)], ids=["float32", "float16"]
)
@pytest.mark.parametrize("kind", list(FORMS), ids=lambda kind: kind.name)
def test_products_are_those_of_the_values(
    kind: WeightFormat, dtype: torch.dtype, most: float
) -> None:
    """With a bias, with what is there already, and in every tile."""
    columns = columns_of(kind)
    weight, values = matrix(kind, 80, columns)
    generator = torch.Generator().manual_seed(0)
    for num_tokens in (1, 20, 70) if dtype is torch.float16 else (5,):
        x = torch.randn(num_tokens, columns, generator=generator).to(dtype)
        bias = torch.randn(80, generator=generator).to(dtype)
        past = torch.randn(num_tokens, 80, generator=generator).to(dtype)
        wanted = x.double() @ values.double().t()
        plain, added, reference = torch.full_like(past, 7.0), past.clone(), past.clone()
        triton_ops(dtype).product(x, weight, None, plain, False)
        assert error(plain, wanted) <= most
        triton_ops(dtype).product(x, weight, bias, added, True)
        wanted += past.double() + bias.double()
        assert error(added, wanted) <= most
        ReferenceOps(model_spec(dtype=NAMES[dtype])).product(x, weight, bias, reference, True)
        assert error(reference, wanted) <= most


@pytest.mark.parametrize(
    "kind", [WeightFormat.FP8, WeightFormat.FP8_128, WeightFormat.INT4_32], ids=lambda k: k.name
)
def test_a_token_does_not_depend_on_its_batch(kind: WeightFormat) -> None:
    """In any tile: sums within a group are exact here, so bits tell in which order groups follow.

    What tensor cores add up within a group, they do by one instruction for all tiles, which no
    interpreter has.
    """
    columns = 4 * kind.block_columns
    weight, _ = matrix(kind, 80, columns)
    x = torch.randint(-8, 9, (70, columns), generator=torch.Generator().manual_seed(0)).half()
    whole = torch.empty(70, 80, dtype=torch.float16)
    triton_ops(torch.float16).product(x, weight, None, whole, False)
    for rows in (slice(3, 4), slice(40, 57), slice(60, 70)):
        part = torch.empty(len(x[rows]), 80, dtype=torch.float16)
        triton_ops(torch.float16).product(x[rows].clone(), weight, None, part, False)
        assert torch.equal(part, whole[rows])


def test_rows_of_several_formats_lie_side_by_side() -> None:
    """What stands beside a product is left alone."""
    kinds, sizes = [WeightFormat.Q8_0, WeightFormat.Q4_0], [48, 16]
    pieces = [stored(kind, size, 64, size) for kind, size in zip(kinds, sizes, strict=True)]
    weight = on_device(PackedField("qkv", tuple(map(Run, kinds, sizes)), 64), pieces)
    values = torch.cat([values_of(*pair, 64) for pair in zip(kinds, pieces, strict=True)])
    x, bias, around = torch.randn(3, 64), torch.randn(64), torch.full((3, 70), 7.0)
    triton_ops(torch.float32).product(x, weight, bias, around[:, :64], False)
    assert error(around[:, :64], x.double() @ values.double().t() + bias.double()) < 1e-6
    assert (around[:, 64:] == 7.0).all()
