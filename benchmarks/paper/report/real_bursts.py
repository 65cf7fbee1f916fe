"""Real runs on equal requests: both bursts as tables, and where they lie on the map."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.markdown import Row
from benchmarks.paper.kept_results import RESULTS
from benchmarks.paper.kept_tables import real
from benchmarks.paper.kept_tables.real import FIRST, SECOND, figures, groups, rate, spaced
from benchmarks.paper.points import Point
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.groups import AtLoad
from kunserve_lab.compare.output.table import Cell, Pick, cell
from kunserve_lab.compare.results import RunResult
from kunserve_lab.compare.simulated.projection import Projection, capacity, outlook
from kunserve_lab.sim.fluid import Capacity

ROOT = Path(__file__).parents[3]
SECOND_COMMAND = (
    "kunserve compare experiments/overload_second_burst.toml -o benchmarks/results/"
    "overload-second-burst"
)
EXPERIMENTS = {
    real.ROUNDS: "overload",
    FIRST: "overload",
    SECOND: "overload_second_burst",
}
"""The experiments in ``experiments/`` that the folders are of."""
WORDS = {
    real.ROUNDS: "first burst",
    FIRST: "first burst, capped",
    SECOND: "second burst, capped",
}
ELSEWHERE = {
    real.SLOW_FIRST: "first burst, capped, AMD Zen 3 (AVX2)",
    real.SLOW_SECOND: "second burst, capped, AMD Zen 3 (AVX2)",
}
"""On other processors, at loads for those. On no map, because the map has step times of Zen 4."""
P95 = "P95 TTFT (s)"


def kept(folder: str) -> bool:
    """Whether the runs are there."""
    return (RESULTS / folder / "results.jsonl").exists()


def bursts() -> Iterator[tuple[str, AtLoad]]:
    """Every kept load of both bursts, lower ones first."""
    for folder in EXPERIMENTS:
        if kept(folder):
            for at in sorted(groups(folder)):
                yield folder, groups(folder)[at]


def picks(group: AtLoad) -> dict[str, tuple[Pick, str]]:
    """`real.figures`, with P95 before P99, which of a hundred requests is the second one."""
    found: dict[str, tuple[Pick, str]] = {}
    for name, told in figures(group).items():
        if name == real.P99:
            found[P95] = p95_s, ".1f"
        found[name] = told
    return found


def p95_s(run: RunResult) -> float | None:
    """Of TTFT over equal requests; None where single requests were not kept."""
    told = [
        value
        for at, value in enumerate(run.ttft_ms)
        if value is not None and at not in run.left_out
    ]
    return float(np.percentile(told, 95.0)) / 1e3 if told else None


def told(group: AtLoad, system: str, name: str) -> Cell | None:
    """Median and range of one figure; None where it was not kept."""
    if system not in group.by_system:
        return None
    return cell(group.by_system[system], picks(group)[name][0])


def median(group: AtLoad, system: str, name: str) -> float:
    """Of a figure that must be there."""
    found = told(group, system, name)
    assert found is not None, (system, name)
    return found.median


def table() -> list[Row]:
    """Both bursts: a row for each load and system, medians and ranges over rounds and draws."""
    rows: list[Row] = []
    for folder, group in (*bursts(), *_elsewhere()):
        names = picks(group)
        if not rows:
            rows.append(("burst, load", "system", "runs", *names))
        for system, runs in group.by_system.items():
            cells = (told(group, system, name) for name in names)
            shown = (
                "-" if one is None else spaced(one.shown(form))
                for one, (_, form) in zip(cells, names.values(), strict=True)
            )
            where = f"{(WORDS | ELSEWHERE)[folder]}, {rate(group)}"
            rows.append((where, f"`{system}`", str(len(runs)), *shown))
    if not kept(SECOND):
        rows.append((f"second burst: not kept; `{SECOND_COMMAND}`", *("-" for _ in rows[0][1:])))
    return rows


def _elsewhere() -> Iterator[tuple[str, AtLoad]]:
    """The same; a load at which `recompute` did not run is there for the objective only."""
    for folder in filter(kept, ELSEWHERE):
        for at in sorted(groups(folder)):
            if "recompute" in groups(folder)[at].by_system:
                yield folder, groups(folder)[at]


def num_draws_elsewhere() -> int:
    """Of each burst on other processors."""
    return min(len({run.seed for run in group.runs}) for _, group in _elsewhere())


def folders() -> tuple[str, ...]:
    """Of what the table is made."""
    return tuple(folder for folder in (*EXPERIMENTS, *ELSEWHERE) if kept(folder))


@dataclass(frozen=True, slots=True)
class Placed:
    """A real load on the map: what the fluid model says of its burst, and what was measured."""

    where: str
    able: Capacity
    expected: Projection
    real: float
    """Times lower that P99 TTFT is with drops: medians over rounds."""

    @property
    def is_within(self) -> bool:
        """Whether what was measured is in the model's range."""
        low, high = self.expected.doubt
        return low <= self.real <= high


@functools.cache
def placed() -> tuple[Placed, ...]:
    """Every load of both bursts, and of the loads above what fits."""
    found = []
    for folder, group in (*bursts(), *_above()):
        path = ROOT / "experiments" / f"{EXPERIMENTS.get(folder, 'overload')}.toml"
        if not path.exists() or not {"recompute", "drop"} <= group.by_system.keys():
            continue
        most = read_experiment(path).workload.max_total_tokens
        scenario = Point("real", path.stem, group.load, most).scenario(group.runs[0].seed)
        able = capacity(scenario)
        expected = outlook(scenario, able)
        assert expected is not None, (folder, group.load)
        before, after = (median(group, name, real.P99) for name in ("recompute", "drop"))
        where = f"{WORDS.get(folder, 'first burst')}, {rate(group)}"
        found.append(Placed(where, able, expected, before / after))
    return tuple(found)


def _above() -> Iterator[tuple[str, AtLoad]]:
    """Higher loads of the first burst; those that its rounds have are there already."""
    known = groups(real.ROUNDS)
    for at, group in sorted(groups(real.ABOVE).items()):
        if at not in known:
            yield real.ABOVE, group


def placed_table() -> list[Row]:
    """Real bursts: what the map says, and what was measured."""
    rows: list[Row] = [
        ("real burst", "height (X)", "length (s)", "P99 TTFT lower, by the map", "measured")
    ]
    for one in placed():
        low, high = one.expected.doubt
        rows.append(
            (
                *(one.where, f"{one.expected.height:.2f}", f"{one.expected.burst.length_s:.0f}"),
                f"{one.expected.by_drop:.1f}x ({low:.1f}-{high:.1f})",
                f"{one.real:.1f}x",
            )
        )
    return rows
