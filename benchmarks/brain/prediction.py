"""Whether the simulator predicts a real cluster, and whether steps take what a profile says.

    kunserve profile smollm2-135m --out profile.json
    python -m benchmarks.brain.prediction --profile profile.json RUN.jsonl ... [T.trace.json ...]

A run file is what a comparison of real servers keeps of one run; it holds its requests and the
server's flags. A trace is of `serve --trace-out`; one beside a run, of the same name, is found.

*Runs.* A cluster near overload is chaotic: requests that come a millisecond later make another
tail, in both worlds. So each run is simulated many times, with arrivals moved by a few milliseconds
and all steps a few percent shorter or longer. The figures are the median of the simulations, their
range, and how far the median is from the real run. Of each request: how far its first token is.

A processor that others share is not as fast in each minute as when it was profiled, and near
overload a tenth more time makes twice the queue. With a trace the same is therefore done at the
run's own pace: the profile's step times, all of them so many times as long as the run's steps took
in sum. What is left of an error then is the simulator's, and the rest was the machine's.

*Ratios.* What the simulator is asked for is how many times lower a system's TTFT is than another's.
For runs of one folder, load and seed: the ratio of `recompute` to each other system, real (medians
over rounds) and simulated, over the requests that all of them completed.

*Steps.* Every step of a trace against the profile's prediction for the same batch, by what the
batch held and by whether another instance computed meanwhile; and how long instances stood between
two steps that follow each other closely.
"""

import argparse
import itertools
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from benchmarks.report import Report, Setting
from benchmarks.serving.traced_steps import (
    TracedStep,
    num_layers_of,
    overlaps,
    predicted_s,
    read_steps,
)
from kunserve.core.config import KunServeConfig
from kunserve.core.cost import CostCoefficients
from kunserve.model.profile import Profile, read_profile
from kunserve.policy.batch.cost import Array
from kunserve.server.start.command import config_from_flags, serve_command
from kunserve_lab.bench.metrics import RunMetrics, compute_metrics
from kunserve_lab.bench.runfile import Run, read_run
from kunserve_lab.compare.simulated.scenario import Scenario
from kunserve_lab.compare.simulated.simulation import simulate
from kunserve_lab.compare.systems import SYSTEMS, System, find_system
from kunserve_lab.sim.costs import cpu_profile
from kunserve_lab.sim.models import find_model
from kunserve_lab.workload.workload import Lengths, Workload

PROFILE, ITS_PACE = "profile", "its pace"
"""Where step times are from."""
CLOSE_S = 0.02
"""Steps that follow each other within this are back to back."""
ROWS: tuple[tuple[str, Callable[[RunMetrics], float]], ...] = (
    ("TTFT P50 (s)", lambda m: m.ttft.median_s),
    ("TTFT P90 (s)", lambda m: m.ttft.percentile_s(90.0)),
    ("TTFT P99 (s)", lambda m: m.ttft.percentile_s(99.0)),
    ("TPOT P50 (s)", lambda m: m.tpot.median_s),
    ("TPOT P99 (s)", lambda m: m.tpot.percentile_s(99.0)),
    ("output tokens/s", lambda m: m.output_throughput),
)


PERCENTILES = (50.0, 90.0, 99.0)
"""Of TTFT, whose ratios are told."""
SECONDS = tuple(one.name for one in fields(CostCoefficients) if one.name.endswith("_s"))
NEAR = 0.25
"""Share by which a figure may be missed."""
FIRST = "recompute"
"""The system that the others are held against."""
PLACE = re.compile(r"-(load)?[\d.]+(-seed\d+)?(?=-round\d+$|$)")
"""Load and seed, in the name of a run's file."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """One real run, and what the simulator makes of it."""

    path: Path
    source: str
    """Of the step times."""
    run: Run
    found: tuple[Run, ...]
    """One for each draw of the milliseconds by which arrivals are moved: the same for all runs."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One number of one run, real and simulated."""

    name: str
    real: float
    simulated: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the simulations."""
        return statistics.median(self.simulated)

    @property
    def error(self) -> float:
        """Of the median, as a share of what was real."""
        return self.median / self.real - 1.0


def config_of(run: Run) -> KunServeConfig:
    """The real server's settings, from its own flags."""
    flags = str(dict(run.config)["serve"]).split()
    return config_from_flags(serve_command.make_context("serve", flags).params)


