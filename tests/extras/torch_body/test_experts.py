"""The sparse MLP in C: against torch, and its own bits however rows share a step."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.engine.cpu.decoder import StepLimits
from kunserve.engine.cpu.kernels.packed import PackedMatrix
from kunserve.engine.cpu.scratch import Scratch, routing_bytes
from kunserve.engine.layer_weights import LayerWeights
from kunserve.engine.weights.packing import pack
from kunserve.model.experts import Experts
from kunserve.model.packed import PackedField, PackedWeights, Run, WeightFormat
from kunserve.model.spec import ModelSpec
from tests.specs import model_spec
from tests.unit.engine.cpu.test_packed import stored
from tests.unit.engine.reference_experts import add_experts, choose
from tests.unit.engine.sparse_layers import (
    HIDDEN,
    computed,
    random_layer,
    random_rows,
    sparse_spec,
)

NO_FIELDS = PackedWeights("gguf", (), (), 0, 0, 0)


def packed_layer(spec: ModelSpec, kind: WeightFormat) -> LayerWeights:
    """The same router, and quantised experts."""
    layer = random_layer(spec)
    assert spec.experts is not None
    number, hidden, inner = spec.experts.number, spec.hidden_size, spec.intermediate_size
    for name, rows, columns, each in (
        ("experts_gate_up", inner, hidden, 2),
        ("experts_down", hidden, inner, 1),
    ):
        field = PackedField(name, (Run(kind, rows),) * number, columns)
        pieces = [stored(kind, rows, columns, seed) for seed in range(number * each)]
        setattr(layer, name, PackedMatrix(torch.from_numpy(pack(field, pieces)), field))
    return layer


shapes = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


shared_sizes = st.sampled_from([None, 8, 56])


@given(
    shapes,
    st.booleans(),
    shared_sizes,
    st.integers(1, 70),
    st.integers(1, 2),
    st.integers(0, 99),
)
@settings(max_examples=15)
def test_the_kernel_is_torch(
    shape: tuple[int, int],
    normalised: bool,
    shared_size: int | None,
    num: int,
    threads: int,
    seed: int,
) -> None:
    spec = sparse_spec(*shape, normalised, shared_size=shared_size)
    layer, rows = random_layer(spec, seed), random_rows(spec, num, seed + 1)
    expected = torch.zeros_like(rows)
    add_experts(rows, expected, layer, spec)
    found = computed(spec, layer, rows, threads)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@given(
    st.sampled_from(["float32", "bfloat16"]),
    st.booleans(),
    shared_sizes,
    st.lists(st.integers(0, 59), min_size=1, max_size=80),
    st.integers(1, 3),
)
@settings(max_examples=20)
def test_a_row_does_not_depend_on_its_batch(
    dtype: str, normalised: bool, shared_size: int | None, which: list[int], threads: int
) -> None:
    spec = sparse_spec(9, 3, normalised, dtype, shared_size)
    layer, rows = random_layer(spec), random_rows(spec, 60)
    whole = computed(spec, layer, rows)
    assert torch.equal(computed(spec, layer, rows[which], threads), whole[which])


@given(
    st.sampled_from([WeightFormat.Q8_0, WeightFormat.Q4_1, WeightFormat.INT8]),
    st.lists(st.integers(0, 39), min_size=1, max_size=60),
    st.integers(1, 2),
)
@settings(max_examples=15)
def test_quantised_experts_are_those_of_torch_in_any_batch(
    kind: WeightFormat, which: list[int], threads: int
) -> None:
    spec = sparse_spec(5, 2, True, shared_size=24)
    spec = dataclasses.replace(spec, hidden_size=64, intermediate_size=96, packed=NO_FIELDS)
    layer, rows = packed_layer(spec, kind), random_rows(spec, 40)
    expected = torch.zeros_like(rows)
    add_experts(rows, expected, layer, spec)
    whole = computed(spec, layer, rows)
    torch.testing.assert_close(whole, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(computed(spec, layer, rows[which], threads), whole[which])


def test_many_rows_of_one_expert_are_cut_into_blocks() -> None:
    spec = sparse_spec(3, 1, False)
    layer, rows = random_layer(spec), random_rows(spec, 3000)
    assert layer.router is not None
    layer.router.zero_()
    found = computed(spec, layer, rows, threads=2)
    for first in (0, 1400, 2999):
        assert torch.equal(computed(spec, layer, rows[first : first + 1]), found[first : first + 1])


@pytest.mark.parametrize("normalised", [False, True])
def test_of_equal_probabilities_the_first_experts_are_chosen(normalised: bool) -> None:
    spec = sparse_spec(20, 4, normalised)
    assert spec.experts is not None
    layer, rows = random_layer(spec), random_rows(spec, 1)
    assert layer.router is not None
    layer.router[:] = 0.0
    layer.router[7] = layer.router[13] = rows[0] / HIDDEN
    chosen, weights = choose(rows @ layer.router.t(), spec.experts)
    assert chosen.tolist() == [[7, 13, 0, 1]]
    assert weights[0, 0] == weights[0, 1] > weights[0, 2] == weights[0, 3]
    expected = torch.zeros_like(rows)
    add_experts(rows, expected, layer, spec)
    torch.testing.assert_close(computed(spec, layer, rows), expected, rtol=1e-5, atol=1e-6)


def test_experts_that_nobody_chose_are_not_read() -> None:
    spec = sparse_spec(11, 2, True)
    layer, rows = random_layer(spec), random_rows(spec, 5)
    assert spec.experts is not None and layer.router is not None
    assert layer.experts_gate_up is not None and layer.experts_down is not None
    expected = computed(spec, layer, rows)
    chosen, _ = choose(rows @ layer.router.t(), spec.experts)
    idle = sorted(set(range(11)) - set(chosen.flatten().tolist()))
    assert idle
    layer.experts_gate_up.view(11, -1)[idle] = torch.nan
    layer.experts_down.view(11, -1)[idle] = torch.nan
    assert torch.equal(computed(spec, layer, rows), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_no_numbers_disturb_no_others(value: float) -> None:
    spec = sparse_spec(11, 4, True)
    layer, rows = random_layer(spec), random_rows(spec, 6)
    expected = computed(spec, layer, rows)
    rows[2] = value
    found = computed(spec, layer, rows)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], expected[others])


def test_sizes_count_all_experts_and_reads_those_that_are_touched() -> None:
    dense, spec = model_spec(), model_spec(experts=Experts(8, 2, True))
    mlp, hidden = dense.mlp_params, dense.hidden_size
    assert spec.layer_params == dense.layer_params + 7 * mlp + 8 * hidden
    assert dense.read_params(1) == dense.layer_params
    assert spec.read_params(1) == pytest.approx(spec.layer_params - 6 * mlp)
    assert spec.read_params(10_000) == pytest.approx(spec.layer_params)
    assert spec.gated_size == 2 * dense.gated_size
    shared = model_spec(experts=Experts(8, 2, True, shared_size=16))
    assert shared.layer_params == spec.layer_params + 3 * hidden * 16 + hidden
    assert shared.gated_size == spec.gated_size + 16
    wide = dataclasses.replace(spec, qk_norm=True, has_whole_qk_norm=True)
    assert wide.layer_params == spec.layer_params + spec.q_size + spec.kv_size


@pytest.mark.parametrize(("shared_size", "num_notes"), [(None, 16), (24, 19)])
def test_memory_of_steps_is_counted(shared_size: int | None, num_notes: int) -> None:
    spec = sparse_spec(8, 2, True, shared_size=shared_size)
    assert spec.experts is not None
    limits = StepLimits(num_tokens=7, num_sampled=1, num_positions=1)
    scratch = Scratch(spec, torch.float32, has_hidden=True)
    scratch.reserve(7)
    beside = spec.vocab_size * 4 + spec.hidden_size * 4 + spec.head_dim * 4
    assert scratch.num_bytes == limits.buffer_bytes(spec) - beside
    assert routing_bytes(7, spec.experts) == 4 * (7 * num_notes + 26)
