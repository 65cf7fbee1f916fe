"""Simulated points that several benchmarks ask about: a load of an experiment, and what is kept.

Prompts of LongBench are cut at 16,384 tokens, as in the authors' artifact.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from benchmarks.markdown import Row
from benchmarks.paper.held_back import held_back
from benchmarks.paper.kept_results import RESULTS, figures_of
from benchmarks.paper.simulated_code import UNKNOWN, code
from benchmarks.report import Report
from kunserve.core.snapshots import Kind, Outcome
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.settings import RealSetup, SimulatedSetup, workload_of
from kunserve_lab.compare.simulated.scenario import Scenario, build_scenario
from kunserve_lab.compare.simulated.simulation import SimResult, simulate
from kunserve_lab.compare.systems import find_system
from kunserve_lab.workload.data.catalog import DATA_SETS
from kunserve_lab.workload.data.download import fetch
from kunserve_lab.workload.traces import read_azure

ROOT = Path(__file__).parents[2]
ARTIFACT_TOKENS = 16_384
"""Most tokens of a LongBench request."""
SHIPPED_END_S = 865.0
"""Of the trace in the package, on the clock of the conversation service's first request."""
CODE_LATER_S = 77.29937
"""From that one to the code service's first request."""


@dataclass(frozen=True, slots=True)
class Point:
    """One load of an experiment in ``experiments/``."""

    name: str
    experiment: str
    load: float
    max_total_tokens: int | None = ARTIFACT_TOKENS
    later_window_s: tuple[float, float] | None = None
    """A part of Azure's trace that no experiment has (`later_azure_trace`), instead of its own."""
    is_test: bool = False
    """Of the test set: everything else is refused what is held back."""

    def scenario(self, seed: int) -> Scenario:
        """One draw of its requests, and its cluster. Raises ConfigError for what is held back."""
        if not self.is_test:
            held_back().check_free(seed, self.later_window_s)
        experiment = read_experiment(ROOT / "experiments" / f"{self.experiment}.toml")
        workload = experiment.workload
        if not self.is_test:
            workload = replace(workload, max_total_tokens=self.max_total_tokens)
        if self.later_window_s is not None:
            start_s, end_s = self.later_window_s
            trace = later_azure_trace()
            workload = replace(workload, trace=trace, start_s=start_s, end_s=end_s)
        return build_scenario(_simulated(experiment.setup), workload_of(workload, self.load, seed))


def _simulated(setup: SimulatedSetup | RealSetup) -> SimulatedSetup:
    """The cluster as it is, or a real one as its profile has it."""
    if isinstance(setup, SimulatedSetup):
        return setup
    return SimulatedSetup(
        num_instances=setup.num_instances,
        profile=RESULTS / "profile-smollm2-135m.json",
        instance_mib=int(setup.instance_memory.removesuffix("MiB")),
        block_size=16,
        max_num_batched_tokens=setup.max_num_batched_tokens,
    )


@functools.cache
def later_azure_trace() -> Path:
    """Both Azure services after the 640 s that experiments replay, on one clock, as a file.

    Downloaded, or found where ``kunserve data`` puts downloads.
    """
    moments: list[tuple[float, int, int]] = []
    for name, shift_s in (("azure-2023-conv", 0.0), ("azure-2023-code", CODE_LATER_S)):
        trace = read_azure(fetch(DATA_SETS[name]))
        moments += zip(
            (shift_s + at_s - SHIPPED_END_S for at_s in trace.arrival_s),
            trace.input_tokens,
            trace.output_tokens,
            strict=True,
        )
    path = ROOT / "results" / "azure-2023-merged-later.csv"
    path.parent.mkdir(exist_ok=True)
    lines = (f"{at:.4f},{given},{made}\n" for at, given, made in sorted(moments) if at >= 0.0)
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(lines))
    return path


LONGBENCH_40 = Point("LongBench 0.40", "bounds_longbench_14b", 0.40)
LONGBENCH_44 = Point("LongBench 0.44", "bounds_longbench_14b", 0.44)
LONGBENCH_48 = Point("LongBench 0.48", "bounds_longbench_14b", 0.48)
HEAVY_27 = Point("heavy weights 0.27", "heavy_weights_14b", 0.27)
HEAVY_30 = Point("heavy weights 0.30", "heavy_weights_14b", 0.30)
SHAREGPT_15 = Point("ShareGPT 1.5", "end_to_end_sharegpt_14b", 1.5, 4096)
BURSTGPT_48 = Point("BurstGPT-like 4.8", "end_to_end_burstgpt_14b", 4.8, None)
LONGBENCH_72B_46 = Point("LongBench 72B 0.46", "end_to_end_longbench_72b", 0.46)
SMOLLM2_75 = Point("SmolLM2 on CPUs 0.075", "overload", 0.075, None)
SMOLLM2_95 = Point("SmolLM2 on CPUs 0.095", "overload", 0.095, None)
UNSEEN = tuple(
    Point(f"{name}, unseen {number}", experiment, load, later_window_s=window_s)
    for number, window_s in enumerate(((35.0, 235.0), (265.0, 465.0), (1715.0, 1915.0)), start=1)
    for name, experiment, load in (
        ("LongBench 0.44", "bounds_longbench_14b", 0.44),
        ("heavy weights 0.27", "heavy_weights_14b", 0.27),
    )
)
"""Chosen by their arrivals before anything was run on them: the three highest bursts of the code
service in the rest of the trace that do not overlap. Rules have been held against them since."""


