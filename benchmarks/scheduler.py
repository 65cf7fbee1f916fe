"""What scheduling takes per step with many running and waiting requests; target: under 1 ms.

    python -m benchmarks.scheduler [--num-running 256] [--num-steps 300]

No model and no clock but this script's: the real scheduler plans and completes decode steps of
256 running requests (some prompts among them), and the real block table follows.
"""

import argparse
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
        prompt = TokenIds(range(1, 33 + i % 64))
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
    for request_id in plan.released:
        table.release(request_id)
    for request_id, start, num_tokens, _ in plan.chunks:
        copies = table.grow(request_id, -(-(start + num_tokens) // BLOCK_SIZE))
        assert copies == (), copies


def _sample(plan: StepPlan) -> StepResult:
    tokens = tuple(
        SampledToken(chunk.request_id, 7, None) for chunk in plan.chunks if chunk.samples
    )
    return StepResult(plan.group_id, plan.step_id, tokens)


def main() -> None:
    """Every number of stages, with and without a long queue."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-running", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=300)
    args = parser.parse_args()
    with Report("scheduler", running=args.num_running) as report:
        for num_stages in (1, 2, 4):
            for num_waiting in (0, 10_000):
                figures = measure(args.num_running, num_waiting, num_stages, args.num_steps)
                for name, value_ms in figures.items():
                    report.add(name, value_ms, "ms", stages=num_stages, waiting=num_waiting)


if __name__ == "__main__":
    main()
