"""KV between two instances of one host: sent through sockets, or read in the source's memory file.

    python -m benchmarks.bulk_ways [--mib 62] [--rounds 9]

Two movers exchange so many MiB of KV in units of SmolLM2's size, in turns either way. Processor
time is of both sides with all their threads, so it hardly depends on who else uses the cores.
"""

import argparse
import mmap
import os
import statistics
import tempfile
import time

import numpy as np
import zmq

from benchmarks.report import Report
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import KvPull
from kunserve.transport.bulk.movable_memory import Bytes, Extents, Granules, UnitRuns
from kunserve.transport.bulk.mover import BulkMover
from kunserve_lab.world.viewed_memory import ViewedMemory

MIB = 1 << 20
UNIT_BYTES = 12 * 1024
LAYERS = LayerRange(0, 15)
BLOCKS_OF_REQUEST = 32
GIVER, TAKER = InstanceId(0), InstanceId(1)


class FileMemory(ViewedMemory):
    """KV units in a memory file."""

    def __init__(self, num_units: int) -> None:
        num_bytes = num_units * UNIT_BYTES
        self._fd = os.memfd_create("kunserve-bench")
        os.ftruncate(self._fd, num_bytes)
        self._all: Bytes = np.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=np.uint8)
        self._all[:] = np.arange(num_bytes, dtype=np.uint64) % 251
        self.is_shared = True

    granules: Granules | None = None

    @property
    def places(self) -> "FileMemory":  # type: ignore[override]
        """See ``MovableMemory``."""
        return self

    @property
    def shared_fd(self) -> int | None:
        """None while bytes are to be sent."""
        return self._fd if self.is_shared else None

    def unit_view(self, unit: int, num_units: int) -> Bytes:
        """See ``ViewedMemory``."""
        return self._all[unit * UNIT_BYTES : (unit + num_units) * UNIT_BYTES]

    def locate_units(self, unit_runs: UnitRuns) -> Extents:
        """See ``MovableMemory``."""
        return [(unit * UNIT_BYTES, num * UNIT_BYTES) for unit, num in unit_runs]

    def locate_layer(self, layer: int, offset: int, num_bytes: int) -> Extents:
        """There are no layers."""
        return []


def move(giver: BulkMover, taker: BulkMover, num_blocks: int) -> tuple[float, float]:
    """Every block once, request by request: (seconds, processor seconds)."""
    entries = np.arange(num_blocks, dtype=np.int32) * LAYERS.num_layers
    firsts = range(0, num_blocks, BLOCKS_OF_REQUEST)
    poller = zmq.Poller()
    for target in taker.poll_sockets:
        poller.register(target, zmq.POLLIN)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for first in firsts:
        giver.export_kv(RequestId(str(first)), entries[first : first + BLOCKS_OF_REQUEST])
    for first in firsts:
        own = entries[first : first + BLOCKS_OF_REQUEST]
        request_id = RequestId(str(first))
        piece = KvPull(TransitionId(1), request_id, GIVER, LAYERS, 0, len(own))
        taker.pull_kv(piece, own[::-1].copy())
    ended = 0
    while ended < len(firsts):
        poller.poll(1000)
        done = taker.completed()
        assert all(pull.ok for pull in done), done
        for pull in done:
            assert isinstance(pull.what, KvPull), pull
            giver.withdraw_kv(pull.what.request_id)  # as an exchange does
        ended += len(done)
    seconds = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    giver.reset()
    return seconds


def main() -> None:
    """Both ways in turns, then their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=62)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    num_blocks = options.mib * MIB // (UNIT_BYTES * LAYERS.num_layers)
    given = FileMemory(num_blocks * LAYERS.num_layers)
    with tempfile.TemporaryDirectory(prefix="bulk-ways-") as folder:
        giver = BulkMover(GIVER, f"ipc://{folder}/giver", given)
        taker = BulkMover(TAKER, f"ipc://{folder}/taker", FileMemory(num_blocks * 15))
        taker.connect({GIVER: giver.address})
        found: dict[str, list[tuple[float, float]]] = {"sent": [], "read": []}
        for _ in range(options.rounds):
            for way, times in found.items():
                given.is_shared = way == "read"
                times.append(move(giver, taker, num_blocks))
        giver.close()
        taker.close()
    with Report("bulk_ways", mib=options.mib, rounds=options.rounds) as report:
        for way, times in found.items():
            report.add("time", 1e3 * statistics.median(t for t, _ in times), "ms", way=way)
            report.add("processor", 1e3 * statistics.median(c for _, c in times), "ms", way=way)
        for index, name in enumerate(("time", "processor")):
            pairs = zip(found["sent"], found["read"], strict=True)
            ratio = statistics.median(read[index] / sent[index] for sent, read in pairs)
            report.add(f"{name}, read / sent", ratio, "")


if __name__ == "__main__":
    main()
