"""P5: how fast steps of a whole model are: prompts and single tokens, by batch and block size."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.gpu_kit.parts import Part
from benchmarks.gpu_phases.kernels import operations
from benchmarks.gpu_phases.machine import GIB, KIB, MIB, REHEARSED_ROUNDS, SHAPES, Machine
from benchmarks.gpu_phases.smoke import recorder_on
from benchmarks.report import Report, Setting
from kunserve.core.errors import TooLittleMemory
from kunserve.core.ids import RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.request import SamplingParams
from kunserve.core.step import SequenceStart
from kunserve.core.tokens import TokenIds
from kunserve.engine.attention import TORCH_DTYPES, StepBatch
from kunserve.engine.cpu.decoder import StepLimits
from kunserve.engine.layer_weights import LayerWeights, ModelWeights
from kunserve.engine.memory.arena import Arena
from kunserve.engine.memory.wrap import wrap
from kunserve.engine.weights.layout import end_shapes, layer_shapes
from kunserve.model.spec import ModelSpec
from kunserve_extras.torch_body.cuda.pages import DevicePages
from kunserve_extras.torch_body.decoder import TorchDecoder
from kunserve_extras.torch_body.ops.table import DeviceBatch, Ops
from kunserve_extras.torch_body.sampler import TorchSampler

_RECORD_S = 30.0
"""For graphs of steps: the largest size comes first."""
_BESIDE_BYTES = 3 * GIB
"""What steps take of a device beside weights and KV: graphs, logits, activations."""
_SLOW_ROWS = 16
"""Plain torch attends to one sequence after the other: more rows would only take time."""
_SLOW_TOKENS = 2048
"""And it keeps all scores of a prompt in memory."""


def run(machine: Machine, report: Report) -> None:
    """Steps of one token per sequence by graphs first: these are most of what is served."""
    names = ("7b", "14b") if machine.is_real else ("tiny",)
    sizes = (64, 16, 32, 128) if machine.is_real else (8, 16)
    kernels = "triton" if machine.is_real else "torch"
    first, sparse = names[0], "30b-a3b" if machine.is_real else "tiny-sparse"
    machine.do(
        *(Part(f"{n}, tokens by graphs", partial(_by_graphs, machine, report, n)) for n in names),
        Part(f"{first}, mixed steps", partial(_mixed, machine, report, first)),
        Part("drawn as Qwen asks", partial(_drawn, machine, report, first)),
        Part("prompts", partial(_prompts, machine, report, first, kernels, sizes[0])),
        Part("tokens one by one", partial(_tokens, machine, report, first, kernels, sizes[0])),
        *(Part(f"attention, blocks of {size}", partial(_attention, machine, report, first, size))
          for size in sizes),
        Part("plain torch, prompts", partial(_prompts, machine, report, first, "torch", sizes[0])),
        Part("plain torch, tokens", partial(_tokens, machine, report, first, "torch", sizes[0])),
        Part(f"{sparse}, tokens by graphs", partial(_by_graphs, machine, report, sparse)),
    )  # fmt: skip


def _context(machine: Machine) -> int:
    return 1024 if machine.is_real else 40


def _batches(machine: Machine, ops: str) -> list[int]:
    few = (1, 8, 16, 32, 64, 128, 256) if machine.is_real else (1, 4)
    return [num for num in few if ops != "torch" or num <= _SLOW_ROWS]


def fitting(wanted: Sequence[int], most: int) -> tuple[int, ...]:
    """Of these batches those of up to ``most`` rows; for the largest, where it is more than that,
    the largest power of two.
    """
    assert sorted(wanted) == list(wanted), wanted
    fit = [rows for rows in wanted if rows <= most]
    power = 1 << most.bit_length() - 1 if most > 0 else 0
    if wanted[-1] > most and power and power not in fit:
        fit.append(power)
    return tuple(sorted(fit))


def _rows_that_fit(machine: Machine, spec: ModelSpec, block_size: int, context: int) -> int:
    """Sequences of that context whose KV fits beside weights that are there already."""
    free_bytes, _ = machine.driver().memory_bytes()
    beside_bytes = _BESIDE_BYTES if machine.is_real else 0
    row_bytes = -(-(context + block_size) // block_size) * spec.block_bytes(block_size)
    return max(0, free_bytes - beside_bytes) // row_bytes


@contextlib.contextmanager
def _decoder(
    machine: Machine, name: str, ops: str, block_size: int, num_tokens: int
) -> Iterator[TorchDecoder]:
    """A model with random weights that records nothing, and KV memory for so many tokens."""
    spec = SHAPES[name]
    weights = _random_weights(spec, machine.torch_device)
    with kv_cache(machine, spec, num_tokens, block_size) as kv:
        yield TorchDecoder(spec, weights, kv, block_size, operations(spec)[ops])


@contextlib.contextmanager
def _recorded(
    machine: Machine, name: str, wanted: Sequence[int]
) -> Iterator[tuple[TorchDecoder, tuple[int, ...]]]:
    """One whose steps are recorded, and which of the batches wanted fit into the memory left.

    Raises TooLittleMemory.
    """
    spec, context = SHAPES[name], _context(machine)
    block_size, ops = _recorded_with(machine)
    weights = _random_weights(spec, machine.torch_device)
    batches = fitting(wanted, _rows_that_fit(machine, spec, block_size, context))
    if not batches:
        raise TooLittleMemory(f"no sequence of {context} tokens fits beside {spec.name}'s weights")
    most = batches[-1]
    with kv_cache(machine, spec, most * (context + block_size), block_size) as kv:
        recorder = recorder_on(machine)
        decoder = TorchDecoder(spec, weights, kv, block_size, operations(spec)[ops], recorder)
        num_tokens = 512 if machine.is_real else 48
        decoder.reserve(StepLimits(num_tokens, most, context + 1), _RECORD_S)
        yield decoder, batches


def _recorded_with(machine: Machine) -> tuple[int, str]:
    """Block size, and operations."""
    return (64, "triton") if machine.is_real else (8, "torch")


def _by_graphs(machine: Machine, report: Report, name: str) -> None:
    """Whole steps, the device's part of them alone, and what the host leaves it idle."""
    spec, context = SHAPES[name], _context(machine)
    block_size, _ = _recorded_with(machine)
    wanted = (1, 32, 256) if machine.is_real else (1, 4)
    report.add("layers", spec.num_layers, "", model=spec.name)
    with _recorded(machine, name, wanted) as (decoder, batches):
        counts = decoder.graph_counts
        assert counts is not None
        report.add("graphs recorded", counts.recorded, "", model=spec.name)
        report.add("largest batch", batches[-1], "rows", model=spec.name)
        for num in batches:
            batch = single_tokens(spec, num, context, block_size)
            before = counts.steps
            by_layers = machine.seconds(partial(_step, decoder, batch), 20)
            assert counts.steps > before, "no step used a graph"
            before = counts.whole_steps
            whole, asked = machine.seconds(partial(decoder.ask_whole, batch), 20)
            assert counts.whole_steps > before, "no step was one graph"
            layers = _layers_s(machine, decoder, num)
            where: dict[str, Setting] = {"model": spec.name, "batch": num, "context": context}
            report.add("step by one graph", whole * 1e3, "ms", **where)
            report.add("step by graphs of layers", by_layers[0] * 1e3, "ms", **where)
            report.add("of that the host asks", by_layers[1] * 1e3, "ms", **where)
            report.add("its layers on the device", layers * 1e3, "ms", **where)
            report.add("of it the host asks", asked * 1e3, "ms", graphs=True, **where)
            read = _bytes_read(spec, num, context)
            report.add("step reads", read / whole / 1e9, "GB/s", graphs=True, **where)


