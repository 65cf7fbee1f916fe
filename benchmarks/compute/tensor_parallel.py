"""Several ranks beside one instance of as many threads, and our all-reduce beside gloo's.

    python -m benchmarks.compute.tensor_parallel [--ranks 2] [--layers 12] [--rounds 9]

Both instances have random weights of Qwen2.5-0.5B's shape, with fewer layers, and take turns step
by step: whole steps, from token ids to the most likely tokens. Sums are float32 of a step's rows,
each call from rows that lie in each process's own memory; ours and gloo's take turns in the same
two processes. Figures are medians over the rounds with their ranges, ratios are of medians.
On a machine with other work the ratio of processor times says what ranks cost beside waiting.
"""

import argparse
import contextlib
import ctypes
import datetime
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed

from benchmarks.compute.kernel_calls import make_batch
from benchmarks.report import Report, Setting
from kunserve.core.config import InstanceConfig, ModelConfig
from kunserve.core.ids import InstanceId
from kunserve.core.python_command import python_command
from kunserve.engine.attention import StepBatch
from kunserve.engine.body import EngineBody
from kunserve.engine.cpu.kernels.library import kernel, set_num_threads
from kunserve.engine.cpu.kernels.ops import argmax
from kunserve.model.source import resolve_model
from kunserve_extras.ranks.backend import RankedBackend
from kunserve_extras.ranks.meeting import Meeting

SHAPES = {
    "decode, 1 stream": (1, 1, 160),
    "decode, 8 streams": (8, 1, 160),
    "decode, 32 streams": (32, 1, 160),
    "prefill, 256 tokens": (1, 256, 256),
}
HIDDEN = 896
SUMMED_ROWS = (1, 8, 32, 256)
CALLS = 100
"""Sums of one round."""
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


