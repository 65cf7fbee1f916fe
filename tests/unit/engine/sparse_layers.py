"""Random layers of sparse MLPs, and what the kernel for CPUs makes of rows."""

import torch

from kunserve.engine.attention import TORCH_DTYPES, c_model
from kunserve.engine.cpu.kernels.library import kernel, set_num_threads
from kunserve.engine.cpu.scratch import Scratch
from kunserve.engine.layer_weights import LayerWeights, as_c
from kunserve.model.experts import Experts
from kunserve.model.spec import ModelSpec
from tests.specs import model_spec

HIDDEN, INNER = 72, 40


def sparse_spec(
    number: int,
    per_token: int,
    normalised: bool,
    dtype: str = "float32",
    shared_size: int | None = None,
) -> ModelSpec:
    experts = Experts(number, per_token, normalised, shared_size)
    return model_spec(hidden_size=HIDDEN, intermediate_size=INNER, experts=experts, dtype=dtype)


def random_layer(spec: ModelSpec, seed: int = 0) -> LayerWeights:
    assert spec.experts is not None
    generator, number = torch.Generator().manual_seed(seed), spec.experts.number
    shared = spec.experts.shared_size

    hidden, inner = spec.hidden_size, spec.intermediate_size

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return values.to(TORCH_DTYPES[spec.dtype])

    none = torch.empty(0)
    return LayerWeights(
        none,
        none,
        none,
        none,
        router=matrix(spec.experts.num_logits, hidden),
        experts_gate_up=matrix(number * 2 * inner, hidden),
        experts_down=matrix(number * hidden, inner),
        shared_gate_up=None if shared is None else matrix(2 * shared, hidden),
        shared_down=None if shared is None else matrix(hidden, shared),
    )


def random_rows(spec: ModelSpec, num: int, seed: int = 1) -> torch.Tensor:
    rows = torch.randn(num, spec.hidden_size, generator=torch.Generator().manual_seed(seed))
    return rows.to(TORCH_DTYPES[spec.dtype])


def computed(
    spec: ModelSpec, layer: LayerWeights, rows: torch.Tensor, threads: int = 1
) -> torch.Tensor:
    """What the kernel adds to a residual stream of zeros."""
    dtype = TORCH_DTYPES[spec.dtype]
    scratch, hidden = Scratch(spec, dtype), torch.zeros_like(rows)
    scratch("normed", len(rows)).copy_(rows)
    set_num_threads(threads)
    buffers = scratch.as_c(hidden)
    kernel("kun_experts", dtype)(c_model(spec, 0, 8), as_c(layer), buffers, len(rows))
    set_num_threads(1)
    return hidden
