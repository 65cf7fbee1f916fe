"""How far the simulated claims depend on the step times that are assumed.

    python -m benchmarks.paper.sensitivity [--jobs N]

The load of the claims (``claims_longbench_14b``, ``claims_heavy_14b``), three draws: matrix
products, prompt attention and the host a quarter slower and faster, one after the other. How many
times lower is P99 TTFT with `drop` than with `recompute`, and how much longer P50 TPOT?
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.paper.kept_results import FIXED
from benchmarks.paper.reproduction import experiments
from benchmarks.paper.simulated_code import code
from benchmarks.report import Report
from kunserve_lab.compare.comparison import Options, compare
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.results import RunResult
from kunserve_lab.compare.settings import SimulatedSetup
from kunserve_lab.sim.devices import DEVICES, Device

NAMES = ("LongBench", "heavy weights")
SEEDS = (0, 1, 2)
SPEEDS = {"slower": 0.75, "faster": 1.25}
TIMES = {"faster": 0.75, "slower": 1.25}


def devices(plain: Device) -> Iterator[tuple[str, Device]]:
    """The device as it is, and with one of its times changed."""
    yield "as assumed", plain
    for how, speed in SPEEDS.items():
        yield f"matrix products {how}", replace(plain, matmul_share=plain.matmul_share * speed)
        yield f"attention {how}", replace(plain, attention_share=plain.attention_share * speed)
    for how, time in TIMES.items():
        yield (
            f"host {how}",
            replace(
                plain,
                step_overhead_s=plain.step_overhead_s * time,
                layer_overhead_s=plain.layer_overhead_s * time,
                sequence_overhead_s=plain.sequence_overhead_s * time,
            ),
        )


def main() -> None:
    """Both claims under every device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, help="simulations at once; one per core by default")
    num_jobs = parser.parse_args().jobs
    with Report("sensitivity", code()) as report:
        for name in NAMES:
            experiment = read_experiment(experiments()[FIXED[name]])
            assert isinstance(experiment.setup, SimulatedSetup)
            plain = DEVICES[experiment.setup.device]
            for changed, device in devices(plain):
                DEVICES[plain.name] = device
                runs = compare(
                    replace(
                        experiment,
                        systems=("recompute", "drop"),
                        loads=(max(experiment.loads),),
                        seeds=SEEDS,
                    ),
                    None,
                    Options(num_jobs=num_jobs),
                    say=lambda line: None,
                )
                _tell(report, name, changed, runs)
            DEVICES[plain.name] = plain


def _tell(report: Report, name: str, changed: str, runs: list[RunResult]) -> None:
    plain, drop = (
        {run.seed: run for run in runs if run.system == system} for system in ("recompute", "drop")
    )
    lower = [plain[seed].ttft_p99_s / drop[seed].ttft_p99_s for seed in SEEDS]
    longer = [100 * (drop[seed].tpot_p50_s / plain[seed].tpot_p50_s - 1) for seed in SEEDS]
    for what, values, unit in (("P99 TTFT lower", lower, "x"), ("P50 TPOT", longer, "%")):
        report.add(what, statistics.median(values), unit, of=name, times=changed)
        report.add(f"{what}, least", min(values), unit, of=name, times=changed)
        report.add(f"{what}, most", max(values), unit, of=name, times=changed)


if __name__ == "__main__":
    main()
