"""Quantised matrices as a device has them: they stand for what files do, in the bytes planned."""

import pytest
import torch

from kunserve.model.packed import KEPT_ON_DEVICES, PackedField, Run, WeightFormat
from kunserve_extras.torch_body.ops.reference import ReferenceOps
from kunserve_extras.torch_body.quantised import FORMS
from tests.specs import model_spec
from tests.unit.engine.device_matrices import matrix, on_device, stored, values_of

KINDS = pytest.mark.parametrize("kind", list(FORMS), ids=lambda kind: kind.name)


def test_every_format_that_is_kept_has_a_form() -> None:
    assert FORMS.keys() == KEPT_ON_DEVICES.formats


@KINDS
@pytest.mark.parametrize("rows", [16, 33])
def test_they_stand_for_what_files_do(kind: WeightFormat, rows: int) -> None:
    made, values = matrix(kind, rows, 256)
    (part,) = made.parts
    assert made.shape == (rows, 256) and torch.equal(part.widened(), values)
    which = torch.tensor([rows - 1, 0, 7, 7])
    assert torch.equal(made.gathered(which, torch.bfloat16), values[which].bfloat16())
    assert made.data.nbytes <= -(-rows // 16) * kind.panel_bytes(256)


@KINDS
def test_gate_and_up_are_one_run(kind: WeightFormat) -> None:
    """Whether files have two tensors or one."""
    both = stored(kind, 24, 128)
    scales = both.scales
    halves = [
        both._replace(
            blocks=both.blocks[i : i + 12], scales=None if scales is None else scales[i : i + 12]
        )
        for i in (0, 12)
    ]
    field = PackedField("gate_up", (Run(kind, 12),), 128)
    one, two = on_device(field, [both]), on_device(field, halves)
    assert torch.equal(one.data, two.data)
    assert torch.equal(one.parts[0].widened(), values_of(kind, both, 128))


def test_runs_of_one_format_are_one_part() -> None:
    kinds = [WeightFormat.Q4_0, WeightFormat.Q4_0, WeightFormat.Q8_0]
    pieces = [stored(kind, 17, 64, seed) for seed, kind in enumerate(kinds)]
    made = on_device(PackedField("qkv", tuple(Run(kind, 17) for kind in kinds), 64), pieces)
    assert [part.num_rows for part in made.parts] == [34, 17]
    wanted = torch.cat([values_of(*pair, 64) for pair in zip(kinds, pieces, strict=True)])
    assert torch.equal(torch.cat([part.widened() for part in made.parts]), wanted)


@KINDS
def test_products_in_plain_torch(kind: WeightFormat) -> None:
    made, values = matrix(kind, 40, 128)
    x, bias, past = (torch.randn(5, width) for width in (128, 40, 40))
    out = past.clone()
    ReferenceOps(model_spec()).product(x, made, bias[0], out, True)
    wanted = past.double() + x.double() @ values.double().t() + bias[0].double()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