@contextlib.contextmanager
def bodies(folder: Path, num_ranks: int, num_layers: int) -> Iterator[dict[str, EngineBody]]:
    """An instance of threads, and one of ranks."""
    (folder / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": num_layers}))
    model = ModelConfig(model=str(folder), load_format="dummy")
    source = resolve_model(model.model, model.load_format)
    with contextlib.ExitStack() as stack:
        made = {}
        for name, ranks in (("threads", 1), ("ranks", num_ranks)):
            config = InstanceConfig(
                kv_cache_memory_bytes=192 << 20, num_threads=num_ranks, tensor_parallel_size=ranks
            )
            backend = None if ranks == 1 else RankedBackend(model, source, ranks)
            made[name] = EngineBody(InstanceId(0), model, config, source, backend=backend)
            stack.callback(made[name].close)
        yield made


def cpu_s(pids: Iterable[int]) -> float:
    """Processor time of all threads of these processes so far."""
    files = (file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def step(body: EngineBody, batch: StepBatch) -> None:
    """Embedding, layers, logits, the most likely tokens."""
    decoder = body._decoder
    argmax(decoder.logits(batch, decoder.forward(batch, decoder.embed(batch))))


def measure_steps(report: Report, made: dict[str, EngineBody], num_ranks: int, rounds: int) -> None:
    """Steps in turns."""
    for name, shape in SHAPES.items():
        batch, repeats = make_batch(*shape), 1 if shape[1] > 1 else 8
        times: dict[str, list[float]] = {kind: [] for kind in made}
        busy: dict[str, list[float]] = {kind: [] for kind in made}
        for number in range(rounds + 1):
            for kind, body in made.items():
                # One pool is all bodies' of this process.
                set_num_threads(num_ranks if kind == "threads" else 1)
                step(body, batch)
                pids = (os.getpid(), *body.other_pids)
                began_cpu_s, started = cpu_s(pids), time.perf_counter()
                for _ in range(repeats):
                    step(body, batch)
                if number:
                    times[kind].append((time.perf_counter() - started) / repeats)
                    busy[kind].append((cpu_s(pids) - began_cpu_s) / repeats)
        for kind, found in times.items():
            rates = [shape[0] * shape[1] / seconds for seconds in found]
            case: dict[str, Setting] = {"case": name, "instance": kind}
            report.add("throughput", statistics.median(rates), "tokens/s", **case)
            report.add("least", min(rates), "tokens/s", **case)
            report.add("most", max(rates), "tokens/s", **case)
            report.add("processor time", 1e3 * statistics.median(busy[kind]), "ms", **case)
        ratio = statistics.median(times["threads"]) / statistics.median(times["ranks"])
        report.add("ranks / threads", ratio, "x", case=name)
        ratio = statistics.median(busy["threads"]) / statistics.median(busy["ranks"])
        report.add("by processor time", ratio, "x", case=name)


class Peer:
    """One process of those that sum. All of them run the same calls in the same order."""

    def __init__(
        self, rank: int, num_ranks: int, meeting_fd: int | None, sums_fd: int, store: Path
    ) -> None:
        self.meeting = Meeting(rank, num_ranks, meeting_fd)
        self._rank, self._most = rank, max(SUMMED_ROWS) * HIDDEN
        memory = mmap.mmap(sums_fd, (num_ranks + 1) * self._most * 4)
        self._shared = torch.frombuffer(memory, dtype=torch.float32).view(num_ranks + 1, -1)
        self.meeting.as_c.parts = self._shared.data_ptr()
        self._sum = kernel("kun_rank_sum", torch.float32)
        # Told here, because the machine may have interfaces that reach nobody.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.FileStore(str(store), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=60),
        )

    def run(self, rounds: int) -> dict[tuple[str, int], list[float]]:
        """Seconds per call, of each way and number of rows."""
        found: dict[tuple[str, int], list[float]] = {}
        for rows in SUMMED_ROWS:
            mine = torch.full((rows * HIDDEN,), float(self._rank + 1))
            ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
                "ours": lambda x, rows=rows: self._ours(x, rows),  # type: ignore[misc]
                "gloo": self._gloo,
            }
            for number in range(rounds + 1):
                for way, reduce in ways.items():
                    self.meeting.meet()
                    started = time.perf_counter()
                    for _ in range(CALLS):
                        total = reduce(mine)
                    took_s = (time.perf_counter() - started) / CALLS
                    assert (
                        total[0]
                        == total[-1]
                        == self.meeting.num_ranks * (self.meeting.num_ranks + 1) / 2
                    ), total
                    if number:
                        found.setdefault((way, rows), []).append(took_s)
        return found

    def _ours(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        parts = self._shared.view(-1)
        parts[self._rank * len(x) : (self._rank + 1) * len(x)] = x
        total = self._shared[-1]
        self._sum(ctypes.byref(self.meeting.as_c), total.data_ptr(), rows, HIDDEN)
        return total[: len(x)]

    @staticmethod
    def _gloo(x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total)
        return total


def measure_sums(report: Report, num_ranks: int, rounds: int, folder: Path) -> None:
    """Ours and gloo's in turns, in this process and its peers."""
    set_num_threads(1)
    sums_fd = os.memfd_create("sums")
    os.ftruncate(sums_fd, (num_ranks + 1) * max(SUMMED_ROWS) * HIDDEN * 4)
    meeting = Meeting(0, num_ranks)
    fds = (meeting.fd, sums_fd)
    store = folder / "store"
    peers = [
        subprocess.Popen(
            [
                *python_command(),
                *("-m", "benchmarks.compute.tensor_parallel", "--rounds", str(rounds)),
                *("--peer", *map(str, (rank, num_ranks, *fds, store))),
            ],
            pass_fds=fds,
        )
        for rank in range(1, num_ranks)
    ]
    try:
        times = Peer(0, num_ranks, meeting.fd, sums_fd, store).run(rounds)
        torch.distributed.destroy_process_group()
        for peer in peers:
            assert peer.wait(60) == 0
    finally:
        for peer in peers:
            peer.kill()
    for rows in SUMMED_ROWS:
        for way in ("ours", "gloo"):
            found = [1e6 * seconds for seconds in times[way, rows]]
            case: dict[str, Setting] = {"way": way, "rows": rows}
            report.add("all-reduce", statistics.median(found), "us", **case)
            report.add("least", min(found), "us", **case)
            report.add("most", max(found), "us", **case)
        ratio = statistics.median(times["gloo", rows]) / statistics.median(times["ours", rows])
        report.add("gloo / ours", ratio, "x", rows=rows)


def main() -> None:
    """Every measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--skip-steps", action="store_true")
    parser.add_argument("--peer", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peer:
        rank, num_ranks, meeting_fd, sums_fd = map(int, args.peer[:4])
        Peer(rank, num_ranks, meeting_fd, sums_fd, Path(args.peer[4])).run(args.rounds)
        torch.distributed.destroy_process_group()
        sys.exit(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        Report("tensor_parallel", ranks=args.ranks, rounds=args.rounds) as report,
    ):
        measure_sums(report, args.ranks, args.rounds, Path(folder))
        if not args.skip_steps:
            report.add("layers", args.layers, "")
            with bodies(Path(folder), args.ranks, args.layers) as made:
                measure_steps(report, made, args.ranks, args.rounds)


if __name__ == "__main__":
    main()