def _mixed(machine: Machine, report: Report, name: str) -> None:
    """Steps as bursts have them, of decodes and a chunk of a prompt: by graphs, and without."""
    spec, block_size = SHAPES[name], _recorded_with(machine)[0]
    num_decodes, chunks = (63, (32, 128, 256, 448)) if machine.is_real else (2, (4, 16))
    with _recorded(machine, name, (num_decodes + 1,)) as (decoder, (num_seqs,)):
        recorded, counts = decoder._recorded, decoder.graph_counts
        assert counts is not None
        for chunk in chunks:
            lengths = [1] * (num_seqs - 1) + [chunk]
            batch = _batch(spec, lengths, _context(machine), block_size)
            for is_recorded in (True, False):
                decoder._recorded = recorded if is_recorded else []
                before = counts.mixed_steps
                whole, asked = machine.seconds(partial(_step, decoder, batch), 20)
                assert (counts.mixed_steps > before) == is_recorded
                where: dict[str, Setting] = {"model": spec.name, "decodes": num_seqs - 1}
                where |= {"prompt_tokens": chunk, "graphs": is_recorded}
                report.add("mixed step", whole * 1e3, "ms", **where)
                report.add("of it the host asks for", asked * 1e3, "ms", **where)


def _layers_s(machine: Machine, decoder: TorchDecoder, num: int) -> float:
    """All layers of a step, asked for without waiting in between: the device never idles."""
    graphs, rounds = decoder._recorded[0][0], 10 if machine.is_real else REHEARSED_ROUNDS
    assert graphs is not None
    rows = graphs.rows_for(num)
    assert rows is not None
    whole = LayerRange(0, decoder._spec.num_layers)

    def several() -> None:
        for _ in range(rounds):
            graphs.launch(rows, whole)

    return machine.seconds(several, 3)[0] / rounds


def _step(decoder: TorchDecoder, batch: StepBatch) -> None:
    decoder.logits(batch, decoder.forward(batch, decoder.embed(batch))).argmax(dim=1)


def _bytes_read(spec: ModelSpec, num: int, context: int) -> int:
    layer_bytes = spec.layer_bytes
    if spec.experts is not None:  # of those that so many tokens touch
        layer_bytes = int(spec.read_params(num) * spec.dtype_bytes)
    read = spec.num_layers * layer_bytes + spec.head_bytes
    return read + num * context * spec.num_layers * spec.unit_bytes(1)


