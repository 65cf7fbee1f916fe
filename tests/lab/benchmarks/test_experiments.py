"""Experiments of this repository run from a clone: every name in them is known here."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from benchmarks.__main__ import FOLDER
from benchmarks.paper import burst_map, inside_burst, map_agreement, tables
from benchmarks.paper.kept_results import FIXED, RESULTS, Runs, runs_of
from benchmarks.paper.reproduction import DOCUMENTS, experiments, kept, missing, write_tables
from benchmarks.paper.simulated_code import code, code_kept, codes
from benchmarks.paper.tables import TABLES
from kunserve.core.errors import ConfigError
from kunserve_lab.compare.comparison import Options, compare
from kunserve_lab.compare.experiment import Experiment, check_experiment
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.compare.results import load
from kunserve_lab.compare.settings import workload_of
from kunserve_lab.workload.burst import Burst
from kunserve_lab.workload.data.catalog import DATA_SETS
from tests.lab.bench.comparisons import result

EXPERIMENTS = sorted((FOLDER.parent / "experiments").glob("*.toml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_needs_nothing_from_outside(path: Path) -> None:
    experiment = read_experiment(path)
    check_experiment(experiment)
    assert experiment.title != "Comparison"
    for setting in (experiment.workload.trace, experiment.workload.lengths):
        assert setting is None or DATA_SETS[str(setting)].download is None
    assert len(workload_of(experiment.workload, experiment.loads[0], 0)) > 10


def test_a_base_is_for_several_experiments_and_is_none_itself() -> None:
    names = [path.name for path in (FOLDER.parent / "experiments" / "base").iterdir()]
    text = "\n".join(path.read_text() for path in [*EXPERIMENTS])
    bases = "\n".join(
        path.read_text() for path in (FOLDER.parent / "experiments" / "base").iterdir()
    )
    for name in names:
        assert text.count(f'"base/{name}"') + bases.count(f'"{name}"') > 1, name


_REPORTED = re.compile(r"\{\{table:([\w-]+)\}\}")


def test_the_documents_have_the_tables_that_the_committed_results_give() -> None:
    texts = [document.read_text() for document in DOCUMENTS]
    shown = [name for text in texts for name in re.findall(r"<!-- table: ([\w-]+) -->", text)]
    pages = (FOLDER / "paper" / "report" / "text").glob("*.md")
    reported = {name for page in pages for name in _REPORTED.findall(page.read_text())}
    assert sorted(shown) == sorted(TABLES.keys() - (reported - set(shown)))
    for text in texts:
        assert write_tables(text) == text, "run `python -m benchmarks.paper.reproduction --tables`"


def test_every_kept_run_is_what_todays_code_gives_or_is_called_older() -> None:
    older = codes().older
    for path in sorted((RESULTS / "simulated").glob("*.jsonl")):
        for run in load(path):
            assert path.stem in older or codes().stands(run), (
                f"{path.stem}: {run.system}, load {run.load:g}, seed {run.seed} is of code "
                f"{code_kept(run.environment)}: run it again, or say in codes.toml why it stands"
            )


def test_what_has_changed_in_the_simulated_rooms_is_known() -> None:
    assert code() == codes().today, (
        "the rooms that decide a simulated run have changed: run again what that moves "
        "(`python -m benchmarks.paper.reproduction NAME`), then say in "
        f"benchmarks/results/simulated/codes.toml that today's code is {code()}, and of which runs "
        f"{codes().today} stands"
    )


@pytest.mark.parametrize(
    ("system", "drops", "preemptions", "stands"),
    [("recompute", 0, 0, (True, True)), ("recompute", 0, 3, (False, False)),
     ("drop", 2, 0, (True, False)), ("static-pp4", 0, 0, (True, False))],
)  # fmt: skip
def test_an_older_run_stands_where_the_change_does_not_concern_it(
    system: str, drops: int, preemptions: int, stands: tuple[bool, bool]
) -> None:
    by_code = {one.runs: one for one in codes().stand}
    kinds = ("without preemptions", "without preemptions and pipelines")
    for kind, expected in zip(kinds, stands, strict=True):
        of_code = {"code": by_code[kind].codes[0]}
        run = replace(result(system, [0.1]), num_drops=drops, num_preemptions=preemptions,
                      environment=of_code)  # fmt: skip
        assert codes().stands(run) is expected
    assert codes().stands(replace(run, environment={"code": codes().today}))
    assert not codes().stands(replace(run, environment={"code": "0" * 8}))


@pytest.mark.dear
@pytest.mark.parametrize(("system", "seed"), [("drop", 0), ("recompute", 1)])
def test_what_the_claims_rest_on_is_what_todays_code_gives(system: str, seed: int) -> None:
    """Where this fails the simulator's answers have changed, and the claims are of another code.

    Then run the experiments that ``claims`` names (`python -m benchmarks.paper.reproduction NAME`).
    """
    name = FIXED["heavy weights"]
    at = runs_of(name).fixed
    experiment = replace(
        read_experiment(experiments()[name]), systems=(system,), loads=(at,), seeds=(seed,)
    )
    (now,) = compare(experiment, None, Options(num_jobs=1), say=lambda line: None)
    then = runs_of(name).draws(system, at)[seed]
    for field in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "output_throughput"):
        assert getattr(now, field) == pytest.approx(getattr(then, field), rel=1e-3), field
    for count in ("num_drops", "num_restores", "num_preemptions"):
        assert getattr(now, count) == getattr(then, count), count
    assert then.num_drops or then.num_preemptions


def test_the_map_has_the_bursts_that_were_simulated_last() -> None:
    """Where this fails, run `python -m benchmarks.paper.map_agreement` again."""
    told = map_agreement.compared()
    drawn = sorted(one.simulated for one in told if one.where not in map_agreement.EXPERIMENTS)
    simulated = sorted(one.times_lower() for one in burst_map.kept())
    assert drawn == pytest.approx(simulated, rel=2e-3)


def test_within_the_burst_are_those_who_arrive_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        SimpleNamespace(sent_s=float(at), token_times_s=[at + wait])
        for at, wait in ((9, 50.0), (10, 1.0), (15, 3.0), (20, 2.0), (21, 50.0))
    ]
    result = SimpleNamespace(run=SimpleNamespace(records=records))
    monkeypatch.setattr(inside_burst, "burst_of", lambda _: Burst(10.0, 10.0, 2.0, 1.0))
    monkeypatch.setattr(inside_burst, "simulate", lambda *_: result)
    found = {name: value for name, value, _ in inside_burst.figures("drop", Mock())}
    assert found["requests"] == 3
    assert found["P50 TTFT"] == 2.0 and found["P99.9 TTFT"] == pytest.approx(3.0, abs=0.01)


def test_what_is_committed_of_a_run_can_be_read_again(tmp_path: Path) -> None:
    results = load(RESULTS / "simulated" / "ablation.jsonl")
    latencies = {"ttft_ms": (100, 100, 1_000_000), "tpot_ms": (10.0, 10.0, 10.0)}
    one = replace(results[0], ttft_p50_s=0.1, tpot_p50_s=0.01, **latencies)
    path = tmp_path / "some.jsonl"
    path.write_bytes(kept([one]))
    assert load(path) == [replace(one, ttft_ms=(), tpot_ms=())]
    assert Runs(path).violations(one.system, one.load) == pytest.approx(1 / 3, abs=1e-4)


def test_a_prediction_is_of_the_profile_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = {f"TTFT P{p}": {"real": 2.0, "simulated": 3.0} for p in (50, 90, 99)}
    lines = [
        {"name": name, "value": times * value,
         "settings": {"of": f"first-load0.06-seed{draw}", "system": "drop", "ratio": ratio,
                      "times": times, "step_times": steps}}
        for times in (1.0, 1.5)
        for draw, steps in ((0, "profile"), (0, "its pace"), (1, "profile"))
        for ratio, values in ratios.items()
        for name, value in values.items()
    ]  # fmt: skip
    monkeypatch.setattr(tables, "figures_of", lambda benchmark: lines)
    assert tables.prediction()[1:] == [
        ("first", "`drop`", *["2.0x, 3.0x, 3.0x"] * 3),
        ("first, draw 1", "`drop`", *["2.0x, 3.0x"] * 3),
    ]
    assert tables.prediction_errors()[1:] == [
        ("AVX-512, by the profile", "`drop`", "2", *["50, 50 %"] * 3),
        ("AVX-512, at each run's pace", "`drop`", "1", *["50, 50 %"] * 3),
    ]


def test_only_systems_without_results_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(kept([result("drop", [0.1] * 200), result("endless", [0.1] * 200)]))
    experiment = Experiment(systems=("drop", "tp-pairs", "endless"))
    wanted, before = missing(experiment, path)
    assert wanted == ("tp-pairs",) and [run.system for run in before] == ["drop", "endless"]
    (line,) = kept([result("tp-pairs", [1.0] * 200)], before).splitlines()
    assert json.loads(line)["slo_violations"][:5] == [1.0] * 5, "of `endless` there"
    path.write_bytes(kept([result("drop", [0.1] * 200 + [float("nan")])]))
    with pytest.raises(ConfigError, match="all systems must run again"):
        missing(experiment, path)


def test_results_are_of_the_commits_of_all_seeds(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    runs = [result("drop", [0.1], seed=seed, environment={"commit": f"c{seed}"}) for seed in (0, 1)]
    path.write_bytes(kept(runs))
    assert Runs(path).commits == ["c0", "c1"]


def test_every_result_is_of_an_experiment_that_there_is() -> None:
    names = {path.stem for path in (RESULTS / "simulated").glob("*.jsonl")}
    assert names <= set(experiments())
    for name in names:
        places = {(run.system, run.load) for run in load(RESULTS / "simulated" / f"{name}.jsonl")}
        experiment = read_experiment(experiments()[name])
        wanted = {(system, at) for system in experiment.systems for at in experiment.loads}
        assert places == wanted, name
