"""P5: how fast steps of a whole model are: prompts and single tokens, by batch and block size."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.gpu_phases.kernels import operations
from benchmarks.gpu_phases.machine import GIB, KIB, MIB, SHAPES, Machine
from benchmarks.report import Report, Setting
from kunserve.engine.attention import TORCH_DTYPES, StepBatch
from kunserve.engine.cpu.decoder import StepLimits
from kunserve.engine.layer_weights import LayerWeights, ModelWeights
from kunserve.engine.memory.arena import Arena
from kunserve.engine.memory.wrap import wrap
from kunserve.engine.torch.cuda.pages import DevicePages
from kunserve.engine.torch.decoder import TorchDecoder
from kunserve.engine.torch.ops.table import DeviceBatch, Ops
from kunserve.engine.weights.layout import end_shapes, layer_shapes
from kunserve.model.spec import ModelSpec

_SLOW_ROWS = 16
"""Plain torch attends to one sequence after the other: more rows would only take time."""
_SLOW_TOKENS = 2048
"""And it keeps all scores of a prompt in memory."""


def run(machine: Machine, report: Report) -> None:
    """A 7B model, or a smaller one where it does not fit; Triton's kernels beside plain torch."""
    spec = SHAPES[_shape(machine)]
    report.add("layers", spec.num_layers, "", model=spec.name)
    weights = _random_weights(spec, machine.torch_device)
    prompts = (512, 2048, 8192) if machine.is_real else (16, 48)
    batches = (1, 8, 16, 32, 64, 128, 256) if machine.is_real else (1, 4)
    context = 1024 if machine.is_real else 40
    block_sizes = (64, 16, 32, 128) if machine.is_real else (8, 16)
    for block_size in block_sizes:
        num_tokens = max(*prompts, max(batches) * (context + block_size))
        with kv_cache(machine, spec, num_tokens, block_size) as kv:
            for name, ops in operations(spec).items():
                if name == "triton" and not machine.is_real:
                    continue
                if name == "torch" and block_size != block_sizes[0]:
                    continue
                decoder = TorchDecoder(spec, weights, kv, block_size, ops)
                short = tuple(p for p in prompts if name != "torch" or p <= _SLOW_TOKENS)
                _prompts(machine, report, spec, decoder, (name, block_size), short)
                few = [b for b in batches if name != "torch" or b <= _SLOW_ROWS]
                _tokens(machine, report, spec, decoder, (name, block_size), few, context)
                if name != "torch":
                    _attention(machine, report, spec, ops, kv, block_size, few, context)


def _shape(machine: Machine) -> str:
    """The largest model whose weights, and the KV of the largest batch, the device can hold."""
    if not machine.is_real:
        return "tiny"
    free_bytes, _ = machine.driver().memory_bytes()
    return "7b" if free_bytes > 56 * GIB else "1.5b"


def _random_weights(spec: ModelSpec, device: torch.device) -> ModelWeights:
    dtype = TORCH_DTYPES[spec.dtype]

    def fill(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02)
            for name, shape in shapes.items()
        }

    torch.manual_seed(0)
    ends = fill(end_shapes(spec))
    layers = [LayerWeights(**fill(layer_shapes(spec))) for _ in range(spec.num_layers)]
    embedding = ends["embedding"]
    return ModelWeights(embedding, layers, ends["final_norm"], ends.get("head", embedding))


