"""Quantised weights beside the same ones expanded to bfloat16: speed, memory, and what is lost.

    python -m benchmarks.compute.quantised [--types Q8_0 Q4_0 Q4_1] [--threads 1 2] [--rounds 7]
        [--llama-bench PROGRAM]

The built-in model's file is Q4_1. It is taken as it is, and requantised from the values that it
stands for, so what a type adds to the loss of Q4_1 is what is shown. All instances stand in one
process and take turns step by step. Figures are medians over the rounds with their ranges, and
ratios of medians: wall times, or the thread's processor time where there is one thread and
``--cpu-time``, for machines with other work. What is lost: perplexity over this project's own
documents, how often the most likely token is the one of bfloat16, and the divergence from its
distribution. With llama.cpp's `llama-bench` its decodes of the same files take turns with ours,
both by wall time and with nothing before them.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch

from benchmarks.compute.kernel_calls import make_batch
from benchmarks.report import Report, Setting
from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.ids import InstanceId
from kunserve.engine.attention import StepBatch
from kunserve.engine.body import EngineBody
from kunserve.engine.cpu.kernels.library import set_num_threads
from kunserve.model.source import resolve_model
from kunserve.model.tokenizer import load_tokenizer

EXPANDED = "bfloat16"
SHAPES = {
    "decode, 1 stream": (1, 1, 160),
    "decode, 8 streams": (8, 1, 160),
    "decode, 32 streams": (32, 1, 160),
    "prefill, 512 tokens": (1, 512, 512),
}
TEXT_TOKENS = 4096
CHUNK_TOKENS = 512
DECODED = 32
"""Tokens of a decode beside llama.cpp's."""


