"""What planning a step takes behind so much memory that was read, as weights are by every step.

    python -m benchmarks.cold_plans [--rounds 60]

The real scheduler plans and completes microbatches of eight decodes, as a pair's leader does.
Before each of them so many MiB are read. Beyond what the processor's last cache holds Python's
code and objects come from memory again, one line after the other. In turns, medians.
"""

import argparse
import statistics
import time
from collections import deque

import numpy as np

from benchmarks.report import Report
from kunserve.control.group.scheduler import Scheduler
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import GroupId, RequestId
from kunserve.core.request import Request, SamplingParams
from kunserve.core.step import SampledToken, StepPlan, StepResult
from kunserve.core.tokens import TokenIds

NUM_STAGES = 2
NUM_STREAMS = 16
READ_MIB = (0, 2, 8, 16, 32, 68, 136)
"""68: what a stage of SmolLM2 reads for a microbatch."""
WARM_UP = 100


class Leader:
    """A pair's scheduler, with a microbatch in flight."""

    def __init__(self) -> None:
        self._scheduler = Scheduler(
            config=SchedulerConfig(),
            group_id=GroupId(0),
            num_stages=NUM_STAGES,
            block_size=16,
            capacity_blocks=100_000,
            eos_token_ids=frozenset(),
            max_model_len=100_000,
        )
        for number in range(NUM_STREAMS):
            prompt = TokenIds([number, *range(1, 33)])
            sampling = SamplingParams(max_tokens=90_000)
            name = RequestId(f"cmpl-{number:024d}-0")
            self._scheduler.add(Request(name, prompt, sampling, float(number)))
        self._plans: deque[StepPlan] = deque()
        self._plan()

    def turn(self) -> None:
        """Plan a microbatch, and complete the one before."""
        self._plan()
        plan = self._plans.popleft()
        tokens = tuple([SampledToken(name, 7, None) for name in plan.sampled_requests])
        self._scheduler.complete(StepResult(plan.group_id, plan.step_id, tokens), 1.0)

    def _plan(self) -> None:
        plan = self._scheduler.schedule(1.0)
        assert plan is not None
        self._scheduler.token_ids_of(plan)
        self._plans.append(plan)


def main() -> None:
    """Every size in each round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    memory, leader = np.ones(max(READ_MIB) << 18, dtype=np.float32), Leader()
    for _ in range(WARM_UP):
        leader.turn()
    found: dict[int, list[float]] = {mib: [] for mib in READ_MIB}
    for _ in range(options.rounds):
        for mib, times_us in found.items():
            memory[: mib << 18].max(initial=0.0)
            start_s = time.thread_time()
            leader.turn()
            times_us.append(1e6 * (time.thread_time() - start_s))
    with Report("cold_plans", streams=NUM_STREAMS, stages=NUM_STAGES) as report:
        for mib, times_us in found.items():
            report.add("a plan", statistics.median(times_us), "us", read_mib=mib)


if __name__ == "__main__":
    main()
