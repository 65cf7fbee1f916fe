"""What a drop and a restore of half the layers cost in host memory: moved, or mapped twice first.

    python -m benchmarks.remap [--rounds 10]

Both ways in turn, in memory of the size of SmolLM2. Preparing happens before the commit, while
steps run. The change is what a commit waits for. The first touch of every page afterwards is what
steps would pay.
"""

import argparse
import time
from collections.abc import Callable

from benchmarks.report import Report
from kunserve.core.config import MIB, InstanceConfig
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.memory.instance_memory import InstanceMemory
from kunserve.engine.memory.pages import HostPages
from kunserve.model.config import read_spec
from kunserve.model.source import resolve_model


class MappedTwice(HostPages):
    """Host memory that is remapped as device memory is."""

    moves = False


def measure(memory: InstanceMemory) -> dict[str, float]:
    """Seconds of each part of one drop and one restore."""
    whole, half = memory.held, LayerRange(0, memory.held.num_layers // 2)
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - started

    def touch() -> None:
        memory.unit_view(0, memory.kv_units)[::4096].max()

    def tidy() -> None:
        while memory.arena.num_aliases:
            memory.tidy()

    touch()
    timed("prepare a drop", lambda: memory.prepare(half))
    timed("drop", lambda: memory.drop(half))
    timed("first touch after a drop", touch)
    timed("unmap after a drop", tidy)
    timed("prepare a restore", lambda: memory.prepare(whole))
    timed("restore", lambda: memory.reclaim(whole))
    timed("first touch after a restore", lambda: memory.layer_view(half.end)[::4096].max())
    timed("unmap after a restore", tidy)
    return seconds


def main() -> None:
    """Both ways in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    spec = read_spec(resolve_model("smollm2-135m", "dummy"), "bfloat16")
    config = InstanceConfig(memory_bytes=384 * MIB)
    ways = {"moved": HostPages, "mapped twice": MappedTwice}
    memories = {
        name: InstanceMemory(InstanceId(0), spec, config, 0, pages) for name, pages in ways.items()
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for way, memory in memories.items():
            for name, value in measure(memory).items():
                seconds.setdefault((way, name), []).append(value)
    with Report("remap", rounds=rounds) as report:
        for (way, name), values in seconds.items():
            report.add(name, sorted(values)[len(values) // 2] * 1e3, "ms", way=way)
    for memory in memories.values():
        memory.close()


if __name__ == "__main__":
    main()