Named: TypeAlias = tuple[str, float, str]
"""Name, value and unit of a figure."""
RunFigures: TypeAlias = Callable[[str, Scenario], Iterator[Named]]
"""Runs the system of that name."""


@dataclass(frozen=True, slots=True, order=True)
class RunKey:
    """One run of a point."""

    point: str
    seed: int
    system: str


@dataclass(frozen=True, slots=True)
class KeptRun:
    """What is kept of a run."""

    code: str
    """``simulated_code.code`` of then."""
    figures: dict[str, float] = field(default_factory=dict)
    """By name."""


def kept(benchmark: str) -> dict[RunKey, KeptRun]:
    """Every run that a benchmark's committed lines have; of one that ran again, the latest."""
    found: dict[RunKey, KeptRun] = {}
    for line in figures_of(benchmark):
        key, of_code = RunKey(**line["settings"]), line.get("code", UNKNOWN)
        if key not in found or found[key].code != of_code:
            found[key] = KeptRun(of_code)
        found[key].figures[line["name"]] = line["value"]
    return found


def with_codes(rows: list[Row], codes: list[set[str]]) -> list[Row]:
    """A table with a column that tells which code made each row, as soon as that is known of any.

    ``codes`` are those of the runs behind each row but the head.
    """
    if set().union(*codes) <= {UNKNOWN}:
        return rows
    head, *body = rows
    shown = (", ".join(sorted(of_row)) for of_row in codes)
    return [(*head, "code"), *((*row, of_row) for row, of_row in zip(body, shown, strict=True))]


def run_missing(
    benchmark: str,
    runs: Iterable[tuple[Point, int, str]],
    known: Mapping[RunKey, KeptRun],
    *,
    again: bool,
    run: RunFigures | None = None,
) -> None:
    """Simulate what the results lack: figures as lines of JSON, as soon as a run is over.

    ``again``: also what they have of other code than today's. Otherwise only said to be so.
    ``run`` None: `run_figures`.
    """
    figures = run_figures if run is None else run
    num_other = 0
    with Report(benchmark, code()) as report:
        for point, seed, system in runs:
            key = RunKey(point.name, seed, system)
            if key in known and (known[key].code == code() or not again):
                num_other += known[key].code != code()
                continue
            for name, value, unit in figures(system, point.scenario(seed)):
                report.add(name, value, unit, point=point.name, seed=seed, system=system)
    if num_other:
        print(f"{num_other} kept runs are of other code than {code()}", file=sys.stderr)


def run_figures(system: str, scenario: Scenario) -> Iterator[Named]:
    """What is kept of one run."""
    return figures_of_run(simulate(find_system(system), scenario), scenario)


def figures_of_run(result: SimResult, scenario: Scenario) -> Iterator[Named]:
    """What is kept of its result."""
    metrics = result.metrics
    yield "P50 TTFT", metrics.ttft.percentile_s(50.0), "s"
    yield "P99 TTFT", metrics.ttft.percentile_s(99.0), "s"
    yield "P50 TPOT", 1e3 * metrics.tpot.percentile_s(50.0), "ms"
    yield "P99 TPOT", 1e3 * metrics.tpot.percentile_s(99.0), "ms"
    yield "output", metrics.output_throughput, "tokens/s"
    yield "drops", result.num_drops, ""
    if result.num_drops:
        yield "restores", result.num_restores, ""
        yield "in pipelines", _pipeline_s(result) / scenario.num_instances, "s"
        yield "loading", _loading_s(result), "s"


def _pipeline_s(result: SimResult) -> float:
    """Seconds that instances stood in pipelines until the last request ended, all together."""
    end_s = result.run.duration_s
    since: dict[int, float] = {}
    total_s = 0.0
    for record in result.transitions:
        if record.committed_s is None or record.outcome is Outcome.ROLLED_BACK:
            continue
        at_s = min(record.committed_s, end_s)
        for layout in record.groups_after:
            for member in layout.members:
                if len(layout.stages) > 1:
                    since.setdefault(member, at_s)
                elif member in since:
                    total_s += at_s - since.pop(member)
    return total_s + sum(end_s - at_s for at_s in since.values())


def _loading_s(result: SimResult) -> float:
    """The longest time from a restore's decision to its commit: layers load meanwhile."""
    times = (
        record.committed_s - record.started_s
        for record in result.transitions
        if record.kind is Kind.RESTORE and record.committed_s is not None
    )
    return max(times, default=0.0)
