"""The Triton kernels of sparse MLPs in Triton's interpreter, against plain torch and the CPU's own.

``test_triton`` runs this file as it does ``interpreted_kernels``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kunserve.engine.layer_weights import LayerWeights
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.experts import add_experts
from kunserve_extras.torch_body.ops.reference import ReferenceOps
from kunserve_extras.torch_body.ops.table import Ops
from kunserve_extras.torch_body.scratch import Scratch
from kunserve_extras.triton_ops import expert_ops
from kunserve_extras.triton_ops.ops import TritonOps
from tests.unit.engine.gpu_kernels.interpreted_kernels import CPU
from tests.unit.engine.reference_experts import add_experts as add_experts_plainly
from tests.unit.engine.sparse_layers import computed, random_layer, random_rows, sparse_spec

TABLES: tuple[Callable[[ModelSpec], Ops], ...] = (ReferenceOps, TritonOps)


def added(
    table: Callable[[ModelSpec], Ops],
    spec: ModelSpec,
    layer: LayerWeights,
    rows: torch.Tensor,
    first_expert: int = 0,
    parts: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """What a table adds to a residual stream of zeros; a rank leaves its part of the sums, too."""
    hidden = torch.zeros_like(rows)
    has_sums = parts is not None
    scratch = Scratch.of(spec, len(rows) + 3, CPU, has_sums=has_sums).first(len(rows))
    assert scratch.experts is not None
    scratch.experts.products.fill_(torch.nan)  # whatever was there
    scratch.normed.copy_(rows)
    add_up = None if parts is None else partial(_keep, parts)
    add_experts(hidden, layer, spec, table(spec), scratch, first_expert, add_up)
    return hidden


def _keep(parts: list[torch.Tensor], sums: torch.Tensor) -> None:
    parts.append(sums.clone())


@given(
    st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, min(n, 4)))),
    st.booleans(),
    st.sampled_from([None, 8, 56]),
    st.integers(1, 24),
    st.integers(0, 99),
)
@example((1, 1), True, None, 1, 0)
@settings(max_examples=2, deadline=None)
def test_they_give_what_a_cpu_does(
    shape: tuple[int, int], normalised: bool, shared_size: int | None, num: int, seed: int
) -> None:
    spec = sparse_spec(*shape, normalised, shared_size=shared_size)
    layer, rows = random_layer(spec, seed), random_rows(spec, num, seed + 1)
    expected = computed(spec, layer, rows)
    for table in TABLES:
        found = added(table, spec, layer, rows)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@given(
    st.sampled_from(["float32", "float16"]), st.lists(st.integers(0, 19), min_size=1, max_size=50)
)
@example("float32", [7])
@example("float16", [7])
@settings(max_examples=2, deadline=None)
def test_a_row_does_not_depend_on_its_batch(dtype: str, which: list[int]) -> None:
    """Nor on the tile that it is in. The interpreter cannot multiply bfloat16."""
    spec, layer, rows, whole = twenty_rows(dtype)
    assert torch.equal(added(TritonOps, spec, layer, rows[which]), whole[which])


@cache
def twenty_rows(dtype: str) -> tuple[ModelSpec, LayerWeights, torch.Tensor, torch.Tensor]:
    """A model, a layer, rows, and what is added to all of them at once."""
    spec = sparse_spec(5, 2, True, dtype)
    layer, rows = random_layer(spec), random_rows(spec, 20)
    return spec, layer, rows, added(TritonOps, spec, layer, rows)


def test_tiles_for_many_rows_give_what_those_for_few_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits on a device, whose instruction is the same (``sass``). NumPy's sums differ."""
    spec = sparse_spec(4, 2, True, "float16")
    few, many = (
        expert_ops.expert_tiles("float16", are_many=are_many) for are_many in (False, True)
    )
    assert few.gate.piece == many.gate.piece and few.down.piece == many.down.piece
    layer, rows = random_layer(spec), random_rows(spec, 30)
    found = []
    for least in (1, 99):
        monkeypatch.setattr(expert_ops, "LEAST_MANY", least)
        found.append(added(TritonOps, spec, layer, rows))
    torch.testing.assert_close(*found, rtol=0, atol=2e-3)
    expected = torch.zeros(rows.shape)
    wide = replace(spec, dtype="float32")
    add_experts_plainly(rows.float(), expected, in_float32(layer), wide)
    torch.testing.assert_close(found[0].float(), expected, rtol=0, atol=4e-3)


def in_float32(layer: LayerWeights) -> LayerWeights:
    names = ("router", "experts_gate_up", "experts_down")
    return replace(layer, **{name: getattr(layer, name).float() for name in names})


def test_one_expert_may_have_all_rows_and_others_none() -> None:
    """Whose weights are not read."""
    spec = sparse_spec(6, 1, False)
    layer, rows = random_layer(spec), random_rows(spec, 35)
    assert layer.router is not None
    layer.router.zero_()
    layer.router[4] = rows.mean(0)
    rows += 9 * layer.router[4]
    for name in ("experts_gate_up", "experts_down"):
        each = getattr(layer, name).view(6, -1)
        each[[0, 1, 2, 3, 5]] = torch.nan
    expected = computed(spec, layer, rows)
    assert not expected.isnan().any()
    torch.testing.assert_close(added(TritonOps, spec, layer, rows), expected, rtol=1e-4, atol=1e-5)


def test_of_equal_probabilities_the_first_experts_are_chosen() -> None:
    spec = sparse_spec(20, 4, True)
    layer, rows = random_layer(spec), random_rows(spec, 1)
    assert layer.router is not None
    layer.router.zero_()
    layer.router[7] = layer.router[13] = rows[0] / spec.hidden_size
    for table in TABLES:
        scratch = Scratch.of(spec, 1, CPU, has_sums=False)
        assert scratch.experts is not None
        table(spec).route(rows, layer.router, 0, scratch.experts)
        assert scratch.experts.chosen.tolist() == [[0, 1, 7, 13]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_rows_that_are_no_numbers_disturb_no_others(value: float) -> None:
    spec = sparse_spec(5, 2, True)
    layer, rows = random_layer(spec), random_rows(spec, 6)
    expected = added(TritonOps, spec, layer, rows)
    rows[2] = value
    found = added(TritonOps, spec, layer, rows)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("table", TABLES)
def test_ranks_have_some_experts_each(table: Callable[[ModelSpec], Ops]) -> None:
    """Their parts are the whole; what they do not hold they skip."""
    spec = sparse_spec(8, 3, True)
    layer, rows = random_layer(spec), random_rows(spec, 9)
    assert spec.experts is not None
    rank = replace(spec, experts=replace(spec.experts, num_owners=4))
    parts: list[torch.Tensor] = []
    for first in range(0, 8, 2):
        own = replace(
            layer,
            experts_gate_up=layer.experts_gate_up.view(8, -1, spec.hidden_size)[first : first + 2]
            .flatten(0, 1),
            experts_down=layer.experts_down.view(8, spec.hidden_size, -1)[first : first + 2]
            .flatten(0, 1),
        )  # fmt: skip
        assert not added(table, rank, own, rows, first, parts).isnan().any()
    expected = computed(spec, layer, rows)
    torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)
