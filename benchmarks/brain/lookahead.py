"""Bubbles of simulated pipelines over a queue: microbatches by tokens against lookahead.

    python -m benchmarks.brain.lookahead [--num-long 500] [--num-chat 1200]

Two and four instances of Qwen2.5-14B on A800 are one pipeline from the start. All requests are
queued at once, LongBench's or ShareGPT's lengths, and run to their end. The roofline times the
steps, and the cost model that lookahead plans with is a fit to it that is 4-7 % off (as
`benchmarks.brain.cost_model` finds): microbatches are not made equal by the very
numbers that time them. About a minute.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Report, Setting
from kunserve.core.config import SchedulerConfig
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import SimResult, simulate
from kunserve_lab.compare.systems import System, find_system
from kunserve_lab.sim.costs import profile_times
from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import gpu_profile
from kunserve_lab.workload.recipe import Dataset, Recipe, build_workload
from kunserve_lab.workload.workload import Workload

PIPELINES = (2, 4)
MAX_TOTAL_TOKENS = 8192


def queue_of(name: str, count: int, seed: int) -> Workload:
    """So many requests at time 0."""
    recipe = Recipe(
        Dataset.LENGTHS,
        lengths_path=Path(name),
        num_prompts=count,
        max_total_tokens=MAX_TOTAL_TOKENS,
        seed=seed,
    )
    return build_workload(recipe)


def run(system: System, num_stages: int, budget_tokens: int, queue: Workload) -> SimResult:
    """The queue through one pipeline."""
    profile = gpu_profile(find_model("Qwen/Qwen2.5-14B"), find_device("a800"))
    cost = profile_times(profile.times, profile.spec.num_layers, budget_tokens)
    scheduler = SchedulerConfig(256, budget_tokens)
    return simulate(system, Scenario(profile, num_stages, queue, scheduler, cost=cost))


def main() -> None:
    """Every queue, depth and token budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-long", type=int, default=500)
    parser.add_argument("--num-chat", type=int, default=1200)
    parser.add_argument("--budgets", type=int, nargs="+", default=[2048])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    queues = {"longbench": options.num_long, "sharegpt": options.num_chat}
    with Report("lookahead", model="Qwen2.5-14B", device="a800") as report:
        for budget_tokens in options.budgets:
            for name, count in queues.items():
                queue = queue_of(name, count, options.seed)
                for num_stages in PIPELINES:
                    case: dict[str, Setting] = {
                        "queue": name,
                        "stages": num_stages,
                        "budget": budget_tokens,
                    }
                    by_tokens, ahead = (
                        run(
                            replace(
                                find_system("static-pp"),
                                pipeline_stages=num_stages,
                                lookahead=lookahead,
                            ),
                            num_stages,
                            budget_tokens,
                            queue,
                        )
                        for lookahead in (False, True)
                    )
                    compare(report, by_tokens, ahead, **case)


def compare(report: Report, by_tokens: SimResult, ahead: SimResult, **case: Setting) -> None:
    """Bubbles of both, and what lookahead changes."""
    for name, result in (("by tokens", by_tokens), ("lookahead", ahead)):
        assert result.bubble_ratio is not None
        report.add(f"bubbles, {name}", 100 * result.bubble_ratio, "%", **case)
    for name, before, after in (
        ("throughput", by_tokens.metrics.output_throughput, ahead.metrics.output_throughput),
        ("P50 TTFT", by_tokens.metrics.ttft.median_s, ahead.metrics.ttft.median_s),
        (
            "P99 TPOT",
            by_tokens.metrics.tpot.percentile_s(99.0),
            ahead.metrics.tpot.percentile_s(99.0),
        ),
    ):
        report.add(f"{name} by lookahead", 100 * (after / before - 1), "%", **case)


if __name__ == "__main__":
    main()
