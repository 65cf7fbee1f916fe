"""Ratios of a real cluster beside those of its simulations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.brain import prediction
from benchmarks.brain.kept_runs import run_of as run_of_kept
from benchmarks.brain.prediction import (
    Simulated,
    config_of,
    misses,
    report_ratios,
    system_of,
    workload_of,
)
from benchmarks.report import Report
from kunserve.core.config import KunServeConfig, OverloadConfig
from kunserve.core.errors import ConfigError
from kunserve_lab.bench.metrics import compute_metrics
from kunserve_lab.bench.runfile import Run
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.results import RunResult, load
from tests.lab.bench.comparisons import run_of

ROOT = Path(__file__).parents[3]
KEPT = load(ROOT / "benchmarks/results/overload-first")
EXPERIMENT = read_experiment(ROOT / "experiments/overload.toml")


def simulated(name: str, real_s: float, found_s: list[float], number: int = 1) -> Simulated:
    path = Path(f"some/{name}-load0.06-seed0-round{number}.jsonl")
    runs = [run_of(name, [seconds] * 50) for seconds in (real_s, *found_s)]
    return Simulated(path, "profile", runs[0], tuple(runs[1:]))


def ratios(*everything: Simulated) -> dict[str, dict[str, float]]:
    lines: dict[str, dict[str, float]] = {}
    with Report("some") as report:
        report_ratios(report, everything)
        for figure in report._figures:
            name = f"{figure.settings['system']} {figure.settings['ratio']}"
            lines.setdefault(name, {})[figure.name] = figure.value or 0.0
    return lines


def test_a_ratio_is_of_medians_over_rounds_and_draw_by_draw() -> None:
    found = ratios(
        simulated("recompute", 4.0, [8.0, 3.0, 4.0]),
        simulated("recompute", 6.0, [8.0, 3.0, 4.0], 2),
        simulated("recompute", 9.0, [8.0, 3.0, 4.0], 3),
        simulated("drop", 2.0, [2.0, 2.0, 1.0]),
    )
    assert found.keys() == {f"drop TTFT P{p}" for p in (50, 90, 99)}
    one = found["drop TTFT P90"]
    assert (one["real rounds"], one["real"]) == (1, 3.0)
    assert (one["simulated"], one["least"], one["most"]) == (4.0, 1.5, 4.0)
    assert one["error"] == pytest.approx(100 / 3)


def test_requests_that_not_all_completed_are_left_out() -> None:
    nan = float("nan")
    path = Path("some/drop-load0.06-seed0-round1.jsonl")
    some = [run_of("drop", [2.0] * 9 + [nan]), run_of("drop", [2.0] * 10)]
    others = [run_of("recompute", [4.0] * 9 + [90.0])] * 2
    found = ratios(
        Simulated(path, "profile", some[0], (some[1],)),
        Simulated(path.with_stem("recompute-load0.06-seed0-round1"), "profile", *others[:1],
                  tuple(others[1:])),
    )  # fmt: skip
    assert found["drop TTFT P99"]["real"] == found["drop TTFT P99"]["simulated"] == 2.0


def test_of_each_request_the_median_of_its_simulations_counts() -> None:
    real = run_of("drop", [2.0, 4.0, float("nan"), 1.0])
    drawn = [run_of("drop", [at, 4.0, 9.0, 1.1]) for at in (1.0, 3.0, 80.0)]
    assert misses(Simulated(Path("some"), "profile", real, tuple(drawn))) == [
        pytest.approx(share) for share in (0.5, 0.0, 0.1)
    ]


def test_folders_loads_and_draws_are_apart(capsys: pytest.CaptureFixture[str]) -> None:
    one = simulated("recompute", 4.0, [8.0])
    other = Simulated(Path("some/drop-load0.09-seed0-round1.jsonl"), "profile", one.run, one.found)
    assert ratios(one, other) == {}
    elsewhere = Simulated(Path("x") / one.path.name, "profile", run_of("drop", [1.0]), one.found)
    assert ratios(one, elsewhere) == {}
    assert not [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("label", "policy", "name"),
    [("endless", "recompute", "endless"), ("static-pp", "recompute", "static-pp"),
     ("drop-0.06", "drop", "drop")],
)  # fmt: skip
def test_a_run_says_which_system_it_was(label: str, policy: str, name: str) -> None:
    run = Run(label, "told", 1.0, (), ())
    config = KunServeConfig(overload=OverloadConfig(policy=policy))
    assert system_of(run, config).name == name
    assert prediction.PLACE.search(f"{label}-load0.06-seed0-round1")[0] == "-load0.06-seed0"


@pytest.mark.parametrize("result", KEPT, ids=lambda one: f"{one.system}-{one.round}")
def test_a_kept_line_gives_a_run_with_its_figures(result: RunResult) -> None:
    run = run_of_kept(result, EXPERIMENT)
    metrics = compute_metrics(run.records, run.duration_s)
    for percentile in (50.0, 99.0):
        assert metrics.ttft.percentile_s(percentile) == pytest.approx(
            result.percentile_s("ttft", percentile), abs=1e-3
        )
        assert metrics.tpot.percentile_s(percentile) == pytest.approx(
            result.percentile_s("tpot", percentile), abs=1e-4
        )
    assert metrics.output_throughput == pytest.approx(result.output_throughput, rel=1e-3)
    assert run.provenance == result.provenance
    assert len(workload_of(run, None, 0.0)) == result.num_requests
    assert config_of(run).cluster.num_instances == 2


def test_a_request_that_failed_has_no_token() -> None:
    failed = replace(KEPT[0], ttft_ms=(None, *KEPT[0].ttft_ms[1:]))
    first, second = run_of_kept(failed, EXPERIMENT).records[:2]
    assert (first.succeeded, first.token_times_s) == (False, ())
    assert second.succeeded
    assert len(second.token_times_s) == second.asked_output_tokens


def test_lines_of_other_requests_are_refused() -> None:
    other = replace(KEPT[0], load=0.06)
    with pytest.raises(ConfigError, match="recompute, load 0.06: the experiment has"):
        run_of_kept(other, EXPERIMENT)
