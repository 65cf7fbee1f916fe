"""Decodes of a model of OLMoE's shape beside what memory allows for the bytes that they read.

    python -m benchmarks.compute.sparse [--layers 4] [--threads 1 2] [--streams 1 4 16] [--rounds 9]
        [--cpu-time]

OLMoE-1B-7B with fewer layers, so that it fits (16 have 13 GiB), and dummy weights. A step embeds
new random tokens, runs the layers, and takes the most likely tokens. Its bytes are counted: those
of attention, router and head, those of the experts that the step's tokens chose, and KV.
What memory allows is the fastest of three ways to read 256 MiB: torch's sum, a memory copy (which
also writes as much, so both are counted), and our own product of one row and a plain matrix. Reads
and steps take turns, so a busy machine slows down both. Shown are the bests of all rounds, the
ratio of these, and the ratio within each round: its median, least and most. With ``--cpu-time``
one thread is timed by its processor time, for machines with other work.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.compute.kernel_calls import make_batch
from benchmarks.report import Report, Setting
from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.ids import InstanceId
from kunserve.engine.attention import StepBatch
from kunserve.engine.body import EngineBody
from kunserve.engine.cpu.decoder import Decoder
from kunserve.engine.cpu.kernels.library import set_num_threads
from kunserve.engine.cpu.kernels.ops import linear

READ_BYTES = 256 << 20
READS = 3
"""In each way in each round."""
CONTEXT = 160
STEPS = 4
"""Of each number of streams in each round."""
OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 50304,
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "eos_token_id": 50279,
}


Clock = Callable[[], float]


def timed(run: Callable[[], object], clock: Clock) -> float:
    """Seconds that it takes."""
    start = clock()
    run()
    return clock() - start


def readers(threads: int, clock: Clock) -> dict[str, Callable[[], float]]:
    """Ways to read memory; each gives bytes per second."""
    memory = torch.ones(READ_BYTES // 2, dtype=torch.bfloat16)
    matrix = memory.view(-1, 2048)
    row, out = torch.ones(1, 2048, dtype=torch.bfloat16), torch.empty(1, len(matrix)).bfloat16()
    numbers = memory.view(torch.int64)
    source, target = memory[: READ_BYTES // 4], memory[READ_BYTES // 4 :]

    def with_torch(run: Callable[[], object]) -> float:
        torch.set_num_threads(threads)
        seconds = timed(run, clock)
        torch.set_num_threads(1)
        return seconds

    return {
        "torch sum": lambda: READ_BYTES / with_torch(lambda: numbers.sum()),
        "copy": lambda: READ_BYTES / with_torch(lambda: target.copy_(source)),
        "matrix and row": lambda: READ_BYTES / timed(lambda: linear(row, matrix, out=out), clock),
    }


def step_bytes(body: EngineBody, batch: StepBatch) -> int:
    """What a step reads, by the experts that its tokens choose in each layer."""
    decoder, spec = body._decoder, body.model
    assert isinstance(decoder, Decoder) and spec.experts is not None
    touched: list[int] = []

    def count() -> None:
        whole = decoder._scratch._tensors["routing"]
        tokens, experts = batch.num_tokens, spec.experts
        assert experts is not None
        at = tokens * (experts.number + 4 * experts.per_token) + 3 * experts.number + 1
        touched.append(int(whole.view(torch.int32)[at]))

    decoder.forward(batch, decoder.embed(batch), count)
    per_layer = spec.layer_params - spec.experts.number * spec.mlp_params
    params = sum(per_layer + number * spec.mlp_params for number in touched)
    params += spec.vocab_size * spec.hidden_size
    kv_tokens = int(batch.context_lens.sum())
    kv_bytes = kv_tokens * spec.block_bytes(16) // 16
    return params * spec.dtype_bytes + kv_bytes


def random_batches(body: EngineBody, num: int) -> list[tuple[StepBatch, int]]:
    """Batches of so many streams with tokens of their own, and what each reads."""
    drawn = np.random.default_rng(num)
    found = []
    for _ in range(STEPS):
        batch = make_batch(num, 1, CONTEXT)
        batch.tables[:] = batch.tables // 30 * body.model.num_layers
        batch.token_ids[:] = drawn.integers(0, body.model.vocab_size, num)
        found.append((batch, step_bytes(body, batch)))
    return found


def run_step(body: EngineBody, batch: StepBatch) -> None:
    """Embedding, layers, logits, the most likely tokens."""
    decoder = body._decoder
    assert isinstance(decoder, Decoder)
    decoder.greedy(batch, decoder.forward(batch, decoder.embed(batch)))


def measure(
    report: Report,
    body: EngineBody,
    threads: int,
    streams: list[int],
    rounds: int,
    *,
    cpu_time: bool,
) -> None:
    """Reads and steps in turns."""
    set_num_threads(threads)
    clock = time.thread_time if cpu_time and threads == 1 else time.perf_counter
    ways = readers(threads, clock)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    allowed: list[float] = []
    reached: dict[int, list[float]] = {num: [] for num in streams}
    per_token: dict[int, list[float]] = {num: [] for num in streams}
    batches = {num: random_batches(body, num) for num in streams}
    for _ in range(rounds):
        for name, way in ways.items():
            rates[name].append(max(way() for _ in range(READS)))
        allowed.append(max(found[-1] for found in rates.values()))
        for num in streams:
            best, best_s = 0.0, 0.0
            for batch, num_bytes in batches[num]:
                seconds = timed(lambda b=batch: run_step(body, b), clock)  # type: ignore[misc]
                rate = num_bytes / seconds
                if rate > best:
                    best, best_s = rate, seconds
            reached[num].append(best)
            per_token[num].append(best_s / num)
    case: dict[str, Setting] = {"threads": threads}
    for name, found in rates.items():
        report.add(f"read, {name}", max(found) / 1e9, "GB/s", **case)
    for num, found in reached.items():
        case["streams"] = num
        report.add("decode", 1 / min(per_token[num]), "tokens/s", **case)
        report.add("decode reads", max(found) / 1e9, "GB/s", **case)
        report.add("of what memory allows", max(found) / max(allowed), "x", **case)
        shares = [a / b for a, b in zip(found, allowed, strict=True)]
        for name, share in (
            ("median of rounds", statistics.median(shares)),
            ("least", min(shares)),
            ("most", max(shares)),
        ):
            report.add(f"of what memory allows, {name}", share, "x", **case)


def main() -> None:
    """Every measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = {**OLMOE, "num_hidden_layers": args.layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = ModelConfig(model=folder, load_format="dummy")
        instance = InstanceConfig(kv_cache_memory_bytes=256 << 20)
        body = EngineBody(InstanceId(0), model, instance)
        settings: dict[str, Setting] = {"shape": "OLMoE-1B-7B", "layers": args.layers}
        with Report("sparse", **settings) as report:
            for threads in args.threads:
                measure(report, body, threads, args.streams, args.rounds, cpu_time=args.cpu_time)
        body.close()


if __name__ == "__main__":
    main()
