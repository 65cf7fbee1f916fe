"""How fast the simulator is: 8 instances for 640 s, and 1,000 instances for 60 s.

    python -m benchmarks.brain.simulator [--quick] [--system drop] [--rate 0.325]

The workload is the built-in bursty window with LongBench-like lengths (5,900 in, 500 out), at a
rate that fills about half of the KV memory in the spikes; at 0.325 requests/s per instance they
overflow it and layers are dropped. CPU seconds of this process, one core.
"""

import argparse
import resource
import time

import numpy as np

from benchmarks.report import Report, Setting
from kunserve_lab.compare.settings import SimulatedSetup, WorkloadSettings, workload_of
from kunserve_lab.compare.simulated.scenario import Scenario, build_scenario
from kunserve_lab.compare.simulated.simulation import simulate
from kunserve_lab.compare.systems import find_system
from kunserve_lab.workload.workload import Lengths, Workload

TARGETS_S = {(8, 640.0): 10.0, (1000, 60.0): 300.0}


def scenario(num_instances: int, duration_s: float, rate: float) -> Scenario:
    """Arrivals of the built-in window; lengths drawn around LongBench's means."""
    window = WorkloadSettings(rate=rate * num_instances, duration_s=duration_s)
    made = build_scenario(
        SimulatedSetup(num_instances=num_instances), workload_of(window, 1.0, seed=0)
    )
    arrivals = made.workload.arrival_s
    rng = np.random.default_rng(0)
    inputs = np.clip(rng.lognormal(8.5, 0.6, len(arrivals)), 100, 30_000).astype(int)
    outputs = np.clip(rng.lognormal(6.1, 0.4, len(arrivals)), 10, 2000).astype(int)
    lengths = Lengths(tuple(inputs.tolist()), tuple(outputs.tolist()), "LongBench-like")
    return Scenario(
        made.profile,
        num_instances,
        Workload(arrivals, lengths, made.workload.arrivals_source),
        made.scheduler,
    )


def measure(
    report: Report, system: str, num_instances: int, duration_s: float, rate: float
) -> None:
    """One simulation."""
    world = scenario(num_instances, duration_s, rate)
    began_s = time.process_time()
    result = simulate(find_system(system), world)
    took_s = time.process_time() - began_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    case: dict[str, Setting] = {
        "system": system,
        "instances": num_instances,
        "simulated_s": duration_s,
    }
    report.add("CPU", took_s, "s", **case)
    report.add("target", TARGETS_S.get((num_instances, duration_s)), "s", **case)
    report.add("events", result.num_events, "", **case)
    report.add("requests", len(world.workload), "", **case)
    report.add("failed", result.metrics.num_failed, "", **case)
    report.add("drops", result.num_drops, "", **case)
    report.add("peak memory so far", peak_mib, "MiB", **case)


def main() -> None:
    """Every size under every system asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument("--system", action="append", help="recompute and drop by default")
    parser.add_argument("--rate", type=float, default=0.25, help="requests/s per instance")
    args = parser.parse_args()
    share = 0.1 if args.quick else 1.0
    with Report("simulator", rate_per_instance=args.rate) as report:
        for num_instances, duration_s in TARGETS_S:
            for system in args.system or ["recompute", "drop"]:
                measure(report, system, num_instances, duration_s * share, args.rate)


if __name__ == "__main__":
    main()