def workload_of(run: Run, generator: random.Random | None, jitter_s: float) -> Workload:
    """The requests that the real run sent; with a generator, each a little earlier or later."""
    records = sorted(run.records, key=lambda record: record.planned_s)
    moments = [record.planned_s for record in records]
    if generator is not None:
        moments = sorted(
            max(0.0, moment + generator.uniform(-jitter_s, jitter_s)) for moment in moments
        )
    lengths = Lengths(
        tuple(record.input_tokens for record in records),
        tuple(record.asked_output_tokens for record in records),
        "a real run",
    )
    return Workload(tuple(moments), lengths, run.provenance)


def simulations(run: Run, profile: Profile, options: argparse.Namespace) -> tuple[Run, ...]:
    """Simulate the run's cluster under its requests, at about the profile's pace."""
    config = config_of(run)
    # The real server's flags say how much memory it had.
    system = replace(system_of(run, config), memory_factor=1.0)
    generator = random.Random(0)
    found: list[Run] = []
    for number in range(options.num_runs):
        share = options.pace_percent / 100
        pace = slower(profile, 1.0 + (generator.uniform(-share, share) if number else 0.0))
        jitter_s = options.jitter_ms / 1e3
        scenario = Scenario(
            profile=cpu_profile(
                find_model(profile.subject.model),
                pace.serving,
                pace.alone,
                config.instance.block_size,
                config.instance.memory_bytes,
            ),
            num_instances=config.cluster.num_instances,
            workload=workload_of(run, generator if number else None, jitter_s),
            scheduler=config.scheduler,
            cost=profile.coefficients,
        )
        found.append(simulate(system, scenario).run)
    return tuple(found)


def slower(profile: Profile, times: float) -> Profile:
    """The profile of a machine whose steps take so many times as long, all of them."""

    def scaled(cost: CostCoefficients) -> CostCoefficients:
        seconds = {name: getattr(cost, name) for name in SECONDS}
        return replace(cost, **{name: times * value for name, value in seconds.items()})

    return replace(
        profile,
        coefficients=scaled(profile.coefficients),
        serving=scaled(profile.serving),
        alone=scaled(profile.alone),
    )


def system_of(run: Run, config: KunServeConfig) -> System:
    """Which system it was: by its name, in an older file by its policy."""
    return find_system(run.label if run.label in SYSTEMS else config.overload.policy)


def predict(run: Run, found: Sequence[Run]) -> list[Prediction]:
    """The run's figures beside those of its simulations."""
    real, *made = (compute_metrics(one.records, one.duration_s) for one in (run, *found))
    return [Prediction(name, value(real), tuple(map(value, made))) for name, value in ROWS]


