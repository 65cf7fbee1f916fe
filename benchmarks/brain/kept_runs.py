"""Run files of results that are kept without them, so that today's simulator can be asked.

    python -m benchmarks.brain.kept_runs RESULTS EXPERIMENT.toml --out first
    python -m benchmarks.brain.prediction --profile profile.json first/*.jsonl

A kept line has the first token and the pace of every request, but not the requests, which an
experiment draws anew. Between its first and its last token a request's tokens are told as even.
"""

import argparse
from pathlib import Path

from kunserve.core.errors import ConfigError
from kunserve_lab.bench.records import RequestRecord
from kunserve_lab.bench.runfile import Run, write_run
from kunserve_lab.compare.experiment import Experiment
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.real import serve_arguments
from kunserve_lab.compare.results import RunResult, load
from kunserve_lab.compare.settings import RealSetup, workload_of
from kunserve_lab.workload.workload import Workload


def run_of(result: RunResult, experiment: Experiment) -> Run:
    """What a real run's file had. Raises ConfigError where the line is of other requests."""
    if not isinstance(experiment.setup, RealSetup):
        raise ConfigError("only real runs can be predicted, and this experiment is simulated")
    workload = workload_of(experiment.workload, result.load, result.seed)
    if (workload.provenance, len(workload)) != (result.provenance, len(result.ttft_ms)):
        raise ConfigError(
            f"{result.system}, load {result.load:g}: the experiment has {len(workload)} requests "
            f"of {workload.provenance!r}, the line {len(result.ttft_ms)} of {result.provenance!r}"
        )
    flags = serve_arguments(experiment.system(result.system), experiment.setup, None)
    return Run(
        result.system,
        result.provenance,
        result.duration_s,
        tuple(record(result, workload, number) for number in range(len(workload))),
        config=(("serve", " ".join(flags)),),
        environment=tuple(result.environment.items()),
    )


def record(result: RunResult, workload: Workload, number: int) -> RequestRecord:
    """One request, as if its client had been on time."""
    sent_s = workload.arrival_s[number]
    ttft_ms, tpot_ms = result.ttft_ms[number], result.tpot_ms[number]
    num_output = workload.lengths.output_tokens[number]
    times_s: tuple[float, ...] = ()
    if ttft_ms is not None:
        step_s = (tpot_ms or 0.0) / 1e3
        times_s = tuple(sent_s + ttft_ms / 1e3 + step_s * at for at in range(num_output))
    return RequestRecord(
        number=number,
        server="",
        planned_s=sent_s,
        sent_s=sent_s,
        token_times_s=times_s,
        last_token_s=times_s[-1] if times_s else None,
        finish_s=times_s[-1] if times_s else sent_s,
        input_tokens=workload.lengths.input_tokens[number],
        asked_output_tokens=num_output,
        output_tokens=len(times_s),
        finish_reason="length" if times_s else None,
        error=None if times_s else "failed",
    )


def main() -> None:
    """A run file for every line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="a results.jsonl, or its folder")
    parser.add_argument("experiment", type=Path, help="the file that the lines are of")
    parser.add_argument("--out", type=Path, required=True, help="folder; its name is the run's")
    options = parser.parse_args()
    experiment = read_experiment(options.experiment)
    options.out.mkdir(parents=True, exist_ok=True)
    for result in load(options.results):
        place = f"load{result.load:g}-seed{result.seed}-round{result.round + 1}"
        write_run(options.out / f"{result.system}-{place}.jsonl", run_of(result, experiment))


if __name__ == "__main__":
    main()
