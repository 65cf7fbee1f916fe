"""What an experiment leaves in its folder: results, tables, figures and a report."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from kunserve.core.errors import ConfigError
from kunserve_lab.bench.output.plot import plot_comparison
from kunserve_lab.bench.runfile import Run, read_run, write_run
from kunserve_lab.compare.experiment import Experiment, Place, World
from kunserve_lab.compare.groups import AtLoad, by_load
from kunserve_lab.compare.output.figures import plot_loads, plot_violations
from kunserve_lab.compare.output.report_page import write_report
from kunserve_lab.compare.output.table import notes, rows, table, windows
from kunserve_lab.compare.results import (
    Outcome,
    RunResult,
    append,
    load,
    mend,
    save,
)

_RESULT = "result"
"""The setting of a kept run that says of which result it is."""


class OutputFolder:
    """The folder of one experiment. ``results.jsonl`` grows by a line with every run."""

    def __init__(self, path: Path, experiment: Experiment, places: Sequence[Place]) -> None:
        self.path = path
        self._experiment = experiment
        self._places = places
        self._runs: dict[Place, Run] = {}
        """Of loads that are not drawn yet; only what a figure shows."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error.strerror}") from None

    @property
    def results_path(self) -> Path:
        """One line per run."""
        return self.path / "results.jsonl"

    @property
    def replaced_path(self) -> Path:
        """The lines that were run again since."""
        return self.path / "replaced.jsonl"

    def mend(self) -> bool:
        """Called first: whether a line that a full disk had torn was taken away."""
        mend(self.replaced_path)
        return mend(self.results_path)

    def set_aside(self) -> None:
        """Called before every run is run again, so that no broken-off call leaves old beside new.

        Nothing else tells them apart: settings and requests are the same.
        """
        if not self.results_path.exists():
            return
        ours, others = set(self._places), []
        for result in load(self.results_path):
            if result.place in ours:
                append(self.replaced_path, result)
            else:
                others.append(result)
        save(self.results_path, others)

    def begin(self, digests: Mapping[Place, str]) -> dict[Place, RunResult]:
        """The results that are there already, of the same settings and requests."""
        if not self.results_path.exists():
            return {}
        return {
            result.place: result
            for result in load(self.results_path)
            if result.world is self._experiment.world and digests.get(result.place) == result.digest
        }

    def keep(self, outcome: Outcome, with_requests: bool) -> None:
        """Called as soon as a run ends, so that nothing is lost by what happens later."""
        place = outcome.result.place
        append(self.results_path, outcome.result)
        if with_requests or self._experiment.world is World.REAL:
            marked = (*outcome.run.config, (_RESULT, outcome.result.fingerprint))
            write_run(self._run_path(place), dataclasses.replace(outcome.run, config=marked))
        if self._is_drawn(place):
            self._runs[place] = outcome.run

    def draw(self, group: AtLoad) -> None:
        """The figures of one load. A timeline shows the first seed's first round.

        One that cannot be drawn, because no requests were kept, stays only if it is of these runs.
        """
        shown = [result for result in group.runs if self._is_drawn(result.place)]
        runs = [self._run_of(result) for result in shown]
        there = [run for run in runs if run is not None]
        path = self._timeline_path(group.load)
        mark = " ".join(result.fingerprint for result in shown)
        if len(there) == len(runs):
            plot_comparison(there, path, mark)
        elif path.exists() and mark.encode() not in path.read_bytes():
            path.unlink()
        for place in [place for place in self._runs if place.load == group.load]:
            del self._runs[place]
        if any(run.ttft_ms for run in group.runs):
            plot_violations(group, self._slo_path(group.load))
        else:
            self._slo_path(group.load).unlink(missing_ok=True)

    def finish(self, results: Sequence[RunResult], verdict: Sequence[str]) -> None:
        """Everything that is of all loads together."""
        ours = {result.place for result in results}
        others = [r for r in load(self.results_path) if r.place not in ours]
        save(self.results_path, [*results, *others])
        groups = by_load(results)
        text = "\n\n".join([table(results), "\n".join(verdict)])
        (self.path / "table.txt").write_text(text + "\n")
        figures = [
            (f"{name}, load {group.load:g}", path)
            for group in groups
            for name, path in (
                ("Over time", self._timeline_path(group.load)),
                ("SLO violations", self._slo_path(group.load)),
            )
        ]
        tables = [(f"Load {group.load:g}", rows(group), notes(group)) for group in groups]
        if len(groups) > 1:
            plot_loads(groups, self.path / "loads.png")
            figures.insert(0, ("Over the load", self.path / "loads.png"))
        if windows(groups):
            tables.insert(0, ("Where it helps", windows(groups), []))
        write_report(
            self.path / "report.html",
            self._experiment,
            [*self._conditions(), ("workload", results[0].provenance)],
            verdict,
            tables,
            [(name, path) for name, path in figures if path.exists()],
        )

    def trace_path(self, place: Place) -> Path:
        """Where the steps of a run are written."""
        return self.path / f"{self._stem(place)}.trace.json"

    def _conditions(self) -> list[tuple[str, str]]:
        setup, named = self._experiment.setup, self._experiment.systems
        pairs = [(f.name, getattr(setup, f.name)) for f in dataclasses.fields(setup)]
        shown = [(name, str(value)) for name, value in pairs if value not in (None, ())]
        seeds = ", ".join(map(str, self._experiment.seeds))
        shown += [("seeds", seeds), ("rounds", str(self._experiment.num_rounds))]
        return shown + [(name, self._experiment.system(name).description) for name in named]

    def _is_drawn(self, place: Place) -> bool:
        return place.seed == self._experiment.seeds[0] and place.round == 0

    def _run_of(self, result: RunResult) -> Run | None:
        """From this call, or from the file that an earlier one left of this very run."""
        run = self._runs.get(result.place)
        path = self._run_path(result.place)
        if run is not None or not path.exists():
            return run
        kept = read_run(path)
        return kept if dict(kept.config).get(_RESULT) == result.fingerprint else None

    def _run_path(self, place: Place) -> Path:
        return self.path / f"{self._stem(place)}.jsonl"

    def _timeline_path(self, at: float) -> Path:
        return self.path / f"timeline{self._ending(at)}.png"

    def _slo_path(self, at: float) -> Path:
        return self.path / f"slo{self._ending(at)}.png"

    def _ending(self, at: float) -> str:
        return f"-{at:g}" if len(self._experiment.loads) > 1 else ""

    def _stem(self, place: Place) -> str:
        """Of a run's own files. Calls with other loads or seeds may use the same folder."""
        return f"{place.system}-load{place.load:g}-seed{place.seed}-round{place.round + 1}"