def _drawn(machine: Machine, report: Report, name: str) -> None:
    """The sampler alone: greedy, and with what Qwen2.5-Instruct's generation config asks for."""
    spec = SHAPES[name]
    ways = {
        "greedy": SamplingParams(max_tokens=9, temperature=0.0),
        "Qwen's own": SamplingParams(
            max_tokens=9, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, seed=0
        ),
    }
    for num in (1, 32, 256) if machine.is_real else (1, 4):
        logits = torch.randn(num, spec.vocab_size, device=machine.torch_device)
        ids = [RequestId(str(row)) for row in range(num)]
        for way, sampling in ways.items():
            sampler = TorchSampler((2,), spec.vocab_size, device=machine.torch_device)
            for one in ids:
                sampler.start(SequenceStart(one, sampling, 64, TokenIds(range(64))))
            steps = itertools.count()
            seconds, _ = machine.seconds(partial(_sample, sampler, logits, ids, steps), 5)
            report.add("sampled in", seconds * 1e3, "ms", way=way, batch=num)


def _sample(
    sampler: TorchSampler, logits: torch.Tensor, ids: list[RequestId], steps: Iterator[int]
) -> None:
    sampler.sample(logits, ids, [next(steps)] * len(ids))


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
    """The last tokens of sequences whose blocks lie in random order; no two are alike, or they
    would go to the same experts.
    """
    num, width = len(lengths), -(-context // block_size)
    starts = np.random.default_rng(0).permutation(num * width) * spec.num_layers
    q_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return StepBatch(
        token_ids=np.arange(q_starts[-1], dtype=np.int32) % np.int32(spec.vocab_size),
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
    return machine.seconds(partial(_step, decoder, batch), rounds)


def _prompts(machine: Machine, report: Report, name: str, ops: str, block_size: int) -> None:
    spec, lengths = SHAPES[name], [512, 2048, 8192] if machine.is_real else [16, 48]
    if ops == "torch":
        lengths = [length for length in lengths if length <= _SLOW_TOKENS]
    with _decoder(machine, name, ops, block_size, max(lengths)) as decoder:
        for length in lengths:
            batch = _batch(spec, [length], length, block_size)
            whole, _ = _step_seconds(machine, decoder, batch, 5)
            pairs = length * (length + 1) // 2
            flops = 2 * spec.num_layers * spec.layer_params * length
            flops += 4 * spec.num_layers * spec.q_size * pairs
            where: dict[str, Setting] = {"ops": ops, "block_size": block_size}
            where["prompt_tokens"] = length
            report.add("prompt", whole * 1e3, "ms", **where)
            report.add("prompt speed", flops / whole / 1e12, "TFLOP/s", **where)


def _tokens(machine: Machine, report: Report, name: str, ops: str, block_size: int) -> None:
    spec, context, batches = SHAPES[name], _context(machine), _batches(machine, ops)
    room = max(batches) * (context + block_size)
    with _decoder(machine, name, ops, block_size, room) as decoder:
        for num in batches:
            batch = single_tokens(spec, num, context, block_size)
            whole, asked = _step_seconds(machine, decoder, batch, 10)
            where: dict[str, Setting] = {"ops": ops, "block_size": block_size, "batch": num}
            where["context"] = context
            report.add("step", whole * 1e3, "ms", **where)
            report.add("of it the host asks", asked * 1e3, "ms", **where)
            read = _bytes_read(spec, num, context)
            report.add("step reads", read / whole / 1e9, "GB/s", **where)


def _attention(machine: Machine, report: Report, name: str, block_size: int) -> None:
    """Attention alone, all layers in turn, so that no cache of the device holds the KV."""
    spec, context = SHAPES[name], _context(machine)
    served = "triton" if machine.is_real else "torch"
    ops, dtype = operations(spec)[served], TORCH_DTYPES[spec.dtype]
    batches = _batches(machine, served)
    shape = (-1, 2, spec.num_kv_heads, block_size, spec.head_dim)
    with kv_cache(machine, spec, max(batches) * (context + block_size), block_size) as kv_bytes:
        kv = kv_bytes.view(dtype).view(shape)
        for num in batches:
            host = single_tokens(spec, num, context, block_size)
            batch = DeviceBatch.of(host, block_size, machine.torch_device)
            q = torch.randn(num, spec.num_heads, spec.head_dim, device=machine.torch_device)
            q = q.to(dtype)
            out = torch.empty(num, spec.q_size, dtype=dtype, device=machine.torch_device)
            whole, _ = machine.seconds(partial(_attend, ops, spec, q, kv, batch, out), 10)
            read = num * context * spec.num_layers * spec.unit_bytes(1)
            where: dict[str, Setting] = {"block_size": block_size, "batch": num}
            where["context"] = context
            report.add("attention alone reads", read / whole / 1e9, "GB/s", **where)


def _attend(
    ops: Ops,
    spec: ModelSpec,
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: DeviceBatch,
    out: torch.Tensor,
) -> None:
    for layer in range(spec.num_layers):
        ops.attend(layer, q, kv, batch, out)
