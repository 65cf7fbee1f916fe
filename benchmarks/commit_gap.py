"""How long no token comes when groups change while a long queue waits.

    python -m benchmarks.commit_gap [--num-queued 0,10000] [--prompt-tokens 2000] [--rounds 3]

Two processes with fake bodies serve a few streams; behind them wait requests with long prompts.
A drop by hand merges the two groups. Reported: the longest time without any token from the order
on, the gap as the instances measured it, and the memory of front and instances together that each
queued token takes.
"""

import argparse
import asyncio
import itertools
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.report import Report
from kunserve.cluster.driver.local import LocalCluster
from kunserve.cluster.processes.launch import FakeSettings
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.plan import Plan
from kunserve.core.request import Request, SamplingParams
from kunserve.core.tokens import TokenIds
from kunserve_lab.world.fake_main import MODULE as FAKE_MODULE

FAKE = FakeSettings(FAKE_MODULE, kv_blocks=16384, step_s=0.005)
CONFIG = KunServeConfig(
    instance=InstanceConfig(block_size=16),
    scheduler=SchedulerConfig(max_num_seqs=8),
    overload=OverloadConfig(policy="recompute"),
    cluster=ClusterConfig(num_instances=2),
)
NUM_RUNNING = 2 * CONFIG.scheduler.max_num_seqs
NUM_STREAMS = 3 * NUM_RUNNING
"""More than run at once, however they are dispatched: whatever comes after them waits."""
AFTER_S = 1.0
"""How long tokens are watched once they flow again."""


async def measure(num_queued: int, prompt_tokens: int) -> dict[str, float]:
    """Seconds without a token for one drop, and bytes per queued token."""
    cluster = await LocalCluster.start(Plan(CONFIG), vocab_size=FAKE.vocab_size, fake=FAKE)
    moments: list[float] = []
    try:

        def deliver(token: TokenOutput) -> None:
            moments.append(time.monotonic())

        for number in range(NUM_STREAMS):
            cluster.submit(_request(f"stream{number}", 16, 20_000), deliver)
        while sum(load.num_running for load in cluster.state().loads) < NUM_RUNNING:
            await asyncio.sleep(0.01)
        before_bytes = _memory_bytes(cluster)
        for number in range(num_queued):
            cluster.submit(_request(f"queued{number}", prompt_tokens, 16), deliver)
            if number % 100 == 0:
                await asyncio.sleep(0)
        while cluster.state().num_waiting < num_queued:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        queue_bytes = _memory_bytes(cluster) - before_bytes
        began_s = time.monotonic()
        await cluster.drop(None)
        flows_s = moments[-1]
        while moments[-1] == flows_s or time.monotonic() < began_s + AFTER_S:
            await asyncio.sleep(0.01)
        watched = [moment for moment in moments if moment >= began_s - 0.1]
        gaps = [after - before for before, after in itertools.pairwise(watched)]
        record = cluster.state().transitions[-1]
        return {
            "longest time without a token": max(gaps),
            "gap as measured by instances": record.gap_s,
            "memory per queued token": queue_bytes / max(1, num_queued * prompt_tokens),
        }
    finally:
        await cluster.close()


def _request(name: str, num_prompt: int, max_tokens: int) -> Request:
    prompt = TokenIds((number * 7 + len(name)) % FAKE.vocab_size for number in range(num_prompt))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(RequestId(name), prompt, sampling, arrival_s=0.0)


def _memory_bytes(cluster: LocalCluster) -> int:
    """Resident memory of the front, which is this process, and of its instances."""
    instances = [cluster.pid_of(InstanceId(i)) for i in range(CONFIG.cluster.num_instances)]
    total = 0
    for pid in (os.getpid(), *instances):
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            total += int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-queued", default="0,10000")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    nums_queued = [int(part) for part in options.num_queued.split(",")]
    # A process for each, because freed memory would be used again by the next.
    with (
        Report("commit_gap", prompt_tokens=options.prompt_tokens) as report,
        ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes,
    ):
        for number, num_queued in itertools.product(range(options.rounds), nums_queued):
            figures = processes.submit(run, num_queued, options.prompt_tokens).result()
            for name, value in figures.items():
                is_memory = name.startswith("memory")
                if num_queued or not is_memory:
                    unit = "B" if is_memory else "s"
                    report.add(name, value, unit, num_queued=num_queued, round=number)


def run(num_queued: int, prompt_tokens: int) -> dict[str, float]:
    """``measure`` in a process of its own."""
    return asyncio.run(measure(num_queued, prompt_tokens))


if __name__ == "__main__":
    main()
