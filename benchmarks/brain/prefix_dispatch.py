"""What dispatch gains by knowing prefixes, and the guard against imbalance; simulated.

    python -m benchmarks.brain.prefix_dispatch [--instances 4 8] [--seeds 0 1]

Qwen2.5-14B on A800. Chats: conversations of 10 turns behind one system prompt of 500 tokens. A hot
document: every request asks something about the same 6,000 tokens. Nothing shared: requests that
have nothing in common. Dispatch is blind (the least loaded instance), knows prefixes, or knows them
without the guard against imbalance. ``busiest`` is the share of the tokens that the busiest
instance made, times the number of instances: 1 is even. Ratios are medians over the seeds of
blind over knowing. Five minutes.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from unittest.mock import patch

from benchmarks.report import Report, Setting
from kunserve.core.config import SchedulerConfig
from kunserve.policy.dispatch import affinity
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import SimResult, simulate
from kunserve_lab.compare.systems import System, find_system
from kunserve_lab.sim.costs import profile_times
from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import gpu_profile
from kunserve_lab.workload.multi_turn import Conversation, conversations

BUDGET_TOKENS = 2048
TRAFFIC = {
    "chats": (Conversation(10, 500, 300, 200, 10.0), (1.0, 3.0)),
    "hot document": (Conversation(1, 6000, 100, 200, 0.0), (0.5, 2.0)),
    "nothing shared": (Conversation(1, 0, 1500, 200, 0.0), (2.0,)),
}
"""The shape, and requests per second of each instance."""
UNGUARDED = "no guard"


def systems() -> Iterator[tuple[str, System]]:
    """The ways of dispatch, and no cache at all."""
    drop = find_system("drop")
    yield "no cache", replace(drop, caches_prefixes=False)
    yield "blind", replace(drop, knows_prefixes=False)
    yield "knows", drop
    yield UNGUARDED, drop


def run(system: System, name: str, traffic: str, rate: float, num: int, seed: int) -> SimResult:
    """One minute of arrivals."""
    shape = TRAFFIC[traffic][0]
    workload = conversations(shape, round(60 * rate * num), rate * num, seed)
    profile = gpu_profile(find_model("Qwen/Qwen2.5-14B"), find_device("a800"))
    cost = profile_times(profile.times, profile.spec.num_layers, BUDGET_TOKENS)
    scheduler = SchedulerConfig(256, BUDGET_TOKENS)
    scenario = Scenario(profile, num, workload, scheduler, cost=cost)
    with patch.object(affinity, "SLACK", inf if name == UNGUARDED else affinity.SLACK):
        return simulate(system, scenario)


def busiest(result: SimResult) -> float:
    """Tokens of the busiest instance over the mean."""
    tokens = result.generation_tokens
    return max(tokens) * len(tokens) / sum(tokens)


def main() -> None:
    """Every traffic, number of instances and rate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--traffic", nargs="+", choices=list(TRAFFIC), default=list(TRAFFIC))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    with Report("prefix_dispatch", model="Qwen2.5-14B", device="a800") as report:
        for num in options.instances:
            for traffic in options.traffic:
                for rate in TRAFFIC[traffic][1]:
                    compare(report, traffic, rate, num, options.seeds)


def compare(report: Report, traffic: str, rate: float, num: int, seeds: list[int]) -> None:
    """All ways of dispatch at one rate."""
    mean_s: dict[str, list[float]] = {}
    for name, system in systems():
        done = [run(system, name, traffic, rate, num, seed) for seed in seeds]
        metrics = [one.metrics for one in done]
        mean_s[name] = [one.ttft.mean_s for one in metrics]
        where: dict[str, Setting] = {
            "traffic": traffic,
            "instances": num,
            "rate": rate,
            "dispatch": name,
        }
        for label, values, unit in (
            ("mean TTFT", [1e3 * value for value in mean_s[name]], "ms"),
            ("P99 TTFT", [1e3 * one.ttft.percentile_s(99) for one in metrics], "ms"),
            ("mean TPOT", [1e3 * one.tpot.mean_s for one in metrics], "ms"),
            ("hit rate", [one.prefix_hit_rate for one in done], ""),
            ("busiest", [busiest(one) for one in done], ""),
        ):
            report.add(label, statistics.median(values), unit, **where)
    gains = [blind / knows for blind, knows in zip(mean_s["blind"], mean_s["knows"], strict=True)]
    case: dict[str, Setting] = {"traffic": traffic, "instances": num, "rate": rate}
    report.add("blind/knows", statistics.median(gains), "", **case)
    report.add("least", min(gains), "", **case)
    report.add("most", max(gains), "", **case)


if __name__ == "__main__":
    main()
