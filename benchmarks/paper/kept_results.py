"""The committed results of experiments and benchmarks, for the tables of docs/reproduction.md."""

import functools
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kunserve_lab.compare.results import RunResult, load
from kunserve_lab.compare.slo import FACTOR, FACTORS

RESULTS = Path(__file__).parents[1] / "results"
SLO_KEY = "slo_violations"
"""Beside a run's own fields: the shares of requests over 1, 2, ... 10 times the P50 of `endless`
at the lowest load (``slo.one_base``)."""
LONGBENCH = "end_to_end_longbench_14b"
SHAREGPT = "end_to_end_sharegpt_14b"
BURSTGPT = "end_to_end_burstgpt_14b"
LONGBENCH_72B = "end_to_end_longbench_72b"
HEAVY = "heavy_weights_14b"
BOUNDS = "bounds_longbench_14b"
FIXED = {
    "LongBench": "claims_longbench_14b",
    "whole trace": "claims_whole_trace_14b",
    "ShareGPT": "claims_sharegpt_14b",
    "BurstGPT-like": "claims_burstgpt_14b",
    "72B": "claims_longbench_72b",
    "heavy weights": "claims_heavy_14b",
}
"""The experiments that claims are of: five draws at a load that is fixed beforehand."""


class Runs:
    """The results of one experiment, by system and load."""

    def __init__(self, path: Path) -> None:
        all_runs = load(path)
        self._runs = {(run.system, run.load): run for run in all_runs}
        self._draws: dict[tuple[str, float], dict[int, RunResult]] = {}
        for run in all_runs:
            self._draws.setdefault((run.system, run.load), {})[run.seed] = run
        self._commits = sorted({str(run.environment.get("commit")) for run in all_runs})
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        self._violations: dict[tuple[str, float], list[list[float]]] = {}
        self._rates: dict[tuple[str, float], list[float]] = {}
        for line in lines:
            key = line["system"], line["load"]
            self._violations.setdefault(key, []).append(line.get(SLO_KEY, []))
            rate = line["num_requests"] / line["duration_s"]
            self._rates.setdefault(key, []).append(rate)

    @property
    def loads(self) -> list[float]:
        """In rising order."""
        return sorted({at for _, at in self._runs})

    @property
    def commits(self) -> list[str]:
        """Of which the results are, whichever seed they have."""
        return self._commits

    def __len__(self) -> int:
        return len(self._runs)

    def run(self, system: str, at: float) -> RunResult:
        """One run."""
        return self._runs[system, at]

    def ran(self, system: str, at: float) -> bool:
        """Whether it ran at this load."""
        return (system, at) in self._runs

    def draws(self, system: str, at: float) -> dict[int, RunResult]:
        """Its run of each seed."""
        return self._draws[system, at]

    def violations(self, system: str, at: float, factor: float = FACTOR) -> float:
        """Share of requests over the objective: the median over draws."""
        place = FACTORS.index(factor)
        return statistics.median(late[place] for late in self._violations[system, at])

    def goodput(self, system: str, at: float, factor: float = FACTOR) -> float:
        """Requests within the objective per second of the run: the median over draws."""
        place = FACTORS.index(factor)
        draws = zip(self._violations[system, at], self._rates[system, at], strict=True)
        return statistics.median((1.0 - late[place]) * rate for late, rate in draws)

    def refused(self, system: str) -> float:
        """Share of the requests that it refuses at the load of claims: the median over draws."""
        runs = self.draws(system, self.fixed).values()
        return float(statistics.median((run.num_shed or 0) / run.num_requests for run in runs))

    @property
    def fixed(self) -> float:
        """The load of claims, which is fixed beforehand: the highest of a ``claims_*``."""
        return self.loads[-1]

    def has(self, system: str) -> bool:
        """Whether it ran at the load of claims."""
        return self.ran(system, self.fixed)

    def gains(self, other: str, field: str, system: str = "drop") -> list[float]:
        """How many times lower the system's is than the other's there, in equal draws."""
        ours, theirs = self.draws(system, self.fixed), self.draws(other, self.fixed)
        return [getattr(theirs[seed], field) / getattr(ours[seed], field) for seed in ours]

    def median(self, system: str, field: str) -> float:
        """Of the draws there."""
        runs = self.draws(system, self.fixed).values()
        return float(statistics.median(getattr(run, field) for run in runs))

    @property
    def differing(self) -> list[float]:
        """The loads at which anything is dropped."""
        return [at for at in self.loads if self.run("drop", at).num_drops]


@functools.cache
def runs_of(name: str) -> Runs:
    """An experiment's committed results."""
    return Runs(RESULTS / "simulated" / f"{name}.jsonl")


@functools.cache
def figures_of(benchmark: str) -> list[dict[str, Any]]:
    """A benchmark's committed lines."""
    text = (RESULTS / f"{benchmark}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def ranged(values: Iterable[float], unit: str, *, is_bold: bool = False) -> str:
    """Median and range."""
    ordered = sorted(values)
    middle = f"{statistics.median(ordered):.1f}{unit}"
    if is_bold:
        middle = f"**{middle}**"
    return f"{middle} ({ordered[0]:.1f}-{ordered[-1]:.1f})"


def signed(percent: float) -> str:
    """Whole percents; what rounds to nothing has no sign."""
    return f"{percent:+.0f} %" if round(percent) else "0 %"
