"""The committed results of experiments and benchmarks, for the tables of docs/reproduction.md."""

import functools
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kunserve_lab.compare.results import RunResult, load

RESULTS = Path(__file__).parents[1] / "results"
SLO_KEY = "slo_violations_5x"
"""Beside a run's own fields: requests over 5 times the best P50 of all systems at its load."""
CLEARLY = 1.1
"""Times lower that P99 must be for a load to be one at which dropping helps."""
LONGBENCH = "end_to_end_longbench_14b"
SHAREGPT = "end_to_end_sharegpt_14b"
BURSTGPT = "end_to_end_burstgpt_14b"
LONGBENCH_72B = "end_to_end_longbench_72b"
HEAVY = "heavy_weights_14b"
BOUNDS = "bounds_longbench_14b"


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
        self._violations: dict[tuple[str, float], float | None] = {
            (line["system"], line["load"]): line.get(SLO_KEY) for line in lines
        }

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

    def draws(self, system: str, at: float) -> dict[int, RunResult]:
        """Its run of each seed."""
        return self._draws[system, at]

    def violations(self, system: str, at: float) -> float | None:
        """Share of requests over the objective; None where it was not kept."""
        return self._violations[system, at]

    def gain(self, at: float, field: str = "ttft_p99_s") -> float:
        """How many times lower `drop` is than `recompute`."""
        lower: float = getattr(self.run("drop", at), field)
        return float(getattr(self.run("recompute", at), field)) / lower

    def best(self, field: str = "ttft_p99_s") -> float:
        """The load at which `drop` lowers it most."""
        return max(self.loads, key=lambda at: self.gain(at, field))

    @property
    def differing(self) -> list[float]:
        """The loads at which anything is dropped."""
        return [at for at in self.loads if self.run("drop", at).num_drops]

    @property
    def helped(self) -> list[float]:
        """The loads at which `drop` clearly lowers P99 TTFT."""
        return [at for at in self.loads if self.gain(at) >= CLEARLY]


@functools.cache
def runs_of(name: str) -> Runs:
    """An experiment's committed results."""
    return Runs(RESULTS / "simulated" / f"{name}.jsonl")


@functools.cache
def figures_of(benchmark: str) -> list[dict[str, Any]]:
    """A benchmark's committed lines."""
    text = (RESULTS / f"{benchmark}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def ranged(values: Iterable[float], unit: str) -> str:
    """Median and range."""
    ordered = sorted(values)
    middle = statistics.median(ordered)
    return f"{middle:.1f}{unit} ({ordered[0]:.1f}-{ordered[-1]:.1f})"


def signed(percent: float) -> str:
    """Whole percents; what rounds to nothing has no sign."""
    return f"{percent:+.0f} %" if round(percent) else "0 %"
