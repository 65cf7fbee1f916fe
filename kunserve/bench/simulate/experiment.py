"""Runs an experiment and writes what it found: text, JSONL, figures, a report."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kunserve.bench.plot import plot_comparison
from kunserve.bench.runfile import write_run
from kunserve.bench.simulate.chrome_trace import StepTrace
from kunserve.bench.simulate.figures import plot_loads, plot_violations
from kunserve.bench.simulate.html import write_report
from kunserve.bench.simulate.run import Scenario, SimResult, simulate
from kunserve.bench.simulate.settings import Experiment, build_scenario, check_systems
from kunserve.bench.simulate.systems import find_system
from kunserve.bench.simulate.table import as_text, rows, summary
from kunserve.core.errors import ConfigError


def run_experiment(
    experiment: Experiment,
    output: Path | None,
    *,
    save_requests: bool = False,
    chrome_trace: bool = False,
) -> list[tuple[float, list[SimResult]]]:
    """Every load in turn, every system at each. Prints as it goes."""
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
    by_scale: list[tuple[float, list[SimResult]]] = []
    for scale, scenario in scenarios:
        results = []
        for label in experiment.compare:
            trace = StepTrace() if chrome_trace and output is not None else None
            result = _run_one(label, scenario, trace)
            results.append(result)
            if output is not None:
                stem = f"{label}-{scale:g}" if len(scales) > 1 else label
                if save_requests:
                    write_run(output / f"{stem}.jsonl", result.run)
                if trace is not None:
                    trace.write(output / f"{stem}.trace.json", result.transitions)
        by_scale.append((scale, results))
        print(f"\nload {scale:g}: {scenario.workload.provenance}")
        print(as_text(rows(results)), flush=True)
        if output is not None:
            _write(experiment, by_scale, output)
    if output is not None:
        print(f"\nwritten to {output}")
    return by_scale


def _run_one(label: str, scenario: Scenario, trace: StepTrace | None) -> SimResult:
    began_s = time.perf_counter()
    columns = (
        TextColumn(f"[bold]{label}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} requests"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=len(scenario.workload))
        result = simulate(
            find_system(label),
            scenario,
            watcher=trace,
            ended=lambda record: progress.advance(task),
        )
    took_s = time.perf_counter() - began_s
    print(f"{label}: {result.metrics.duration_s:.0f} s simulated in {took_s:.1f} s")
    return result


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
