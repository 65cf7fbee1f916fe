"""P2: our Triton kernels and plain torch on the device, against sums in float64."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.machine import Machine
from benchmarks.report import Report, Setting
from kunserve.engine.attention import StepBatch, capped
from kunserve.engine.layer_weights import LayerWeights
from kunserve.model.experts import Experts
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.experts import add_experts
from kunserve_extras.torch_body.ops.reference import ReferenceOps
from kunserve_extras.torch_body.ops.table import DeviceBatch, Ops
from kunserve_extras.torch_body.scratch import Scratch

Shape: TypeAlias = tuple[int, int, int, int, int | None]
_NUM_LAYERS = 3
_SHAPES: list[Shape] = [  # heads, KV heads, head_dim, block size, window
    (4, 4, 64, 8, None),
    (9, 3, 64, 16, None),
    (10, 2, 128, 4, 11),
    (7, 1, 80, 16, None),
    (40, 8, 128, 64, None),
    (28, 4, 128, 128, 300),
]
_NUM_MODELS = 2
"""Of these, from the end on: shapes of models."""
_PLAIN_SHAPES = [_SHAPES[5], _SHAPES[3]]
"""For plain torch, on a device."""
_LIMITS = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest error of an output whose values are about 1."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def operations(spec: ModelSpec) -> dict[str, Ops]:
    """Plain torch, and Triton where it is installed."""
    found: dict[str, Ops] = {"torch": ReferenceOps(spec)}
    if importlib.util.find_spec("triton") is not None:
        from kunserve_extras.triton_ops.ops import TritonOps

        found["triton"] = TritonOps(spec)
    return found


def run(machine: Machine, report: Report) -> None:
    """Every shape in both types: a part each, since one that loses the device is tried again
    alone, under what finds wrong accesses.

    The shapes of models come first, then experts: compiling takes most of the time. Plain torch,
    which compiles nothing, is only seen to work here: what it computes has tests.
    """
    shapes = _SHAPES[::-1] if machine.is_real else _SHAPES[1:3]
    if machine.is_real:  # its interpreter has tests
        machine.do(
            *_shape_parts(machine, report, "triton", shapes[:_NUM_MODELS]),
            *_experts_parts(machine, report, "triton"),
            *_shape_parts(machine, report, "triton", shapes[_NUM_MODELS:]),
            *_shape_parts(machine, report, "torch", _PLAIN_SHAPES),
            *_experts_parts(machine, report, "torch"),
        )
    else:
        machine.do(
            *_shape_parts(machine, report, "torch", shapes),
            *_experts_parts(machine, report, "torch"),
        )


def _shape_parts(
    machine: Machine, report: Report, name: str, shapes: Sequence[Shape]
) -> Iterator[Part]:
    for shape in shapes:
        for dtype in _DTYPES:
            work = partial(_shape_is_right, machine, report, shape, dtype, name)
            yield Part(f"{name} {dtype} {'x'.join(map(str, shape))}", work)


def _experts_parts(machine: Machine, report: Report, name: str) -> Iterator[Part]:
    for dtype in _DTYPES:
        work = partial(_experts_are_right, machine, report, dtype, name)
        yield Part(f"{name} {dtype} experts", work)


def _shape_is_right(machine: Machine, report: Report, shape: Shape, dtype: str, name: str) -> None:
    """Fails if an error is too large."""
    spec = _spec(shape, dtype)
    errors = _errors(machine, spec, operations(spec)[name], shape[3])
    where: dict[str, Setting] = {"ops": name, "dtype": dtype, "shape": "x".join(map(str, shape))}
    _are_small(report, errors, where)


def _are_small(report: Report, errors: dict[str, float], where: dict[str, Setting]) -> None:
    for check, error_size in errors.items():
        report.add(check, error_size, "", **where)
    bad = {
        check: size for check, size in errors.items() if not size <= _LIMITS[str(where["dtype"])]
    }
    assert not bad, bad


def _experts_are_right(machine: Machine, report: Report, dtype: str, name: str) -> None:
    """A sparse MLP of few rows and of many, which have tiles of their own and the same bits."""
    hidden, inner, experts, num, few = 576, 320, Experts(16, 4, True), 130, 20
    spec = replace(
        _spec(_SHAPES[1], dtype), hidden_size=hidden, intermediate_size=inner, experts=experts
    )
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns) * columns**-0.5
        return values.to(machine.torch_device, _DTYPES[dtype])

    router, x = matrix(16, hidden), matrix(num, hidden) * hidden**0.5
    gate_up, down = matrix(32 * inner, hidden), matrix(16 * hidden, inner)
    weights = LayerWeights(x, x, x, x, router=router, experts_gate_up=gate_up, experts_down=down)
    found = {}
    for rows in (few, num):
        scratch = Scratch.of(spec, rows, machine.torch_device, has_sums=False)
        scratch.normed.copy_(x[:rows])
        found[rows] = torch.zeros_like(x[:rows])
        add_experts(found[rows], weights, spec, operations(spec)[name], scratch)
    wide = x.double().cpu()
    chosen = (wide @ router.double().cpu().t()).softmax(dim=-1).topk(experts.per_token)
    gates = torch.einsum("th,eih->tei", wide, gate_up.double().cpu().view(16, -1, hidden))
    gate, up = gates.chunk(2, dim=-1)
    every = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up,
                         down.double().cpu().view(16, hidden, -1))  # fmt: skip
    shares = chosen.values / chosen.values.sum(dim=-1, keepdim=True)
    places = chosen.indices[:, :, None].expand(-1, -1, hidden)
    exact = (every.gather(1, places) * shares[:, :, None]).sum(dim=1)
    errors = {
        "experts": _largest(found[num], exact),
        "experts of few rows against many": _largest(found[few], found[num][:few]),
    }
    _are_small(report, errors, {"ops": name, "dtype": dtype})


def _spec(shape: Shape, dtype: str) -> ModelSpec:
    heads, kv_heads, head_dim, _, window = shape
    return ModelSpec(
        name="shape", architecture="LlamaForCausalLM", num_layers=_NUM_LAYERS, hidden_size=576,
        intermediate_size=1536, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        vocab_size=160, max_position=8192, rope_theta=1e4, rms_eps=1e-5, tied_embeddings=True,
        attention_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
        rope_scaling=None, sliding_window=window, dtype=dtype,
    )  # fmt: skip


def _batch(block_size: int, longest: int) -> tuple[StepBatch, int]:
    """Prompts, chunks and single tokens, entries as low as they may be; and units needed."""
    generator = np.random.default_rng(0)
    lengths = np.array([13, 1, 6, 1, 100, 1])
    contexts = np.array([13, 20, 25, 1, 611, longest])
    width = -(-int(contexts.max()) // block_size)
    num_entries = len(lengths) * width * _NUM_LAYERS
    starts = generator.permutation(num_entries)[: len(lengths) * width] - 1
    q_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = [np.arange(c - n, c) for n, c in zip(lengths, contexts, strict=True)]
    batch = StepBatch(
        token_ids=np.zeros(int(q_starts[-1]), dtype=np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        tables=starts.reshape(len(lengths), -1).astype(np.int32),
        rows=generator.permutation(len(lengths)).astype(np.int32),
        q_starts=q_starts,
        context_lens=contexts.astype(np.int32),
        sample_rows=q_starts[1:] - 1,
    )
    return batch, num_entries + 2 * _NUM_LAYERS


def _errors(machine: Machine, spec: ModelSpec, ops: Ops, block_size: int) -> dict[str, float]:
    """The largest error of each operation."""
    device, dtype = machine.torch_device, _DTYPES[spec.dtype]
    torch.manual_seed(0)
    host, num_units = _batch(block_size, 5000 if machine.is_real else 700)
    batch = DeviceBatch.of(host, block_size, device)
    num = host.num_tokens
    kv_shape = (num_units, 2, spec.num_kv_heads, block_size, spec.head_dim)
    kv = torch.randn(kv_shape, dtype=torch.float32).to(device, dtype)
    qkv = torch.randn(num, spec.qkv_size // spec.head_dim, spec.head_dim).to(device, dtype)
    parts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    # Halves: larger values would be further apart in bfloat16 than the limit.
    norms = torch.rand(2, spec.head_dim).to(device, dtype) / 2
    turns = torch.rand(num, spec.head_dim // 2, device=device) * 6.28
    angles = torch.stack((turns.cos(), turns.sin()), dim=1)
    placed, by_torch = kv.clone(), qkv.clone()
    turned = _exactly_turned(qkv[:, : spec.num_heads], norms[0], angles, spec.rms_eps)
    heads, expected = qkv.split(parts, dim=1), by_torch.split(parts, dim=1)
    ReferenceOps(spec).place(2, expected, (norms[0], norms[1]), angles, placed, batch)
    ops.place(2, heads, (norms[0], norms[1]), angles, kv, batch)
    q = heads[0]
    out = torch.full((num, spec.q_size), 7.0, dtype=dtype, device=device)
    ops.attend(2, q, kv, batch, out)
    exact = exact_attention(spec, 2, q, kv, host, block_size)
    errors = {
        "place": _largest(kv, placed),
        "rotation": _largest(q, turned),
        "attention": _largest(out, exact),
    }
    # Alone or among others, a sequence's attention has the same bits.
    last = int(host.q_starts[-2])
    single = DeviceBatch.of(_last_alone(host), block_size, device)
    lonely = torch.zeros_like(out[last:])
    ops.attend(2, q[last:], kv, single, lonely)
    errors["attention alone against among others"] = _largest(lonely, out[last:])
    x = torch.randn(num, spec.hidden_size).to(device, dtype)
    weight = torch.rand(spec.hidden_size).to(device, dtype)
    normed, gated = torch.zeros_like(x), torch.zeros_like(x)
    ops.rms_norm(x, weight, 1e-5, normed)
    wide = x.double()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-5)
    errors["norm"] = _largest(normed, wide * scale * weight.double())
    ops.gate_mul(torch.cat((x, x.flip(1)), dim=1), gated)
    errors["activation"] = _largest(gated, torch.nn.functional.silu(wide) * wide.flip(1))
    return errors


def _exactly_turned(
    heads: torch.Tensor, weight: torch.Tensor, angles: torch.Tensor, eps: float
) -> torch.Tensor:
    """Heads [T, n, head_dim] normalised and turned, in float64."""
    wide = heads.double()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.double()
    first, second = wide.chunk(2, dim=-1)
    cos, sin = angles.double()[:, None, 0], angles.double()[:, None, 1]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _last_alone(batch: StepBatch) -> StepBatch:
    first = int(batch.q_starts[-2])
    return StepBatch(
        token_ids=batch.token_ids[first:].copy(),
        positions=batch.positions[first:].copy(),
        tables=batch.tables,
        rows=batch.rows[-1:].copy(),
        q_starts=np.array([0, batch.num_tokens - first], dtype=np.int32),
        context_lens=batch.context_lens[-1:].copy(),
        sample_rows=np.zeros(1, dtype=np.int32),
    )


def exact_attention(
    spec: ModelSpec, layer: int, q: torch.Tensor, kv: torch.Tensor, batch: StepBatch, block: int
) -> torch.Tensor:
    """[T, heads * head_dim] in float64, on the host, one token after the other."""
    queries, units = q.double().cpu(), kv.double().cpu()
    group = spec.num_heads // spec.num_kv_heads
    rows = []
    for seq, row in enumerate(batch.rows.tolist()):
        context = int(batch.context_lens[seq])
        entries = torch.from_numpy(batch.tables[row, : -(-context // block)]).long()
        blocks = units[entries + layer + spec.num_layers]
        k, v = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)
        for token in range(int(batch.q_starts[seq]), int(batch.q_starts[seq + 1])):
            end = int(batch.positions[token]) + 1
            window = spec.window_of(layer)
            begin = 0 if window is None else max(0, end - window)
            heads = queries[token].view(spec.num_kv_heads, group, spec.head_dim)
            scores = heads @ k[:, begin:end].transpose(1, 2) * spec.head_dim**-0.5
            capped(scores, spec.score_cap)
            rows.append((scores.softmax(dim=-1) @ v[:, begin:end]).flatten())
    return torch.stack(rows)


def _largest(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, of values above 1 relative to them."""
    exact = expected.double().cpu()
    return float(((got.double().cpu() - exact).abs() / exact.abs().clamp(min=1.0)).max())