@contextlib.contextmanager
def kv_cache(
    machine: Machine, spec: ModelSpec, num_tokens: int, block_size: int
) -> Iterator[torch.Tensor]:
    """The bytes of an instance's units over granules of its driver, all of them mapped."""
    granule_bytes = 64 * MIB if machine.is_real else 64 * KIB
    blocks = -(-num_tokens // block_size) + 1
    num_bytes = (blocks + 1) * spec.block_bytes(block_size)
    num = -(-num_bytes // granule_bytes)
    arena = Arena(DevicePages(machine.driver(), num * granule_bytes, granule_bytes, GIB // 8))
    try:
        units = arena.reserve("kv", num * granule_bytes)
        arena.map(units, 0, arena.take(num))
        unit_bytes = spec.unit_bytes(block_size)
        kv = wrap(units.base_address, num_bytes // unit_bytes * unit_bytes, machine.torch_device)
        kv.zero_()
        yield kv
        machine.synchronize()
    finally:
        arena.close()


def _batch(spec: ModelSpec, lengths: list[int], context: int, block_size: int) -> StepBatch:
    """The last tokens of sequences whose blocks lie in random order."""
    num, width = len(lengths), -(-context // block_size)
    starts = np.random.default_rng(0).permutation(num * width) * spec.num_layers
    q_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return StepBatch(
        token_ids=np.zeros(int(q_starts[-1]), dtype=np.int32),
        positions=np.concatenate(
            [np.arange(context - length, context) for length in lengths]
        ).astype(np.int32),
        tables=starts.reshape(num, width).astype(np.int32),
        rows=np.arange(num, dtype=np.int32),
        q_starts=q_starts,
        context_lens=np.full(num, context, dtype=np.int32),
        sample_rows=q_starts[1:] - 1,
    )


def single_tokens(spec: ModelSpec, num: int, context: int, block_size: int) -> StepBatch:
    """A token of each of so many sequences."""
    return _batch(spec, [1] * num, context, block_size)


def _step_seconds(
    machine: Machine, decoder: TorchDecoder, batch: StepBatch, rounds: int
) -> tuple[float, float]:
    decoder.reserve(StepLimits(batch.num_tokens, len(batch.rows), int(batch.positions.max()) + 1))

    def step() -> None:
        decoder.logits(batch, decoder.forward(batch, decoder.embed(batch))).argmax(dim=1)

    return machine.seconds(step, rounds)


def _prompts(
    machine: Machine,
    report: Report,
    spec: ModelSpec,
    decoder: TorchDecoder,
    settings: tuple[str, int],
    prompts: tuple[int, ...],
) -> None:
    ops, block_size = settings
    for length in prompts:
        batch = _batch(spec, [length], length, block_size)
        whole, _ = _step_seconds(machine, decoder, batch, 5)
        pairs = length * (length + 1) // 2
        flops = 2 * spec.num_layers * spec.layer_params * length
        flops += 4 * spec.num_layers * spec.q_size * pairs
        where: dict[str, Setting] = {"ops": ops, "block_size": block_size, "prompt_tokens": length}
        report.add("prompt", whole * 1e3, "ms", **where)
        report.add("prompt speed", flops / whole / 1e12, "TFLOP/s", **where)


def _tokens(
    machine: Machine,
    report: Report,
    spec: ModelSpec,
    decoder: TorchDecoder,
    settings: tuple[str, int],
    batches: list[int],
    context: int,
) -> None:
    ops, block_size = settings
    for num in batches:
        batch = single_tokens(spec, num, context, block_size)
        whole, asked = _step_seconds(machine, decoder, batch, 10)
        read = spec.num_layers * spec.layer_bytes + spec.head_bytes
        read += num * context * spec.num_layers * spec.unit_bytes(1)
        where: dict[str, Setting] = {
            "ops": ops,
            "block_size": block_size,
            "batch": num,
            "context": context,
        }
        report.add("step", whole * 1e3, "ms", **where)
        report.add("of it the host asks", asked * 1e3, "ms", **where)
        report.add("step reads", read / whole / 1e9, "GB/s", **where)


def _attention(
    machine: Machine,
    report: Report,
    spec: ModelSpec,
    ops: Ops,
    kv_bytes: torch.Tensor,
    block_size: int,
    batches: list[int],
    context: int,
) -> None:
    """Attention alone, all layers in turn, so that no cache of the device holds the KV."""
    dtype = TORCH_DTYPES[spec.dtype]
    shape = (-1, 2, spec.num_kv_heads, block_size, spec.head_dim)
    kv = kv_bytes.view(dtype).view(shape)
    for num in batches:
        host = single_tokens(spec, num, context, block_size)
        batch = DeviceBatch.of(host, block_size, machine.torch_device)
        q = torch.randn(num, spec.num_heads, spec.head_dim, device=machine.torch_device).to(dtype)
        out = torch.empty(num, spec.q_size, dtype=dtype, device=machine.torch_device)

        def attend(
            q: torch.Tensor = q, batch: DeviceBatch = batch, out: torch.Tensor = out
        ) -> None:
            for layer in range(spec.num_layers):
                ops.attend(layer, q, kv, batch, out)

        whole, _ = machine.seconds(attend, 10)
        read = num * context * spec.num_layers * spec.unit_bytes(1)
        where: dict[str, Setting] = {"block_size": block_size, "batch": num, "context": context}
        report.add("attention alone reads", read / whole / 1e9, "GB/s", **where)
