"""What the project is held against: predictions, other simulators, random faults."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.markdown import Row
from benchmarks.paper.kept_results import RESULTS, figures_of
from benchmarks.paper.tables import SAME_HOUR, predicted

CHAOS = RESULTS / "chaos.jsonl"
CHAOS_COMMAND = "python -m benchmarks.faults.chaos >> benchmarks/results/chaos.jsonl"
_CHANGES = ("drops", "restores")
"""Counts of a run of faults that are transitions and no faults."""


NEAR = 25.0
"""How far off a prediction may be to be near, in percent."""


def prediction_errors() -> list[float]:
    """Of the ratio recompute / drop, simulated over real: TTFT of each burst, as percent."""
    return [error for _, system, error in _by_profile() if system == "drop"]


def near_predictions() -> float:
    """The share of all such ratios that come near, where the profile is of the same hour."""
    return statistics.mean(abs(error) <= NEAR for of, _, error in _by_profile() if SAME_HOUR in of)


def _by_profile() -> list[tuple[str, str, float]]:
    """Of which burst and system, and by how many percent the simulated ratio is off."""
    return [
        (burst, system, 100 * (one["simulated"] / one["real"] - 1))
        for (burst, steps, system, _), one in predicted().items()
        if steps == "profile"
    ]


def vidur_errors(name: str) -> list[float]:
    """How far Vidur's figure is from ours, in percent, run by run."""
    found: dict[tuple[int, int, float], dict[str, float]] = {}
    for line in figures_of("vidur"):
        if line["name"] == name:
            settings = line["settings"]
            key = settings["instances"], settings["seed"], settings["rate"]
            found.setdefault(key, {})[settings["by"]] = line["value"]
    return [100 * abs(one["ours"] / one["Vidur"] - 1) for one in found.values()]


def cost_errors(model: str) -> list[float]:
    """Mean errors of a cost model against the roofline, in percent."""
    return [
        line["value"]
        for line in figures_of("cost_model")
        if line["name"] == "mean error" and line["settings"]["model"] == model
    ]


@dataclass(frozen=True, slots=True)
class FaultRun:
    """What one run of random faults counted."""

    minutes: float
    num_instances: int
    shares_weights: bool
    """One copy for all instances: nothing could be dropped."""
    num_requests: int
    num_identical: int
    """Answered whole, with the tokens of an undisturbed run."""
    num_broken: int
    """Ended by their client, by the front's death or as the cause of deaths; what they had was
    right."""
    num_wrong: int
    """With other tokens, or never ended."""
    num_transitions: int
    num_faults: int
    num_left: int
    """Requests, blocks, files, processes and the like that were left behind."""
    commit: str


def fault_runs() -> list[FaultRun]:
    """Every kept run on the real engine; none before one is kept."""
    if not CHAOS.exists():
        return []
    lines = [json.loads(line) for line in CHAOS.read_text().splitlines()]
    return [_fault_run(line) for line in lines]


def _fault_run(line: dict[str, object]) -> FaultRun:
    faults, left = line["faults"], line["left"]
    assert isinstance(faults, dict) and isinstance(left, dict)

    def total(names: Sequence[str]) -> int:
        values = [line.get(name, 0) for name in names]
        return sum(value for value in values if isinstance(value, int))

    seconds, instances = line["seconds"], line["instances"]
    assert isinstance(seconds, float) and isinstance(instances, int)
    return FaultRun(
        minutes=seconds / 60,
        num_instances=instances,
        shares_weights=line.get("weights") == "shared",
        num_requests=total(["requests"]),
        num_identical=total(["identical"]),
        num_broken=total(["aborted", "cut", "poisoned"]),
        num_wrong=total(["wrong", "unfinished", "internal_errors"]),
        num_transitions=sum(faults.get(name, 0) for name in _CHANGES),
        num_faults=sum(count for name, count in faults.items() if name not in _CHANGES),
        num_left=sum(left.values()),
        commit=str(line.get("commit", "not kept")),
    )


def faults() -> list[Row]:
    """Random faults on the real engine, run by run; a dash with the reason before one is kept."""
    rows: list[Row] = [
        (
            *("minutes, instances", "requests", "identical", "broken off, right so far", "wrong"),
            *("drops and restores", "other faults", "left behind", "code"),
        )
    ]
    for run in fault_runs():
        counts = (
            *(run.num_requests, run.num_identical, run.num_broken, run.num_wrong),
            *(run.num_transitions, run.num_faults, run.num_left),
        )
        told = f"{run.minutes:.0f} min, {run.num_instances}"
        if run.shares_weights:
            told += ", one copy of the weights"
        rows.append((told, *(f"{count:,}" for count in counts), run.commit))
    if len(rows) == 1:
        rows.append((f"no run is kept: `{CHAOS_COMMAND}`", *("-" for _ in rows[0][1:])))
    return rows
