"""Calls of single kernels, in an order in which none finds its weights in a cache.

The shapes are SmolLM2-135M's, and for attention also those of a model with heads of 128. Each call
is timed by itself, and its least time over all rounds counts: the rest is other work's. An empty
call's time, which is ctypes', is taken away.
"""

import time
from collections.abc import Callable, Mapping
from ctypes import CDLL, byref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.compute.machine_limits import put_in_huge_pages
from kunserve.engine.attention import StepBatch, c_model
from kunserve.engine.cpu.kernels.ops import Finish
from kunserve.engine.cpu.kernels.packed import PackedMatrix, rounded_bytes
from kunserve.engine.cpu.kernels.panels import in_panels
from kunserve.engine.layer_weights import ModelWeights
from kunserve.model.packed import PackedField, Run, WeightFormat
from kunserve.model.spec import ModelSpec

BLOCK_SIZE = 16
FINISHES = {
    "qkv": Finish.STORE,
    "o": Finish.RESIDUAL,
    "gate_up": Finish.SWIGLU,
    "down": Finish.RESIDUAL,
}
NORMAL_BYTE = 0x11
"""Bytes that are small ordinary numbers in every format of scales and values."""
DECODES = ((16, 1000), (1, 4000))
"""Sequences of one query, and their context."""
CACHED_KEYS = 128
"""The context of a decode whose K and V stay in the L2 cache, call after call."""
PROMPTS = ((512, 512), (512, 8000))
"""Queries, and their context."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one kernel."""

    kernel: str
    run: Callable[[CDLL], object]
    flops: float
    num_bytes: float
    """Read from memory: weights, or K and V."""


def linear_calls(weights: ModelWeights, m: int, dtype: str) -> list[Call]:
    """Every matrix of every layer times ``m`` rows.

    A library that knows panels gets the matrices in panels, an older one as they are.
    """
    suffix = "bf16" if dtype == "bfloat16" else "f32"
    room = _Rows(m, weights.embedding.dtype)
    calls = []
    for layer in weights.layers:
        for field, finish in FINISHES.items():
            w = getattr(layer, field)
            n, k = w.shape[0] // (2 if finish is Finish.SWIGLU else 1), w.shape[1]
            panels = in_panels(w, is_paired=finish.is_gated)
            sizes = (None, room(n, "y"), m, n, k, int(finish))
            plain = (room(k), w.data_ptr(), *sizes)
            panelled = (room(k), panels.data.data_ptr(), *sizes, panels.num_panels)

            def run(
                library: CDLL,
                plain: Any = plain,
                panelled: Any = panelled,
                keep: object = (room, panels),
            ) -> object:
                if hasattr(library, f"kun_panel_linear_{suffix}"):
                    return getattr(library, f"kun_panel_linear_{suffix}")(*panelled)
                return getattr(library, f"kun_linear_{suffix}")(*plain)

            calls.append(Call(field, run, 2.0 * m * w.numel(), w.nbytes))
    return calls


