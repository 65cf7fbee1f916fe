"""The simulator's figures on requests that nothing was tuned on. Once for each release.

    python -m benchmarks.paper.test_set
    python -m benchmarks.paper.test_set --table

``test_set.toml`` names seeds, windows and systems. Every run is a few lines in
benchmarks/results/test_set.jsonl, with the version and the digest of the code. What a version has
been asked once is not asked again: whoever looks, changes something and looks again has tuned on
the test set. ``--again`` does it nonetheless, and the lines of both stay. A call that was broken
off goes on where it stopped, if the code is the same. The windows need `azure-2023-conv` and
`azure-2023-code`, which are downloaded. All of it takes an hour and a half of one core.
"""

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kunserve
from benchmarks.markdown import Row, markdown
from benchmarks.paper.held_back import held_back
from benchmarks.paper.kept_results import RESULTS, ranged
from benchmarks.paper.points import ROOT, Point, later_azure_trace, run_figures
from benchmarks.paper.simulated_code import code
from benchmarks.report import Report
from kunserve.core.errors import ConfigError
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.settings import WorkloadSettings, workload_of
from kunserve_lab.workload.traces import read_azure

BENCHMARK = "test_set"
P99, DROPS = "P99 TTFT", "drops"


@dataclass(frozen=True, slots=True)
class Asked:
    """One run that was made: what, of which release."""

    point: str
    seed: int
    system: str
    version: str
    code: str


def results_path() -> Path:
    """Where the figures are kept."""
    return RESULTS / f"{BENCHMARK}.jsonl"


def kept() -> dict[Asked, dict[str, float]]:
    """The figures by name of every run that was made; of one that was cut off, nothing."""
    found: dict[Asked, dict[str, float]] = {}
    path = results_path()
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        asked = Asked(**line["settings"], code=line["code"])
        found.setdefault(asked, {})[line["name"]] = line["value"]
    return {asked: figures for asked, figures in found.items() if {P99, DROPS} <= figures.keys()}


def points() -> Iterator[Point]:
    """Every point: the experiments' own windows, then those that are held back."""
    back = held_back()
    for name in back.draws:
        yield Point(anew(name), name, _load(name), None, is_test=True)
    for number, window_s in enumerate(back.windows, start=1):
        for name in back.in_windows:
            at = _load(name) * _rate(_workload(name)) / _rate_later(window_s)
            where = in_window(name, number)
            yield Point(where, name, at, None, later_window_s=window_s, is_test=True)


def anew(experiment: str) -> str:
    """The point of an experiment's own window."""
    return f"{experiment}, new draws"


def in_window(experiment: str, number: int) -> str:
    """The point of a window; they count from 1."""
    return f"{experiment}, window {number}"


def _load(name: str) -> float:
    """That of the claims: the highest one."""
    return max(read_experiment(ROOT / "experiments" / f"{name}.toml").loads)


def _workload(name: str) -> WorkloadSettings:
    return read_experiment(ROOT / "experiments" / f"{name}.toml").workload


def _rate(settings: WorkloadSettings) -> float:
    """Requests per second of its window."""
    assert settings.end_s is not None, settings
    return len(workload_of(settings, 1.0, 0)) / (settings.end_s - settings.start_s)


def _rate_later(window_s: tuple[float, float]) -> float:
    start_s, end_s = window_s
    moments = read_azure(later_azure_trace()).arrival_s
    return sum(start_s <= at_s < end_s for at_s in moments) / (end_s - start_s)


def check_unasked(made: dict[Asked, dict[str, float]], num_runs: int) -> None:
    """Raise ConfigError if this version has been asked: wholly, or by other code."""
    version = kunserve.__version__
    codes = {asked.code for asked in made if asked.version == version}
    others = sorted(codes - {code()})
    if others:
        raise ConfigError(
            f"version {version} has been asked, with code {', '.join(others)}: what has changed "
            "since may have been tuned on the answer. --again asks nonetheless"
        )
    if sum(asked.version == version for asked in made) >= num_runs:
        raise ConfigError(f"version {version} has been asked: --table shows what it said")


def ask(*, again: bool) -> None:
    """Every run that this version and code lack, as lines of the file."""
    made = kept()
    back, version = held_back(), kunserve.__version__
    wanted = [(p, seed, name) for p in points() for seed in back.seeds for name in back.systems]
    if not again:
        check_unasked(made, len(wanted))
    with (
        results_path().open("a") as file,
        contextlib.redirect_stdout(file),
        Report(BENCHMARK, code(), version=version) as report,
    ):
        for number, (point, seed, system) in enumerate(wanted):
            asked = Asked(point.name, seed, system, version, code())
            if asked in made and not again:
                continue
            print(f"{number}/{len(wanted)} {point.name}, {system}", file=sys.stderr)
            for name, value, unit in run_figures(system, point.scenario(seed)):
                report.add(name, value, unit, point=point.name, seed=seed, system=system)


def lower(point: str, system: str, version: str, of_code: str) -> list[float]:
    """How many times lower P99 TTFT is under `drop` than under the system, draw by draw."""
    theirs, ours = (_draws(P99, point, name, version, of_code) for name in (system, "drop"))
    return [theirs[seed] / ours[seed] for seed in sorted(theirs.keys() & ours.keys())]


def _draws(figure: str, point: str, system: str, version: str, of_code: str) -> dict[int, float]:
    """One figure of one system by seed."""
    wanted = point, system, version, of_code
    return {
        asked.seed: figures[figure]
        for asked, figures in kept().items()
        if (asked.point, asked.system, asked.version, asked.code) == wanted
    }


def newest() -> tuple[str, str]:
    """Version and code of the release that was asked last."""
    return [(asked.version, asked.code) for asked in kept()][-1]


def table() -> list[Row]:
    """By point and release: P99 TTFT under `drop`, and that of the others over it."""
    others = [name for name in held_back().systems if name != "drop"]
    head = ("requests", "release", "drops", "`drop` (s)", *(f"`{name}`" for name in others))
    rows: list[Row] = [head]
    for point, *release in dict.fromkeys((a.point, a.version, a.code) for a in kept()):
        p99_s, drops = (_draws(figure, point, "drop", *release).values() for figure in (P99, DROPS))
        gains = [lower(point, other, *release) for other in others]
        cells = (ranged(some, "x") if some else "-" for some in gains)
        ours = f"{statistics.median(drops):g}", f"{statistics.median(p99_s):.1f}"
        rows.append((point, "{} ({})".format(*release), *ours, *cells))
    return rows


def main() -> None:
    """Ask, or show what was said."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="although this version was asked")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is kept")
    options = parser.parse_args()
    if options.table:
        print(markdown(table()))
        return
    try:
        ask(again=options.again)
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
