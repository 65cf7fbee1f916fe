"""The test set is clean: nobody else asks for it, and it is asked once."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import FOLDER
from benchmarks.paper import kept_results, test_set
from benchmarks.paper.held_back import held_back
from benchmarks.paper.points import ROOT, UNSEEN, Point
from benchmarks.paper.reproduction import experiments
from kunserve.core.errors import ConfigError
from kunserve_lab.compare.experiment_file import read_experiment
from kunserve_lab.workload.data.catalog import DATA_SETS

SEEDS = set(held_back().seeds)
NAMES = {"SEEDS", "DRAWS", "seeds", "draws"}
"""Of constants and flags that say which draws a benchmark takes."""


def test_what_is_held_back_is_of_experiments_that_there_are() -> None:
    back = held_back()
    assert len(back.seeds) == 10 and len(back.windows) == 2
    assert {*back.draws, *back.in_windows} <= experiments().keys()
    for name in (*back.draws, *back.in_windows):
        known = read_experiment(experiments()[name])
        assert set(back.systems) <= set(known.systems)
        assert known.workload.trace is not None and known.workload.end_s is not None


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").rglob("*.toml")), ids=str)
def test_no_experiment_draws_what_is_held_back(path: Path) -> None:
    if path.parent.name == "hosts":
        return
    experiment = read_experiment(path)
    assert SEEDS.isdisjoint(experiment.seeds)
    trace = experiment.workload.trace
    # Windows are of the rest of a trace, of which the package ships the beginning only.
    assert trace is None or DATA_SETS[str(trace)].download is None


def test_no_result_is_of_what_is_held_back() -> None:
    num_seen = 0
    for path in (FOLDER / "results").rglob("*.jsonl"):
        if path == test_set.results_path():
            continue
        for line in path.read_text().splitlines():
            values = json.loads(line)
            for one in (values, values.get("settings", {})):
                for name in ("seed", "draw"):
                    if name in one:
                        num_seen += 1
                        assert one[name] not in SEEDS, (path, one)
    assert num_seen > 1000


def test_no_benchmark_takes_those_draws_of_itself() -> None:
    found = []
    for path in (FOLDER / "paper").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Assign)
                and {target.id for target in node.targets if isinstance(target, ast.Name)} & NAMES
            ):
                found += _numbers(node.value)
            if isinstance(node, ast.Call) and node.args and _flag(node.args[0]) in NAMES:
                found += [n - 1 for key in node.keywords for n in _numbers(key.value)]
    assert found and max(found) < min(SEEDS)


def _numbers(node: ast.AST) -> list[int]:
    values = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
    return [value for value in values if isinstance(value, int)]


def _flag(node: ast.AST) -> str:
    value = node.value if isinstance(node, ast.Constant) else None
    return value.lstrip("-") if isinstance(value, str) else ""


def test_points_of_other_benchmarks_are_refused_it() -> None:
    start_s, end_s = held_back().windows[0]
    point = Point("p", "claims_longbench_14b", 0.38)
    with pytest.raises(ConfigError, match="seed 12 is held back"):
        point.scenario(12)
    over = Point("p", "claims_longbench_14b", 0.38, later_window_s=(start_s - 50.0, end_s - 50.0))
    with pytest.raises(ConfigError, match="overlaps one that is held back"):
        over.scenario(0)
    for point in UNSEEN:
        held_back().check_free(0, point.later_window_s)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of results, and runs that take no time."""
    points = [Point("one", "none", 1.0, is_test=True)]
    figures = {"recompute-rr": 9.0, "recompute": 6.0, "drop": 3.0, "endless": 2.0}
    monkeypatch.setattr(test_set, "RESULTS", tmp_path)
    monkeypatch.setattr(test_set, "points", lambda: iter(points))
    monkeypatch.setattr(Point, "scenario", lambda self, seed: seed)
    monkeypatch.setattr(
        test_set,
        "run_figures",
        lambda system, seed: iter([("P99 TTFT", figures[system], "s"), ("drops", seed, "")]),
    )
    kept_results.figures_of.cache_clear()
    yield tmp_path / "test_set.jsonl"


def test_a_version_is_asked_once(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_set.ask(again=False)
    lines = answers.read_text().splitlines()
    assert len(lines) == 2 * 4 * len(SEEDS)
    assert {json.loads(line)["code"] for line in lines} == {test_set.code()}
    shown = ("14.5", "3.0", "3.0x (3.0-3.0)", "2.0x (2.0-2.0)", "0.7x (0.7-0.7)")
    assert test_set.table()[1][2:] == shown
    with pytest.raises(ConfigError, match="has been asked: --table"):
        test_set.ask(again=False)
    monkeypatch.setattr(test_set, "code", lambda: "00000000")
    with pytest.raises(ConfigError, match="tuned on the answer"):
        test_set.ask(again=False)
    assert len(answers.read_text().splitlines()) == len(lines)
    test_set.ask(again=True)
    assert len(answers.read_text().splitlines()) == 2 * len(lines) and len(test_set.table()) == 3
    monkeypatch.setattr("kunserve.__version__", "9.9")
    test_set.ask(again=False)
    assert len(test_set.table()) == 4


def test_a_call_that_was_broken_off_goes_on(answers: Path) -> None:
    test_set.ask(again=False)
    lines = answers.read_text().splitlines()
    made = test_set.kept()
    answers.write_text("".join(f"{line}\n" for line in lines[:7]))  # half of a run
    test_set.ask(again=False)
    assert len(answers.read_text().splitlines()) == len(lines) + 1
    assert test_set.kept() == made