def report_run(
    report: Report,
    path: Path,
    profile: Profile,
    options: argparse.Namespace,
    known: Mapping[object, tuple[Run, ...]],
) -> Iterator[Simulated]:
    """One real run beside its simulations, which are given back. ``known`` are earlier ones'."""
    run = read_run(path)
    sources = [(PROFILE, profile)]
    trace = trace_of(path)
    if trace.exists():
        steps = read_steps(trace)
        times = sum(step.seconds for step in steps) / float(np.sum(expected_s(profile, steps)))
        report.add("steps take, of the profile's", times, "x", run=path.stem)
        sources.append((ITS_PACE, slower(profile, times)))
    for source, steps_of in sources:
        found = known.get(asked(run, source)) or simulations(run, steps_of, options)
        one = Simulated(path, source, run, found)
        yield one
        for row in predict(run, found):
            case: dict[str, Setting] = {"run": path.stem, "step_times": source, "of": row.name}
            report.add("real", row.real, "", **case)
            report.add("simulated", row.median, "", **case)
            report.add("least", min(row.simulated), "", **case)
            report.add("most", max(row.simulated), "", **case)
            report.add("error", 100 * row.error, "%", **case)
        missed = [abs(error) for error in misses(one)]
        if missed:
            case = {"run": path.stem, "step_times": source, "of": "TTFT of each request"}
            near = sum(error <= NEAR for error in missed)
            report.add("median error", 100 * statistics.median(missed), "%", **case)
            report.add(f"within {NEAR:.0%}", 100 * near / len(missed), "%", **case)


def misses(one: Simulated) -> list[float]:
    """Of each request that the real run completed: its first token in the median of simulations,
    beside the real one, as a share.
    """
    simulated: dict[int, list[float]] = defaultdict(list)
    for run in one.found:
        for record in run.records:
            if record.token_times_s:
                simulated[record.number].append(record.token_times_s[0] - record.sent_s)
    return [
        statistics.median(simulated[record.number]) / (record.token_times_s[0] - record.sent_s) - 1
        for record in one.run.records
        if record.succeeded and simulated[record.number]
    ]


def expected_s(profile: Profile, steps: list[TracedStep]) -> Array:
    """What each step takes by the profile, in the company that it had."""
    shares = np.minimum(overlaps(steps), 1.0)
    beside, alone = (predicted_s(c, steps) for c in (profile.serving, profile.alone))
    return np.asarray(shares * beside + (1.0 - shares) * alone)


def asked(run: Run, source: str) -> object:
    """What is simulated: for all rounds of a system the same. A pace is of one run."""
    server = dict(run.config)["serve"]
    return run.provenance, run.label, server, source if source == PROFILE else id(run)


def report_ratios(report: Report, everything: Sequence[Simulated]) -> None:
    """How many times lower TTFT is than under `recompute`, real and simulated."""
    alike: dict[tuple[str, str, str], dict[str, list[Simulated]]] = defaultdict(dict)
    for one in everything:
        place = PLACE.search(one.path.stem)
        where = one.path.parent.name, place[0] if place else "", one.source
        alike[where].setdefault(one.run.label, []).append(one)
    for (folder, at, source), systems in alike.items():
        common = frozenset.intersection(*(c for some in systems.values() for c in map(done, some)))
        for name, some in systems.items():
            if name == FIRST or FIRST not in systems:
                continue
            for percentile in PERCENTILES:
                real, *found = (
                    ttft_s(systems[FIRST], which, percentile, common)
                    / ttft_s(some, which, percentile, common)
                    for which in (None, *range(len(some[0].found)))
                )
                case: dict[str, Setting] = {
                    "of": f"{folder}{at}", "step_times": source, "system": name,
                    "ratio": f"TTFT P{percentile:g}",
                }  # fmt: skip
                row = Prediction("", real, tuple(found))
                report.add("real rounds", len(some), "", **case)
                report.add("real", row.real, "x", **case)
                report.add("simulated", row.median, "x", **case)
                report.add("least", min(row.simulated), "x", **case)
                report.add("most", max(row.simulated), "x", **case)
                report.add("error", 100 * row.error, "%", **case)


def done(one: Simulated) -> frozenset[int]:
    """The requests that the real run completed."""
    return frozenset(record.number for record in one.run.records if record.succeeded)


def ttft_s(
    rounds: Sequence[Simulated], which: int | None, percentile: float, common: frozenset[int]
) -> float:
    """Of these requests: the median over rounds of the real runs, or of these simulations."""
    runs = [one.run if which is None else one.found[which] for one in rounds]
    return statistics.median(
        compute_metrics(
            [record for record in run.records if record.number in common], run.duration_s
        ).ttft.percentile_s(percentile)
        for run in runs
    )


