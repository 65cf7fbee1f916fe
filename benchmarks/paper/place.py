"""Hosts with slow links: groups that merge near each other, against groups that merge blindly.

    python -m benchmarks.paper.place [--links 10 25 100] [--rates 9] [--packed]

16 simulated instances of Qwen2.5-14B on A800 stand on four hosts, four on each
(`experiments/four_hosts.toml`); all exchanges between hosts share the hosts' links, and those
within a host go at an instance's own pace. Instance i stands on host i mod 4, as Ray's SPREAD
strategy places them; with `--packed` the first four stand on the first host, and so on, which is
how blind merges are lucky. Both systems meet the same requests. Exchange is the time from a drop's
commit to the end of its exchange; stall is a request's longest wait for its KV.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Report
from kunserve.core.layout import GroupLayout
from kunserve.core.place import Place
from kunserve.core.snapshots import Kind, Outcome, TransitionRecord
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.settings import SimulatedSetup, workload_of
from kunserve_lab.compare.simulated.scenario import Scenario, build_scenario
from kunserve_lab.compare.simulated.simulation import SimResult, simulate
from kunserve_lab.compare.systems import find_system

FILE = Path(__file__).parents[2] / "experiments" / "four_hosts.toml"
NUM_HOSTS = 4


def places(num_instances: int, gbps: float, is_packed: bool) -> tuple[Place, ...]:
    """Of each instance."""
    per_host = num_instances // NUM_HOSTS
    hosts = [i // per_host if is_packed else i % NUM_HOSTS for i in range(num_instances)]
    return tuple(Place(f"host-{host}", "", gbps) for host in hosts)


def drops(result: SimResult) -> list[TransitionRecord]:
    """Those that were done."""
    return [
        record
        for record in result.transitions
        if record.kind is Kind.DROP and record.outcome is Outcome.DONE
    ]


def spans(layout: GroupLayout, where: tuple[Place, ...]) -> bool:
    """Whether the group stands on several hosts."""
    return len({where[member].host for member in layout.members}) > 1


def tell(report: Report, result: SimResult, scenario: Scenario, **case: str | float) -> None:
    """The figures of one run."""
    done = drops(result)
    across = sum(spans(record.groups_after[0], scenario.world.places) for record in done)
    exchanges_s = [
        record.finished_s - record.committed_s
        for record in done
        if record.finished_s is not None and record.committed_s is not None
    ]
    report.add("drops", len(done), "", **case)
    report.add("across hosts", across, "", **case)
    report.add("exchange median", statistics.median(exchanges_s or [0.0]), "s", **case)
    report.add("exchange longest", max(exchanges_s, default=0.0), "s", **case)
    report.add("longest stall", max((r.max_stall_s for r in done), default=0.0), "s", **case)
    metrics = result.metrics
    for name, stats in (("TTFT", metrics.ttft), ("TPOT", metrics.tpot)):
        for percentile in (50, 99):
            value = stats.percentile_s(float(percentile))
            report.add(f"{name} P{percentile}", value, "s", **case)


def main() -> None:
    """Both systems at every rate and link."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", type=float, nargs="+", default=[10.0, 25.0, 100.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[9.0])
    parser.add_argument("--duration", type=float, default=160.0)
    parser.add_argument("--packed", action="store_true")
    options = parser.parse_args()
    experiment = read_experiment(FILE)
    assert isinstance(experiment.setup, SimulatedSetup)
    settings = replace(experiment.workload, duration_s=options.duration)
    with Report("place", hosts=NUM_HOSTS, packed=options.packed) as report:
        for rate in options.rates:
            workload = workload_of(replace(settings, rate=rate), 1.0, seed=0)
            scenario = build_scenario(experiment.setup, workload)
            for gbps in options.links:
                where = places(scenario.num_instances, gbps, options.packed)
                placed = replace(scenario, world=replace(scenario.world, places=where))
                for name in experiment.systems:
                    result = simulate(find_system(name), placed)
                    case = {"requests per second": rate, "Gbit/s": gbps, "system": name}
                    tell(report, result, placed, **case)


if __name__ == "__main__":
    main()
