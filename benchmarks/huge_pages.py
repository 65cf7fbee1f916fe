"""Steps from pages of 2 MiB beside the same steps from pages of 4 KiB.

    python -m benchmarks.huge_pages [--types bfloat16 Q8_0] [--threads 1] [--rounds 15] [--cpu-time]

Instances of SmolLM2 stand in one process and take turns step by step: one with `--huge-pages off`,
one with `auto`, and one that has dropped half of its layers and got them back since. Figures are
medians with least and most, and ratios of medians and of least times to small pages: wall times,
or the thread's processor time where there is one thread and ``--cpu-time``, for machines with
other work. What a start takes is told of each instance: it stands alone, but a machine that gives
its free memory back to its host takes long for the first touch of it.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import gguf
import torch

from benchmarks.kernel_calls import make_batch
from benchmarks.quantised import EXPANDED, requantise, step
from benchmarks.report import Report, Setting
from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.body import EngineBody
from kunserve.engine.cpu.kernels.library import set_num_threads
from kunserve.engine.memory.pages import HostPages
from kunserve.model.source import resolve_model

SHAPES = {
    "decode, 1 stream": (1, 1, 160),
    "decode, 8 streams": (8, 1, 160),
    "decode, 32 streams": (32, 1, 160),
    "decode, 1 stream of 4,000": (1, 1, 4000),
    "decode, 16 streams of 1,000": (16, 1, 1000),
    "prefill, 512 tokens": (1, 512, 512),
}
KV_BYTES = 368 << 20
PREFAULT_S = 60.0
SMALL, HUGE, MOVED = "4 KiB", "2 MiB", "2 MiB, after a drop and a restore"


class Start(NamedTuple):
    """Of one instance."""

    wall_s: float
    cpu_s: float
    """With what goes on in the background."""
    huge_mib: float


def started(
    path: Path, quantization: str, huge: Literal["auto", "off"]
) -> tuple[EngineBody, Start]:
    """An instance that has done all that it does in the background."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    model = ModelConfig(model=str(path), quantization=quantization)  # type: ignore[arg-type]
    instance = InstanceConfig(kv_cache_memory_bytes=KV_BYTES, huge_pages=huge)
    body = EngineBody(InstanceId(0), model, instance)
    wall_s = time.perf_counter() - began_s
    [memory] = body.memory.shards
    pages = memory.arena.pages
    assert isinstance(pages, HostPages)
    assert pages._prefault is not None
    thread = pages._prefault._thread
    assert thread is not None
    thread.join(PREFAULT_S)
    assert not thread.is_alive(), f"memory was not taken within {PREFAULT_S:g} s"
    cpu_s = time.process_time() - began_cpu_s
    return body, Start(wall_s, cpu_s, memory.huge_bytes / 2**20)


@contextlib.contextmanager
def bodies(kind: str, folder: Path, report: Report) -> Iterator[dict[str, EngineBody]]:
    """One instance for every way, with these weights."""
    path, quantization = resolve_model("smollm2-135m").path, "none"
    if kind != EXPANDED:
        path = requantise(path, folder / f"{kind}.gguf", gguf.GGMLQuantizationType[kind])
        quantization = "gguf"
    made: dict[str, EngineBody] = {}
    with contextlib.ExitStack() as stack:
        for way in (SMALL, HUGE, MOVED):
            body, start = started(path, quantization, "off" if way == SMALL else "auto")
            stack.callback(body.close)
            made[way] = body
            if way == MOVED:
                whole = body.memory.shards[0].held
                body.memory.drop(LayerRange(0, whole.num_layers // 2))
                body.memory.reclaim(whole)
                body.load_layers(whole)
            case: dict[str, Setting] = {"weights": kind, "pages": way}
            report.add("start", start.wall_s, "s", **case)
            report.add("processor time of a start", start.cpu_s, "s", **case)
            report.add("in huge pages", start.huge_mib, "MiB", **case)
        yield made


def measure(
    report: Report, kind: str, made: dict[str, EngineBody], args: argparse.Namespace
) -> None:
    """Steps in turns."""
    clock = time.thread_time if args.cpu_time and args.threads == 1 else time.perf_counter
    for name, shape in SHAPES.items():
        batch = make_batch(*shape)
        repeats = 1 if shape[1] > 1 else 5
        times: dict[str, list[float]] = {way: [] for way in made}
        for number in range(args.rounds + 1):
            for way, body in made.items():
                began_s = clock()
                for _ in range(repeats):
                    step(body, batch)
                if number:
                    times[way].append((clock() - began_s) / repeats * 1e3)
        for way, found in times.items():
            case: dict[str, Setting] = {"case": name, "weights": kind, "pages": way}
            report.add("step", statistics.median(found), "ms", **case)
            report.add("least", min(found), "ms", **case)
            report.add("most", max(found), "ms", **case)
            small = times[SMALL]
            median = statistics.median(small) / statistics.median(found)
            report.add("faster than 4 KiB", median, "x", **case)
            report.add("faster by least times", min(small) / min(found), "x", **case)


def main() -> None:
    """One kind of weights after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--types", nargs="+", default=[EXPANDED, "Q8_0"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        Report("huge_pages", model="SmolLM2-135M", threads=args.threads) as report,
    ):
        for kind in args.types:
            with bodies(kind, Path(folder), report) as made:
                set_num_threads(args.threads)
                measure(report, kind, made, args)


if __name__ == "__main__":
    main()
