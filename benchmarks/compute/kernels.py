"""Kernel speed beside this machine's limits, against torch, and as whole steps.

    python -m benchmarks.compute.kernels [--threads 1 2] [--figure roofline.png] [--skip-torch]
    python -m benchmarks.compute.kernels --other ../another/checkout [--rows 8 16 32]
    python -m benchmarks.compute.kernels --level x86-64-v3 [x86-64-v4 ...]

Every kernel and shape of SmolLM2-135M, and attention with heads of 128: what it achieves, and that
as a share of the lower one of two limits, which are measured in the same run (memory that is only
read, and products of registers). Each call's least time counts, so other work on the machine
matters little; weights are those of all layers, so they come from memory. ``--other`` compiles
another checkout's kernels and calls both in turns, on one thread by its processor time.
``--level`` does the same with the kernels that other kinds of processors get, on this one.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.compute.kernel_calls import (
    BLOCK_SIZE,
    CACHED_KEYS,
    DECODES,
    PROMPTS,
    Call,
    attention_calls,
    least_times,
    linear_calls,
    make_batch,
    packed_calls,
)
from benchmarks.compute.machine_limits import Lies, Limits, measure_limits
from benchmarks.report import Report, Setting
from kunserve.core.errors import ConfigError
from kunserve.engine.attention import TORCH_DTYPES
from kunserve.engine.cpu.decoder import Decoder
from kunserve.engine.cpu.kernels.build import build, build_level
from kunserve.engine.cpu.kernels.levels import level_named
from kunserve.engine.cpu.kernels.library import library, load, set_num_threads
from kunserve.engine.cpu.kernels.panels import in_panels
from kunserve.engine.layer_weights import LayerWeights, ModelWeights
from kunserve.model.packed import WeightFormat
from kunserve.model.spec import ModelSpec
from tests.specs import SMOLLM2_135M

ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
PACKED_ROWS = (1, 8, 32, 512)
REST_S = 0.02
"""Pause before torch's turn is over, while its workers stop spinning."""


def smollm2(dtype: str) -> ModelSpec:
    """SmolLM2-135M's shape."""
    return replace(SMOLLM2_135M, dtype=dtype)


def random_weights(spec: ModelSpec) -> ModelWeights:
    """A model of noise."""
    dtype, hidden = TORCH_DTYPES[spec.dtype], spec.hidden_size

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns).mul(columns**-0.5).to(dtype)

    ones = torch.ones(hidden, dtype=dtype)
    layers = [
        LayerWeights(
            input_norm=ones,
            qkv=matrix(spec.qkv_size, hidden),
            o=matrix(hidden, spec.q_size),
            post_norm=ones,
            gate_up=matrix(2 * spec.intermediate_size, hidden),
            down=matrix(hidden, spec.intermediate_size),
        )
        for _ in range(spec.num_layers)
    ]
    embedding = matrix(spec.vocab_size, hidden)
    return ModelWeights(embedding, layers, ones, embedding)


def held_by_engines(weights: ModelWeights) -> ModelWeights:
    """The same, with matrices in panels."""
    embedding = in_panels(weights.embedding)
    layers = [
        dataclasses.replace(
            layer,
            qkv=in_panels(layer.qkv),
            o=in_panels(layer.o),
            gate_up=in_panels(layer.gate_up, is_paired=True),
            down=in_panels(layer.down),
        )
        for layer in weights.layers
    ]
    return ModelWeights(embedding, layers, weights.final_norm, embedding)


class Case(NamedTuple):
    """Calls that are timed in one go."""

    kind: str
    label: str
    dtype: str
    calls: list[Call]
    lies: Lies = "small pages"


def cases(spec: ModelSpec, weights: ModelWeights, args: argparse.Namespace) -> Iterator[Case]:
    """One at a time, because each takes memory."""
    if "linear" in args.kinds:
        for m in args.rows:
            yield Case("linear", f"{m} rows", spec.dtype, linear_calls(weights, m, spec.dtype))
    if "quantised" in args.kinds and spec.dtype == "bfloat16":
        for name in args.types:
            for m in [m for m in args.rows if m in PACKED_ROWS]:
                calls = packed_calls(spec, WeightFormat[name], m)
                yield Case("quantised", f"{name}, {m} rows", "int8", calls)
    if "attention" in args.kinds:
        wide = replace(spec, num_heads=32, num_kv_heads=8, head_dim=128, num_layers=2)
        for num_seqs, context in DECODES:
            both: list[tuple[str, Lies]] = [("4 KiB", "small pages"), ("2 MiB", "huge pages")]
            for pages, lies in both:
                label = f"{num_seqs} x {context} keys, {pages} pages"
                for model in (spec, replace(wide, num_layers=4)):
                    is_huge = lies == "huge pages"
                    calls = attention_calls(model, num_seqs, 1, context, is_huge=is_huge)
                    if calls:
                        yield Case("attention", label, spec.dtype, calls, lies)
        for model in (spec, wide):  # one layer's KV, which stays in the L2 cache
            calls = attention_calls(replace(model, num_layers=1), 1, 1, CACHED_KEYS)
            yield Case("attention", f"1 x {CACHED_KEYS} keys, cached", spec.dtype, calls, "cache")
        for queries, context in PROMPTS:
            label = f"{queries} of {context} keys"
            for model in (replace(spec, num_layers=2), wide):
                calls = attention_calls(model, 1, queries, context)
                yield Case("attention", label, spec.dtype, calls)


