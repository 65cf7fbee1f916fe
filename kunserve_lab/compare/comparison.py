"""Runs an experiment in its world: what is missing is run, all of it is told, written and drawn."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kunserve_lab.bench.environment import SIMULATED, by_code, version
from kunserve_lab.compare import real
from kunserve_lab.compare.experiment import Experiment, Place, World, check_experiment, plan
from kunserve_lab.compare.groups import by_load
from kunserve_lab.compare.others import as_called
from kunserve_lab.compare.output.files import OutputFolder
from kunserve_lab.compare.output.table import as_text, load_text, windows
from kunserve_lab.compare.output.verdict import verdict
from kunserve_lab.compare.results import Outcome, RunResult
from kunserve_lab.compare.settings import RealSetup, digest_of, workload_of
from kunserve_lab.compare.simulated.full_rate import with_full_rate
from kunserve_lab.compare.simulated.jobs import Job
from kunserve_lab.compare.simulated.projection import outlook_lines
from kunserve_lab.compare.simulated.runner import run_simulated
from kunserve_lab.compare.simulated.scenario import build_scenario
from kunserve_lab.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Options:
    """How an experiment is run and what is kept, besides what it asks."""

    save_requests: bool = False
    """Also every request and sample, a file per run. Runs of the real world are always kept."""
    chrome_trace: bool = False
    """Also every step, for Perfetto."""
    num_jobs: int | None = None
    """Simulations at once; None is one per core."""
    is_fresh: bool = False
    """Run again what is already in the results. Its lines go to replaced.jsonl at once."""


def compare(
    experiment: Experiment,
    output: Path | None = None,
    options: Options | None = None,
    say: Callable[[str], None] = print,
) -> list[RunResult]:
    """Every system at every load, seed and round; each load's table as soon as it is complete.

    A run that ``output`` has already, with the same settings and requests, is not run again.
    """
    check_experiment(experiment)
    workload = with_full_rate(experiment.setup, experiment.workload)
    experiment = replace(experiment, workload=workload)
    comparison = _Comparison(experiment, output, options or Options(), say)
    return comparison.run()


class _Comparison:
    """One experiment under way: its runs to come, and the results so far."""

    def __init__(
        self,
        experiment: Experiment,
        output: Path | None,
        options: Options,
        say: Callable[[str], None],
    ) -> None:
        self._experiment = experiment
        self._options = options
        self._say = say
        self._places = plan(experiment)
        self._told: set[float] = set()
        self._results: dict[Place, RunResult] = {}
        folder = None if output is None else OutputFolder(output, experiment, self._places)
        self._folder = folder
        self._jobs = _jobs(experiment, self._places, folder, options.chrome_trace)
        if folder is not None:
            if folder.mend():
                say(f"the last line of {folder.results_path} was torn: its run is run again")
            if options.is_fresh:
                folder.set_aside()
            self._results = folder.begin({job.place: job.digest for job in self._jobs})
            if self._results:
                path, world = folder.results_path, experiment.world
                say(_found(self._results, len(self._places), path, world))

    def run(self) -> list[RunResult]:
        """What is missing, then the conclusions."""
        folder = self._folder
        self._tell()
        for outcome in self._outcomes([j for j in self._jobs if j.place not in self._results]):
            self._results[outcome.result.place] = outcome.result
            for line in outcome.log:
                self._say(f"  {line}")
            if folder is not None:
                folder.keep(outcome, self._options.save_requests)
            self._tell()
        ordered = [self._results[place] for place in self._places]
        groups = by_load(ordered)
        where = windows(groups)
        if where:
            self._say("\n" + as_text(where))
        said = verdict(self._experiment, groups) + self._outlook()
        self._say("\n" + "\n".join(said))
        if folder is not None:
            folder.finish(ordered, said)
            self._say(f"\nwritten to {folder.path}")
        return ordered

    def _outlook(self) -> list[str]:
        """Where the simulated traffic lies, when a system drops. Of the first seed."""
        if not any(self._experiment.system(name).drops for name in self._experiment.systems):
            return []
        return outlook_lines(
            {
                job.place.load: job.scenario
                for job in reversed(self._jobs)
                if isinstance(job, Job) and job.place.seed == self._experiment.seeds[0]
            }
        )

    def _outcomes(self, jobs: Sequence["Job | real.RealJob"]) -> Iterator[Outcome]:
        setup = self._experiment.setup
        if isinstance(setup, RealSetup):
            wanted = [job for job in jobs if isinstance(job, real.RealJob)]
            yield from real.run_jobs(wanted, setup, self._say)
        else:
            simulated = [job for job in jobs if isinstance(job, Job)]
            yield from run_simulated(simulated, self._options.num_jobs)

    def _tell(self) -> None:
        """The table of every load that has become complete."""
        for load in self._experiment.loads:
            places = [place for place in self._places if place.load == load]
            if load in self._told or any(place not in self._results for place in places):
                continue
            self._told.add(load)
            (group,) = (g for g in by_load(list(self._results.values())) if g.load == load)
            self._say("\n" + load_text(group))
            if self._folder is not None:
                self._folder.draw(group)


def _jobs(
    experiment: Experiment, places: Sequence[Place], folder: OutputFolder | None, traces: bool
) -> "list[Job] | list[real.RealJob]":
    """Every run as its world wants it. What is wrong with one is found here, before any runs."""
    setup = experiment.setup
    workloads = {
        (load, seed): workload_of(experiment.workload, load, seed)
        for load in experiment.loads
        for seed in experiment.seeds
    }

    def trace_path(place: Place) -> Path | None:
        return folder.trace_path(place) if traces and folder is not None else None

    def requests(place: Place) -> Workload:
        return workloads[place.load, place.seed]

    if isinstance(setup, RealSetup):
        others = experiment.others
        ours = {n: experiment.system(n) for n in experiment.systems if n not in others}
        for system in ours.values():
            real.serve_arguments(system, setup, None)
        called = {n: as_called(n, others[n]) for n in experiment.systems if n in others}
        return [
            real.RealJob(
                place,
                ours[place.system] if place.system in ours else others[place.system],
                requests(place),
                digest_of(setup, (ours | called)[place.system], requests(place)),
                trace_path(place),
            )
            for place in places
        ]
    scenarios = {key: build_scenario(setup, workload) for key, workload in workloads.items()}
    return [
        Job(
            place,
            experiment.system(place.system),
            scenarios[place.load, place.seed],
            digest_of(setup, experiment.system(place.system), requests(place)),
            trace_path(place),
        )
        for place in places
    ]


def _found(results: dict[Place, RunResult], num_places: int, path: Path, world: World) -> str:
    """What was there already, and of which other code."""
    now = version(SIMULATED) if world is World.SIMULATED else version()
    _, *others = by_code([now, *(result.environment for result in results.values())])
    text = f"{len(results)} of {num_places} runs are in {path} already"
    if others:
        text += f" (of {', '.join(others)}; --fresh repeats them)"
    return text
