"""Kernel speed on SmolLM2-135M's shapes: against torch, and as whole steps.

    python -m benchmarks.kernels [--threads 1 2] [--dtype bfloat16] [--skip-torch]

Best of many runs. Weights are those of 30 layers, so decode reads them from memory, not cache.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.report import Report, Setting
from kunserve.core.model_spec import ModelSpec
from kunserve.engine.attention import TORCH_DTYPES
from kunserve.engine.decoder import Decoder, LayerWeights, ModelWeights, StepBatch
from kunserve.engine.kernels.library import set_num_threads
from kunserve.engine.kernels.ops import linear

BLOCK_SIZE = 16
REST_S = 0.02
"""Pause before our turn, while torch's workers stop spinning."""


def smollm2(dtype: str) -> ModelSpec:
    """SmolLM2-135M's shape."""
    return ModelSpec(
        name="SmolLM2-135M",
        architecture="LlamaForCausalLM",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position=8192,
        rope_theta=100000.0,
        rms_eps=1e-5,
        tied_embeddings=True,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope_scaling=None,
        sliding_window=None,
        dtype=dtype,
    )


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


def best_s(
    run: Callable[[], object], rest_s: float, min_runs: int = 5, min_s: float = 1.0
) -> float:
    """The fastest of at least ``min_runs`` runs that take ``min_s`` together."""
    run()
    times: list[float] = []
    while len(times) < min_runs or sum(times) < min_s:
        time.sleep(rest_s)
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def compare_linear(
    report: Report, weights: ModelWeights, m: int, threads: int, skip_torch: bool
) -> None:
    """Every matrix of every layer times ``m`` rows, ours and torch's."""
    matrices = [
        w for layer in weights.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)
    ]
    inputs = {w.shape: torch.randn(m, w.shape[1]).to(w.dtype) for w in matrices}
    outputs = {w.shape: torch.empty(m, w.shape[0], dtype=w.dtype) for w in matrices}
    ours_s = best_s(
        lambda: [linear(inputs[w.shape], w, out=outputs[w.shape]) for w in matrices], REST_S
    )
    num_bytes = sum(w.numel() * w.element_size() for w in matrices)
    flops = 2 * m * sum(w.numel() for w in matrices)
    case: dict[str, Setting] = {"linears": "of all layers", "threads": threads, "rows": m}
    report.add("time", ours_s * 1e3, "ms", **case)
    report.add("weights read", num_bytes / ours_s / 1e9, "GB/s", **case)
    report.add("speed", flops / ours_s / 1e9, "GFLOP/s", **case)
    if not skip_torch:
        torch.set_num_threads(threads)
        torch_s = best_s(lambda: [F.linear(inputs[w.shape], w) for w in matrices], 0.0)
        torch.set_num_threads(1)
        report.add("torch", torch_s * 1e3, "ms", **case)
        report.add("torch / ours", torch_s / ours_s, "x", **case)


def make_batch(num_seqs: int, queries: int, context: int) -> StepBatch:
    """``num_seqs`` sequences of ``queries`` new tokens each, the last of ``context``."""
    blocks = -(-context // BLOCK_SIZE)
    entries = np.random.default_rng(0).permutation(num_seqs * blocks).astype(np.int32) * 30
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


def measure_steps(report: Report, spec: ModelSpec, weights: ModelWeights, threads: int) -> None:
    """Whole steps: embedding, layers, logits, argmax."""
    shapes = [(1, 1, 160), (8, 1, 160), (32, 1, 160), (32, 1, 900), (1, 1, 4000), (1, 512, 512)]
    for num_seqs, queries, context in shapes:
        batch = make_batch(num_seqs, queries, context)
        num_units = num_seqs * -(-context // BLOCK_SIZE) * spec.num_layers
        memory = torch.randn(num_units * spec.unit_bytes(BLOCK_SIZE) // spec.dtype_bytes)
        memory = memory.to(TORCH_DTYPES[spec.dtype])
        decoder = Decoder(spec, weights, memory.data_ptr(), BLOCK_SIZE, threads)
        step_s = best_s(
            lambda d=decoder, b=batch: d.greedy(b, d.forward(b, d.embed(b))),  # type: ignore[misc]
            0.0,
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", default="bfloat16", choices=list(TORCH_DTYPES))
    parser.add_argument("--skip-torch", action="store_true")
    parser.add_argument("--skip-linear", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = smollm2(args.dtype)
    weights = random_weights(spec)
    with Report("kernels", model=spec.name, dtype=args.dtype) as report:
        for threads in args.threads:
            set_num_threads(threads)
            for m in () if args.skip_linear else (1, 2, 4, 8, 16, 32, 64, 512):
                compare_linear(report, weights, m, threads, args.skip_torch)
            measure_steps(report, spec, weights, threads)


if __name__ == "__main__":
    main()