def work_of(calls: list[Call]) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes by kernel."""
    found: dict[str, tuple[float, float]] = {}
    for call in calls:
        flops, num_bytes = found.get(call.kernel, (0.0, 0.0))
        found[call.kernel] = flops + call.flops, num_bytes + call.num_bytes
    return found


def compare_with_limits(
    report: Report, spec: ModelSpec, weights: ModelWeights, args: argparse.Namespace
) -> None:
    """Every case on every number of threads, and the picture."""
    found: dict[int, Limits] = {}
    points: list[tuple[Case, str, int, float, float]] = []
    for threads in args.threads:
        set_num_threads(threads)
        limits = found[threads] = measure_limits(library())
        report.add("memory", limits.bytes_per_s / 1e9, "GB/s", threads=threads)
        if limits.huge_bytes_per_s is not None:
            huge = limits.huge_bytes_per_s / 1e9
            report.add("memory in huge pages", huge, "GB/s", threads=threads)
        for name, flops in limits.flops.items():
            report.add(f"{name} products", flops / 1e9, "GFLOP/s", threads=threads)
    for case in cases(spec, weights, args):
        work = work_of(case.calls)
        for threads in args.threads:
            set_num_threads(threads)
            times = least_times(case.calls, {"": library()}, by_processor=threads == 1)[""]
            for kernel, (flops, num_bytes) in work.items():
                seconds = times[kernel]
                roof = found[threads].roof(case.dtype, flops, num_bytes, case.lies)
                setting: dict[str, Setting] = {
                    "kernel": kernel,
                    "of": case.kind,
                    "shape": case.label,
                    "threads": threads,
                }
                report.add("time", seconds * 1e6, "us", **setting)
                report.add("read", num_bytes / seconds / 1e9, "GB/s", **setting)
                report.add("speed", flops / seconds / 1e9, "GFLOP/s", **setting)
                report.add("of the limit", 100.0 * flops / seconds / roof, "%", **setting)
                points.append((case, kernel, threads, flops / num_bytes, flops / seconds))
    if args.figure is not None:
        from benchmarks.compute.roofline import Point, draw

        drawn = [
            Point(case.kind, kernel, case.label, threads, per_byte, speed, case.dtype)
            for case, kernel, threads, per_byte, speed in points
        ]
        draw(drawn, found, args.figure)


def compare_checkouts(
    report: Report, spec: ModelSpec, weights: ModelWeights, args: argparse.Namespace
) -> None:
    """Kernels of here and of another checkout."""
    with tempfile.TemporaryDirectory() as folder:
        both = {"this": load(str(compiled(Path.cwd(), Path(folder) / "this.so")))}
        both["other"] = load(str(compiled(args.other, Path(folder) / "other.so")), is_other=True)
        compare_libraries(report, spec, weights, args, both)


def compare_levels(
    report: Report, spec: ModelSpec, weights: ModelWeights, args: argparse.Namespace
) -> None:
    """Kernels of this processor's kind, and of others."""
    libraries = {"this": load(str(build()))}
    for name in args.level:
        libraries[name] = load(str(build_level(level_named(name))))
        if libraries[name].kun_allow_amx():
            raise ConfigError(f"Linux refuses this process what kernels {name} need")
    compare_libraries(report, spec, weights, args, libraries)


def compare_libraries(
    report: Report,
    spec: ModelSpec,
    weights: ModelWeights,
    args: argparse.Namespace,
    libraries: dict[str, CDLL],
) -> None:
    """Those called ``this`` and others, call by call in turns."""
    for case in cases(spec, weights, args):
        times = least_times(case.calls, libraries, by_processor=True, least_s=args.seconds)
        for kernel in work_of(case.calls):
            setting: dict[str, Setting] = {
                "kernel": kernel,
                "of": case.kind,
                "shape": case.label,
            }
            this_s = times["this"][kernel]
            report.add("this", this_s * 1e6, "us", **setting)
            for name in list(libraries)[1:]:
                report.add(name, times[name][kernel] * 1e6, "us", **setting)
                report.add(f"{name} / this", times[name][kernel] / this_s, "x", **setting)


