"""What scheduling takes per step with many running and waiting requests; target: under 1 ms.

    python -m benchmarks.brain.scheduler [--num-running 256] [--num-steps 300] [--num-lives 512]

No model and no clock but this script's: the real scheduler plans and completes decode steps of
256 running requests (some prompts among them), and the real block table follows. Then whole lives
of requests whose prompts have nothing in common, with the prefix cache and without it in turns:
what naming blocks, keeping and evicting them adds to a request.
"""

import argparse
import random
import statistics
import time
from collections import deque

from benchmarks.report import Report
from kunserve.control.group.scheduler import Scheduler
from kunserve.control.instance.block_table import BlockTable
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.request import Request, SamplingParams
from kunserve.core.step import SampledToken, StepPlan, StepResult
from kunserve.core.tokens import TokenIds

BLOCK_SIZE = 16
NUM_LAYERS = 30
LIFE = {"running": 64, "input": 512, "output": 64}
"""Requests at once, and tokens of each."""


def measure(
    num_running: int, num_waiting: int, num_stages: int, num_steps: int
) -> dict[str, float]:
    """Median and tail of one step's parts in milliseconds."""
    capacity = num_running * 80
    scheduler = Scheduler(
        config=SchedulerConfig(max_num_seqs=-(-num_running // num_stages)),
        group_id=GroupId(0),
        num_stages=num_stages,
        block_size=BLOCK_SIZE,
        capacity_blocks=capacity,
        eos_token_ids=frozenset({0}),
        max_model_len=8192,
    )
    table = BlockTable(NUM_LAYERS, NUM_LAYERS * capacity, num_running, 80)
    for i in range(num_running + num_waiting):
        sampling = SamplingParams(max_tokens=4 * num_steps + 64)
        prompt = TokenIds([i, *range(1, 33 + i % 64)])
        scheduler.add(Request(RequestId(f"cmpl-{i:024d}-0"), prompt, sampling, float(i)))
    samples: dict[str, list[float]] = {"schedule": [], "tokens": [], "tables": [], "complete": []}
    plans: deque[StepPlan] = deque()
    warm = 0
    while len(samples["complete"]) < num_steps:
        now = time.perf_counter
        t0 = now()
        plan = scheduler.schedule(t0)
        t1 = now()
        assert plan is not None
        scheduler.token_ids_of(plan)
        t2 = now()
        _grow(table, plan)
        t3 = now()
        plans.append(plan)
        if len(plans) < num_stages:
            continue
        result = _sample(plans.popleft())
        t4 = now()
        scheduler.complete(result, t4)
        t5 = now()
        if warm < 2 * num_stages + num_running // 8:
            warm += 1
            continue
        for name, seconds in zip(samples, (t1 - t0, t2 - t1, t3 - t2, t5 - t4), strict=True):
            samples[name].append(seconds * 1e3)
    scheduler.check()
    steps = [sum(parts) for parts in zip(samples["schedule"], samples["complete"], strict=True)]
    figures = {name: statistics.median(values) for name, values in samples.items()}
    figures["step"] = statistics.median(steps)
    figures["step, P99"] = statistics.quantiles(steps, n=100)[98]
    return figures


def _grow(table: BlockTable, plan: StepPlan) -> None:
    for kept in plan.kept:
        table.keep(*kept)
    for request_id in plan.released:
        table.release(request_id)
    for evicted in plan.evicted:
        table.evict(*evicted)
    for shared in plan.shared:
        table.share(*shared)
    for request_id, start, num_tokens, _ in plan.chunks:
        copies = table.grow(request_id, -(-(start + num_tokens) // BLOCK_SIZE))
        assert copies == (), copies


def _sample(plan: StepPlan) -> StepResult:
    tokens = tuple(
        SampledToken(chunk.request_id, 7, None) for chunk in plan.chunks if chunk.samples
    )
    return StepResult(plan.group_id, plan.step_id, tokens)


def measure_lives(caches: bool, num_requests: int, seed: int) -> float:
    """CPU milliseconds of scheduling and block tables that a request takes, all its life."""
    capacity = LIFE["running"] * (LIFE["input"] + LIFE["output"]) // BLOCK_SIZE * 2
    scheduler = Scheduler(
        config=SchedulerConfig(LIFE["running"], enable_prefix_caching=caches),
        group_id=GroupId(0),
        num_stages=1,
        block_size=BLOCK_SIZE,
        capacity_blocks=capacity,
        eos_token_ids=frozenset(),
        max_model_len=8192,
    )
    table = BlockTable(NUM_LAYERS, NUM_LAYERS * capacity, LIFE["running"], 80)
    draw = random.Random(seed)
    sampling = SamplingParams(max_tokens=LIFE["output"])
    requests = [
        Request(
            RequestId(f"cmpl-{i:024d}-0"),
            TokenIds([draw.randrange(50_000) for _ in range(LIFE["input"])]),
            sampling,
            float(i),
        )
        for i in range(num_requests)
    ]
    start = time.process_time()
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        now_s = time.perf_counter()
        plan = scheduler.schedule(now_s)
        assert plan is not None
        scheduler.token_ids_of(plan)
        _grow(table, plan)
        scheduler.complete(_sample(plan), now_s)
    return (time.process_time() - start) * 1e3 / num_requests


def compare_lives(report: Report, num_requests: int, rounds: int) -> None:
    """With the cache and without it in turns; the first round warms up."""
    values: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for caches in (True, False) if number % 2 else (False, True):
            value = measure_lives(caches, num_requests, number)
            if number:
                values[caches].append(value)
    added = [on - off for on, off in zip(values[True], values[False], strict=True)]
    for name, numbers in (("without", values[False]), ("with", values[True]), ("added", added)):
        report.add(
            "scheduling of a request",
            statistics.median(numbers),
            "ms",
            prefix_cache=name,
            low=round(min(numbers), 3),
            high=round(max(numbers), 3),
        )
    blocks = (LIFE["input"] + LIFE["output"]) / BLOCK_SIZE
    report.add("added per block", statistics.median(added) * 1e3 / blocks, "us")


def main() -> None:
    """Every number of stages, with and without a long queue."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-running", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=300)
    parser.add_argument("--num-lives", type=int, default=512)
    args = parser.parse_args()
    with Report("scheduler", running=args.num_running) as report:
        for num_stages in (1, 2, 4):
            for num_waiting in (0, 10_000):
                figures = measure(args.num_running, num_waiting, num_stages, args.num_steps)
                for name, value_ms in figures.items():
                    report.add(name, value_ms, "ms", stages=num_stages, waiting=num_waiting)
        compare_lives(report, args.num_lives, rounds=5)


if __name__ == "__main__":
    main()