def packed_calls(spec: ModelSpec, kind: WeightFormat, m: int) -> list[Call]:
    """The same of quantised weights in packed panels, with columns filled up to whole blocks."""
    room = _Rows(m, torch.bfloat16)
    rounded = torch.zeros(rounded_bytes(m, spec.intermediate_size), dtype=torch.uint8)
    shapes = {
        "qkv": (spec.qkv_size, spec.hidden_size),
        "o": (spec.hidden_size, spec.q_size),
        "gate_up": (spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
    }
    calls = []
    for _ in range(spec.num_layers):
        for name, (n, columns) in shapes.items():
            k = -(-columns // kind.block_columns) * kind.block_columns
            field = PackedField(name, (Run(kind, n),), k)
            data = torch.full((field.num_bytes,), NORMAL_BYTE, dtype=torch.uint8)
            matrix = PackedMatrix(data, field)
            c_matrix = matrix.as_c()
            finish = int(FINISHES[name])
            sizes = (m, n, k, finish, rounded.data_ptr())
            arguments = (room(k), byref(c_matrix), None, room(n, "y"), *sizes)
            flops = 2.0 * m * n * k * (2 if field.is_paired else 1)
            keep = (room, data, c_matrix, rounded)
            calls.append(_call(name, "kun_packed_linear_bf16", arguments, flops, data.nbytes, keep))
    return calls


def attention_calls(
    spec: ModelSpec, num_seqs: int, queries: int, context: int, *, is_huge: bool = False
) -> list[Call]:
    """The attention of every layer over one step.

    ``is_huge``: from pages of 2 MiB, and none where the system does not give them.
    """
    batch = make_batch(num_seqs, queries, context, spec.num_layers)
    num_units = num_seqs * -(-context // BLOCK_SIZE) * spec.num_layers
    unit_elements = spec.unit_bytes(BLOCK_SIZE) // spec.dtype_bytes
    dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
    memory = torch.randn(num_units * unit_elements, dtype=torch.float32).to(dtype)
    if is_huge and not put_in_huge_pages(memory):
        return []
    model = c_model(spec, memory.data_ptr(), BLOCK_SIZE)
    tokens = num_seqs * queries
    qkv = torch.randn(tokens, spec.qkv_size).to(dtype)
    out = torch.empty(tokens, spec.q_size, dtype=dtype)
    c_batch = batch.as_c(0)
    name = "kun_attention_bf16" if spec.dtype == "bfloat16" else "kun_attention_f32"
    pairs = num_seqs * (queries * context - queries * (queries - 1) / 2)
    flops = 4.0 * pairs * spec.q_size
    num_bytes = num_seqs * spec.block_bytes(1, 1) * context
    keep = (batch, memory, model, qkv, out, c_batch)
    return [
        _call(
            f"attention {spec.head_dim}",
            name,
            (byref(model), byref(c_batch), qkv.data_ptr(), out.data_ptr(), layer, 0),
            flops,
            num_bytes,
            keep,
        )
        for layer in range(spec.num_layers)
    ]


def make_batch(num_seqs: int, queries: int, context: int, num_layers: int = 30) -> StepBatch:
    """``num_seqs`` sequences of ``queries`` new tokens each, the last of ``context``."""
    blocks = -(-context // BLOCK_SIZE)
    entries = np.random.default_rng(0).permutation(num_seqs * blocks).astype(np.int32) * num_layers
    starts = np.arange(num_seqs + 1, dtype=np.int32) * queries
    return StepBatch(
        token_ids=np.arange(num_seqs * queries, dtype=np.int32) % 1000,
        positions=np.tile(np.arange(context - queries, context, dtype=np.int32), num_seqs),
        tables=entries.reshape(num_seqs, blocks),
        rows=np.arange(num_seqs, dtype=np.int32),
        q_starts=starts,
        context_lens=np.full(num_seqs, context, dtype=np.int32),
        sample_rows=starts[1:] - 1,
    )


def least_times(
    calls: list[Call],
    libraries: Mapping[str, CDLL],
    *,
    by_processor: bool,
    rounds: int = 8,
    least_s: float = 1.0,
) -> dict[str, dict[str, float]]:
    """By library and kernel: the sum over its calls of their least times.

    Libraries take turns, pass by pass. ``by_processor``: of the calling thread's processor time.
    """
    clock = time.thread_time_ns if by_processor else time.perf_counter_ns
    times = {name: np.full(len(calls), np.inf) for name in libraries}
    empty_ns = {name: _empty_ns(library, clock) for name, library in libraries.items()}
    began_s, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - began_s < least_s * len(libraries):
        for name, library in libraries.items():
            least = times[name]
            for i, call in enumerate(calls):
                started = clock()
                call.run(library)
                least[i] = min(least[i], clock() - started)
        done += 1
    found: dict[str, dict[str, float]] = {}
    for name, least in times.items():
        sums = found.setdefault(name, {})
        for call, taken in zip(calls, least - empty_ns[name], strict=True):
            sums[call.kernel] = sums.get(call.kernel, 0.0) + max(1.0, taken) / 1e9
    return found


def _empty_ns(library: CDLL, clock: Callable[[], int]) -> float:
    """What a call takes that computes nothing."""
    found = []
    for _ in range(200):
        started = clock()
        library.kun_linear_bf16(None, None, None, None, 0, 16, 16, 0)
        found.append(clock() - started)
    return float(min(found))


def _call(
    kernel: str, name: str, arguments: Any, flops: float, num_bytes: float, keep: object
) -> Call:
    def run(library: CDLL, keep: object = keep) -> object:
        return getattr(library, name)(*arguments)

    return Call(kernel, run, flops, num_bytes)


class _Rows:
    """Activations that calls share, by width."""

    def __init__(self, m: int, dtype: torch.dtype) -> None:
        self._m, self._dtype = m, dtype
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}

    def __call__(self, width: int, role: str = "x") -> int:
        """Where ``m`` rows lie."""
        if (width, role) not in self._tensors:
            rows = torch.randn(self._m, width).to(self._dtype)
            self._tensors[width, role] = rows if role == "x" else torch.zeros_like(rows)
        address: int = self._tensors[width, role].data_ptr()
        return address