def trace_of(path: Path) -> Path:
    """Where the trace of a run's server would be."""
    return path.with_suffix(".trace.json")


def kind_of(step: TracedStep, num_layers: int) -> str:
    """What the batch held."""
    where = "" if step.layers == (0, num_layers) else "stage: "
    if step.num_prompt_tokens:
        return where + ("prompts and decodes" if step.num_decodes else "prompts")
    for most in (1, 4, 16, 64):
        if step.num_decodes <= most:
            return f"{where}decodes, up to {most}"
    return f"{where}decodes, more"


def report_steps(report: Report, path: Path, profile: Profile) -> None:
    """One server's steps: by kind and company, then the gaps between them."""
    steps = read_steps(path)
    name, num_layers = path.name.removesuffix(".trace.json"), num_layers_of(steps)
    shares, expected = np.minimum(overlaps(steps), 1.0), expected_s(profile, steps)
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for step, share, mean_s in zip(steps, shares.tolist(), expected.tolist(), strict=True):
        company = "alone" if share < 0.1 else "among others" if share > 0.9 else "partly"
        groups[kind_of(step, num_layers), company].append((step.seconds, mean_s))
    for (kind, company), pairs in sorted(groups.items()):
        real_s, mean_s = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        case: dict[str, Setting] = {"trace": name, "batch": kind, "company": company}
        report.add("steps", len(pairs), "", **case)
        report.add("real", real_s * 1e3, "ms", **case)
        report.add("predicted", mean_s * 1e3, "ms", **case)
        report.add("real / predicted", real_s / mean_s, "", **case)
    gaps_s = gaps_of(steps)
    if gaps_s:
        report.add("median gap", statistics.median(gaps_s) * 1e3, "ms", trace=name)
        report.add("mean gap", statistics.fmean(gaps_s) * 1e3, "ms", trace=name)


def gaps_of(steps: list[TracedStep]) -> list[float]:
    """How long instances stood between steps that follow each other closely: they had work."""
    by_instance: dict[int, list[TracedStep]] = defaultdict(list)
    for step in steps:
        by_instance[step.instance].append(step)
    return [
        later.start_s - sooner.end_s
        for mine in by_instance.values()
        for sooner, later in itertools.pairwise(mine)
        if later.start_s - sooner.end_s < CLOSE_S
    ]


def main() -> None:
    """Runs, then steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="runs (.jsonl) or .trace.json")
    parser.add_argument("--profile", type=Path, required=True, help="of `kunserve profile`")
    parser.add_argument("--num-runs", type=int, default=15, help="simulations of each run")
    parser.add_argument("--jitter-ms", type=float, default=5.0, help="of arrivals")
    parser.add_argument("--pace-percent", type=float, default=5.0, help="of all steps of a draw")
    parser.add_argument(
        "--times", type=float, default=1.0,
        help="steps take so many times what the profile says: as P50 TPOT of `endless` shows",
    )  # fmt: skip
    options = parser.parse_args()
    profile = slower(read_profile(options.profile), options.times)
    runs = [path for path in options.files if path.suffix == ".jsonl"]
    traces = [path for path in options.files if path.suffix != ".jsonl"]
    traces += [trace for trace in map(trace_of, runs) if trace.exists() and trace not in traces]
    settings: dict[str, Setting] = {"profile": options.profile.name, "times": options.times}
    with Report("prediction", **settings) as report:
        known: dict[object, tuple[Run, ...]] = {}
        found: list[Simulated] = []
        for path in runs:
            for one in report_run(report, path, profile, options, known):
                found.append(one)
                known[asked(one.run, one.source)] = one.found
        for path in traces:
            report_steps(report, path, profile)
    with Report("prediction_ratio", **settings) as report:
        report_ratios(report, found)


if __name__ == "__main__":
    main()