def requantise(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """A copy of a GGUF file with all its matrices of another type."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == gguf.Keys.General.ARCHITECTURE:
            continue
        element = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@contextlib.contextmanager
def bodies(types: list[str], folder: Path) -> Iterator[dict[str, EngineBody]]:
    """One instance of every kind, by name."""
    built_in = resolve_model("smollm2-135m").path
    instance = InstanceConfig(kv_cache_memory_bytes=192 << 20)
    made: dict[str, EngineBody] = {}
    with contextlib.ExitStack() as stack:
        for name in (EXPANDED, *types):
            path, quantization = built_in, "none" if name == EXPANDED else "gguf"
            if name not in (EXPANDED, "Q4_1"):
                kind = gguf.GGMLQuantizationType[name]
                path = requantise(built_in, folder / f"{name}.gguf", kind)
            model = ModelConfig(model=str(path), quantization=quantization)  # type: ignore[arg-type]
            made[name] = EngineBody(InstanceId(0), model, instance)
            stack.callback(made[name].close)
        yield made


def step(body: EngineBody, batch: StepBatch) -> None:
    """Embedding, layers, logits, the most likely tokens."""
    decoder = body._decoder
    decoder.greedy(batch, decoder.forward(batch, decoder.embed(batch)))  # type: ignore[attr-defined]


def measure_speed(
    report: Report, made: dict[str, EngineBody], threads: int, rounds: int, *, cpu_time: bool
) -> None:
    """Steps in turns."""
    set_num_threads(threads)
    clock = time.thread_time if cpu_time and threads == 1 else time.perf_counter
    for name, shape in SHAPES.items():
        batch = make_batch(*shape)
        repeats = 1 if shape[1] > 1 else 10
        times: dict[str, list[float]] = {kind: [] for kind in made}
        for number in range(rounds + 1):
            for kind, body in made.items():
                started = clock()
                for _ in range(repeats):
                    step(body, batch)
                if number:
                    times[kind].append((clock() - started) / repeats * 1e3)
        plain = statistics.median(times[EXPANDED])
        for kind, found in times.items():
            case: dict[str, Setting] = {"case": name, "weights": kind, "threads": threads}
            report.add("step", statistics.median(found), "ms", **case)
            report.add("least", min(found), "ms", **case)
            report.add("most", max(found), "ms", **case)
            if kind != EXPANDED:
                report.add("faster than bfloat16", plain / statistics.median(found), "x", **case)


def measure_beside(
    report: Report, made: dict[str, EngineBody], program: Path, threads: int, rounds: int
) -> None:
    """A lone decode, ours and llama.cpp's in turns."""
    set_num_threads(threads)
    for kind, body in made.items():
        if kind == EXPANDED:
            continue
        path = resolve_model(body.model.name).path
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(rounds):
            ours.append(lone_decode(body))
            theirs.append(llama_decode(program, path, threads))
        case: dict[str, Setting] = {"weights": kind, "threads": threads}
        for name, found in (("ours", ours), ("llama.cpp", theirs)):
            report.add(name, statistics.median(found), "tokens/s", **case)
            report.add(f"{name}, least", min(found), "tokens/s", **case)
            report.add(f"{name}, most", max(found), "tokens/s", **case)
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        report.add("ours / llama.cpp", statistics.median(ratios), "x", **case)


def lone_decode(body: EngineBody) -> float:
    """Tokens per second of one stream from its first token on."""
    for warm in (True, False):
        started = time.perf_counter()
        for context in range(1, 3 if warm else DECODED + 1):
            step(body, make_batch(1, 1, context))
    return DECODED / (time.perf_counter() - started)


def llama_decode(program: Path, path: Path, threads: int) -> float:
    """The same, as llama-bench measures it after a run to get warm."""
    command = [str(program), "-m", str(path), "-t", str(threads), "-p", "0", "-n", str(DECODED)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}
    command += ["-r", "1", "-o", "json"]
    text = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    rate: float = json.loads(text)[0]["avg_ts"]
    return rate


def own_text() -> str:
    """English prose that every checkout has."""
    root = Path(__file__).parents[2]
    return "\n".join(path.read_text() for path in sorted((root / "docs").glob("*.md")))


def distributions(body: EngineBody, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocab], in pieces of ``CHUNK_TOKENS`` that know nothing before."""
    decoder, found = body._decoder, []
    for first in range(0, len(tokens), CHUNK_TOKENS):
        batch = make_batch(1, CHUNK_TOKENS, CHUNK_TOKENS)
        batch.token_ids[:] = tokens[first : first + CHUNK_TOKENS]
        hidden = decoder.forward(batch, decoder.embed(batch))
        logits = decoder.logits_of(np.arange(CHUNK_TOKENS), hidden)
        found.append(torch.log_softmax(logits, dim=-1).clone())
    return torch.cat(found)


def measure_loss(report: Report, made: dict[str, EngineBody]) -> None:
    """What is said of the same text."""
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    tokens = list(tokenizer.encode(own_text(), add_special_tokens=False))[:TEXT_TOKENS]
    is_known = torch.arange(TEXT_TOKENS - 1) % CHUNK_TOKENS != CHUNK_TOKENS - 1
    targets = torch.tensor(tokens[1:])[is_known]
    plain = distributions(made[EXPANDED], tokens)[:-1][is_known]
    for kind, body in made.items():
        found = plain if kind == EXPANDED else distributions(body, tokens)[:-1][is_known]
        scores = found.gather(1, targets[:, None])
        same = (found.argmax(1) == plain.argmax(1)).float().mean()
        divergence = (plain.exp() * (plain - found)).sum(1).mean()
        case: dict[str, Setting] = {"weights": kind, "tokens": len(targets)}
        report.add("perplexity", float((-scores.mean()).exp()), "", **case)
        report.add("most likely token as bfloat16", 100 * float(same), "%", **case)
        report.add("divergence from bfloat16", float(divergence), "nats", **case)


def main() -> None:
    """Every measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_0", "Q4_1"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--skip-steps", action="store_true")
    parser.add_argument("--llama-bench", type=Path, help="the program of llama.cpp")
    parser.add_argument("--skip-loss", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        bodies(args.types, Path(folder)) as made,
        Report("quantised", model="SmolLM2-135M", rounds=args.rounds) as report,
    ):
        for kind, body in made.items():
            report.add("weights", body.account.weights_bytes / 2**20, "MiB", weights=kind)
        for threads in args.threads:
            if not args.skip_steps:
                measure_speed(report, made, threads, args.rounds, cpu_time=args.cpu_time)
            if args.llama_bench is not None:
                measure_beside(report, made, args.llama_bench, threads, args.rounds)
        if not args.skip_loss:
            measure_loss(report, made)


if __name__ == "__main__":
    main()