def compiled(checkout: Path, target: Path) -> Path:
    """A checkout's kernels for this processor, by its own way to compile them."""
    program = "from kunserve.engine.cpu.kernels.build import build; print(build())"
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", program]
    made = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    target.write_bytes(Path(made.split()[-1]).read_bytes())
    return target


def best_s(run: Callable[[], object], min_runs: int = 5, min_s: float = 1.0) -> float:
    """The fastest of at least ``min_runs`` runs that take ``min_s`` together."""
    run()
    times: list[float] = []
    while len(times) < min_runs or sum(times) < min_s:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def compare_with_torch(report: Report, weights: ModelWeights, m: int, threads: int) -> None:
    """Every matrix of every layer times ``m`` rows."""
    matrices = [
        w for layer in weights.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)
    ]
    inputs = {w.shape: torch.randn(m, w.shape[1]).to(w.dtype) for w in matrices}
    calls = linear_calls(weights, m, str(weights.embedding.dtype).removeprefix("torch."))

    def ours() -> None:
        for call in calls:
            call.run(library())

    ours_s = best_s(ours)
    torch.set_num_threads(threads)
    torch_s = best_s(lambda: [F.linear(inputs[w.shape], w) for w in matrices])
    torch.set_num_threads(1)
    time.sleep(REST_S)
    case: dict[str, Setting] = {"linears": "of all layers", "threads": threads, "rows": m}
    report.add("ours", ours_s * 1e3, "ms", **case)
    report.add("torch", torch_s * 1e3, "ms", **case)
    report.add("torch / ours", torch_s / ours_s, "x", **case)


def measure_steps(report: Report, spec: ModelSpec, weights: ModelWeights, threads: int) -> None:
    """Whole steps: embedding, layers, logits, argmax. From small pages."""
    weights = held_by_engines(weights)
    shapes = [(1, 1, 160), (8, 1, 160), (32, 1, 160), (32, 1, 900), (1, 1, 4000), (1, 512, 512)]
    for num_seqs, queries, context in shapes:
        batch = make_batch(num_seqs, queries, context)
        num_units = num_seqs * -(-context // BLOCK_SIZE) * spec.num_layers
        memory = torch.randn(num_units * spec.unit_bytes(BLOCK_SIZE) // spec.dtype_bytes)
        memory = memory.to(TORCH_DTYPES[spec.dtype])
        decoder = Decoder(spec, weights, memory.data_ptr(), BLOCK_SIZE, threads)
        step_s = best_s(
            lambda d=decoder, b=batch: d.greedy(b, d.forward(b, d.embed(b))),  # type: ignore[misc]
        )
        case: dict[str, Setting] = {
            "step": f"{num_seqs} x {queries} tokens",
            "context": context,
            "threads": threads,
        }
        report.add("time", step_s * 1e3, "ms", **case)
        report.add("throughput", num_seqs * queries / step_s, "tokens/s", **case)


def main() -> None:
    """Every measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    kinds = ["linear", "quantised", "attention"]
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_1"], help="of quantised weights")
    parser.add_argument("--figure", type=Path, help="draw the roofline here")
    parser.add_argument("--other", type=Path, help="a checkout to compare with, and nothing else")
    levels = "kernels of other kinds of processors to compare with, and nothing else"
    parser.add_argument("--level", nargs="+", default=[], help=levels)
    seconds = "of each case, with --other or --level"
    parser.add_argument("--seconds", type=float, default=1.0, help=seconds)
    parser.add_argument("--skip-torch", action="store_true")
    parser.add_argument("--skip-steps", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = smollm2(args.dtype)
    weights = random_weights(spec)
    with Report("kernels", model=spec.name, dtype=args.dtype) as report:
        if args.other is not None:
            compare_checkouts(report, spec, weights, args)
            return
        if args.level:
            compare_levels(report, spec, weights, args)
            return
        compare_with_limits(report, spec, weights, args)
        for threads in args.threads:
            set_num_threads(threads)
            for m in () if args.skip_torch else args.rows:
                compare_with_torch(report, weights, m, threads)
            if not args.skip_steps:
                measure_steps(report, spec, weights, threads)


if __name__ == "__main__":
    main()
