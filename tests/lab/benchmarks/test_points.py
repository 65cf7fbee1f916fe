"""Kept runs of simulations: which code they are of, and which run again."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.paper import kept_results, points
from benchmarks.paper.points import KeptRun, Point, RunKey, kept, run_missing, with_codes
from benchmarks.paper.simulated_code import UNKNOWN, code
from kunserve_lab.bench.environment import SIMULATED

POINT = Point("a point", "none", 1.0)


def line(name: str, value: float, seed: int = 0, **more: str) -> str:
    settings = {"point": POINT.name, "seed": seed, "system": "drop"}
    return json.dumps({"name": name, "value": value, "settings": settings, **more})


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of results, and runs that take no time."""
    monkeypatch.setattr(kept_results, "RESULTS", tmp_path)
    monkeypatch.setattr(Point, "scenario", lambda self, seed: seed)
    monkeypatch.setattr(
        points, "run_figures", lambda system, seed: iter([("drops", float(seed), "")])
    )
    kept_results.figures_of.cache_clear()
    yield tmp_path
    kept_results.figures_of.cache_clear()


def test_of_a_run_that_ran_again_the_latest_counts(results: Path) -> None:
    lines = [line("drops", 1), line("restores", 1), line("drops", 0, code="12345678")]
    (results / "some.jsonl").write_text("\n".join([*lines, line("drops", 3, seed=1)]))
    assert kept("some") == {
        RunKey(POINT.name, 0, "drop"): KeptRun("12345678", {"drops": 0}),
        RunKey(POINT.name, 1, "drop"): KeptRun(UNKNOWN, {"drops": 3}),
    }


@pytest.mark.parametrize("again", [False, True])
def test_runs_of_other_code_are_told_of_or_run_again(
    again: bool, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line("drops", 1), line("drops", 1, seed=1, code=code())]
    (results / "some.jsonl").write_text("\n".join(lines))
    wanted = [(POINT, seed, "drop") for seed in range(3)]
    run_missing("some", wanted, kept("some"), again=again)
    said = capsys.readouterr()
    found = [json.loads(one) for one in said.out.splitlines()]
    assert [one["settings"]["seed"] for one in found] == ([0, 2] if again else [2])
    assert {one["code"] for one in found} == {code()}
    assert ("1 kept runs are of other code" in said.err) is not again


def test_tables_tell_the_code_as_soon_as_any_is_known() -> None:
    rows = [("load", "drops"), ("a", "1"), ("b", "2")]
    assert with_codes(rows, [{UNKNOWN}, {UNKNOWN}]) == rows
    assert with_codes(rows, [{UNKNOWN, "1234"}, {"1234"}]) == [
        ("load", "drops", "code"),
        ("a", "1", "1234, unknown"),
        ("b", "2", "1234"),
    ]


def test_what_decides_is_in_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(code()) == 8 and code() == code.__wrapped__()
    for room in SIMULATED:
        (tmp_path / room).mkdir(parents=True)
    rule = tmp_path / "kunserve" / "policy" / "rule.py"
    monkeypatch.setattr("kunserve.__file__", str(tmp_path / "kunserve" / "x.py"))
    digests = set()
    for text in ("a = 1", "a = 2"):
        rule.write_text(text)
        digests.add(code.__wrapped__())
    assert len(digests) == 2
