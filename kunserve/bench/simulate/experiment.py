"""Runs an experiment and writes what it found: text, JSONL, figures, a report."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from kunserve.bench.plot import plot_comparison
from kunserve.bench.runfile import write_run
from kunserve.bench.simulate.figures import plot_loads, plot_violations
from kunserve.bench.simulate.html import write_report
from kunserve.bench.simulate.jobs import Job, num_jobs_at_once, run_jobs
from kunserve.bench.simulate.run import SimResult
from kunserve.bench.simulate.settings import Experiment, build_scenario, check_systems
from kunserve.bench.simulate.systems import find_system
from kunserve.bench.simulate.table import as_text, rows, summary, windows
from kunserve.core.errors import ConfigError


def run_experiment(
    experiment: Experiment,
    output: Path | None,
    *,
    save_requests: bool = False,
    chrome_trace: bool = False,
    num_jobs: int | None = None,
) -> list[tuple[float, list[SimResult]]]:
    """Every system at every load, ``num_jobs`` of them at once (None: one per core).

    Prints each load's table as soon as it is there.
    """
    check_systems(experiment.compare)
    scales = experiment.sweep or (experiment.load.scale,)
    scenarios = [
        (scale, build_scenario(experiment.setup, replace(experiment.load, scale=scale)))
        for scale in scales
    ]
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {output}: {error.strerror}") from None
    stems = {
        (scale, label): f"{label}-{scale:g}" if len(scales) > 1 else label
        for scale in scales
        for label in experiment.compare
    }
    jobs = [
        Job(label, scenario, _trace_path(output, stems[scale, label]) if chrome_trace else None)
        for scale, scenario in scenarios
        for label in experiment.compare
    ]
    by_scale: list[tuple[float, list[SimResult]]] = []
    finished = run_jobs(jobs, num_jobs_at_once(len(jobs), num_jobs))
    for scale, scenario in scenarios:
        results = [next(finished) for _ in experiment.compare]
        by_scale.append((scale, results))
        print(f"\nload {scale:g}: {scenario.workload.provenance}")
        print(as_text(rows(results)), flush=True)
        if output is not None:
            for result in results if save_requests else ():
                write_run(output / f"{stems[scale, result.run.label]}.jsonl", result.run)
            _write(experiment, by_scale, output)
    if len(by_scale) > 1 and len(experiment.compare) > 1:
        print(f"\n{as_text(windows(by_scale))}")
    if output is not None:
        print(f"\nwritten to {output}")
    return by_scale


def _trace_path(output: Path | None, stem: str) -> Path | None:
    return None if output is None else output / f"{stem}.trace.json"


def _write(
    experiment: Experiment, by_scale: Sequence[tuple[float, Sequence[SimResult]]], output: Path
) -> None:
    lines = [summary(result, scale) for scale, results in by_scale for result in results]
    encoded = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    (output / "results.jsonl").write_bytes(encoded)
    figures: list[tuple[str, Path]] = []
    if len(by_scale) > 1:
        figures.append(("Over the load", output / "loads.png"))
        plot_loads(by_scale, figures[-1][1])
    for scale, results in by_scale:
        ending = f"-{scale:g}" if len(by_scale) > 1 else ""
        figures.append((f"Over time, load {scale:g}", output / f"timeline{ending}.png"))
        plot_comparison([result.run for result in results], figures[-1][1])
        figures.append((f"SLO violations, load {scale:g}", output / f"slo{ending}.png"))
        plot_violations(results, figures[-1][1])
    tables = [(f"Load {scale:g}", rows(results)) for scale, results in by_scale]
    if len(by_scale) > 1 and len(experiment.compare) > 1:
        tables.insert(0, ("Where it helps", windows(by_scale)))
    text = "\n\n".join(f"{name}\n{as_text(table)}" for name, table in tables)
    (output / "table.txt").write_text(text + "\n")
    write_report(
        output / "report.html",
        experiment.title,
        experiment.claim,
        _conditions(experiment, by_scale[0][1][0]),
        tables,
        figures,
    )


def _conditions(experiment: Experiment, result: SimResult) -> list[tuple[str, str]]:
    setup = experiment.setup
    pairs = [(name, str(value)) for name, value in result.run.config if name != "system"]
    pairs.append(("device", setup.device))
    pairs.append(("seed", str(experiment.load.seed)))
    pairs.append(("workload", result.run.provenance))
    pairs += [(label, find_system(label).description) for label in experiment.compare]
    return pairs
