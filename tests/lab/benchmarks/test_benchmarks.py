"""Every benchmark is found, says how it is called, and gives figures of one form."""

import ast
import json
import re
import sys

import pytest

from benchmarks.__main__ import FOLDER, benchmarks
from benchmarks.brain import cost_model, decisions
from benchmarks.gpu_day import PHASES
from benchmarks.paper import memory_or_compute
from benchmarks.report import Report

ROOT = FOLDER.parent


@pytest.mark.parametrize("name", benchmarks())
def test_a_benchmark_says_what_it_asks_and_how_it_is_called(name: str) -> None:
    text = ast.get_docstring(ast.parse((FOLDER / f"{name.replace('.', '/')}.py").read_text()))
    assert text is not None
    first, blank, *_ = text.splitlines()
    assert first.endswith((".", "?")) and blank == "", "one line for the list"
    assert f"python -m benchmarks.{name}" in text


def test_documents_call_benchmarks_that_there_are() -> None:
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for path in documents:
        # What was deleted is named with the commit that has it last.
        lines = path.read_text().splitlines()
        text = "\n".join(line for line in lines if "at 71e062a4" not in line)
        assert "python benchmarks/" not in text, path
        called = re.findall(r"python -m\s+benchmarks\.([\w.]*\w)", text)
        files = re.findall(r"benchmarks/([\w/]+)\.py", text)
        assert set(called) <= set(benchmarks()), path
        for name in files:
            assert (FOLDER / f"{name}.py").exists(), f"{path} names benchmarks/{name}.py"


def test_a_report_is_lines_of_json_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with Report("some", threads=2) as report:
        report.add("time", 1.23456, "ms", rows=1)
        report.add("speed", 2e4, "GB/s", rows=1)
        report.add("time", None, "ms", rows=16)
        report.add("gap", 3, "", trace="a")
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert lines[0].pop("commit") == lines[1].pop("commit")
    assert lines[0] == {
        "benchmark": "some",
        "name": "time",
        "value": 1.235,
        "unit": "ms",
        "settings": {"threads": 2, "rows": 1},
    }
    assert lines[2]["value"] is None
    assert shown.err.strip().splitlines() == [
        "some: threads 2",
        "",
        "rows  time (ms)  speed (GB/s)",
        "1         1.235        20,000",
        "16            -",
        "",
        "trace  gap",
        "a        3",
    ]


def test_what_was_found_before_a_failure_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), Report("some") as report:
        report.add("time", 1, "ms")
        report.add("share", 1 / 0, "%")
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 1 and "time (ms)" in shown.err


def run(main: object, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, object]]:
    """A benchmark's figures."""
    assert callable(main)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["benchmark", *flags])
        main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_dropping_buys_memory_and_costs_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(memory_or_compute.main, capsys)
    by_name = {
        (line["name"], *line["settings"].values()): line["value"]  # type: ignore[attr-defined]
        for line in figures
    }
    pairs = ("LongBench, 14B, A800", 2)
    assert by_name["KV gained", 1.5, *pairs] == pytest.approx(28, abs=1)
    assert by_name["throughput gained", 1.5, *pairs] == pytest.approx(0, abs=1)


def test_the_cost_model_beats_one_without_attention(capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(cost_model.main, capsys, "--against", "roofline")
    errors = {"kunserve": [], "no attention": []}  # type: dict[str, list[float]]
    for line in figures:
        settings, value = line["settings"], line["value"]
        assert isinstance(settings, dict) and isinstance(value, float)
        if line["name"] == "mean error" and "14B" in settings["steps"]:
            errors[settings["model"]].append(value)
    assert max(errors["kunserve"]) < 10.0
    assert sum(errors["kunserve"]) < sum(errors["no attention"]) / 2


def test_decisions_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(decisions.main, capsys, "--instances", "10")
    assert {line["settings"]["decision"] for line in figures} == {
        "drop plan",
        "formation",
        "dispatch",
        "prefix dispatch",
    }  # type: ignore[index]


def test_a_module_that_is_not_run_serves_one_that_is() -> None:
    texts = {
        ".".join(path.relative_to(FOLDER).with_suffix("").parts): path.read_text()
        for path in FOLDER.rglob("*.py")
    }
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    phases = {f"gpu_phases.{phase.module}" for phase in PHASES.values()}
    for name in texts.keys() - benchmarks().keys() - phases - {"__main__"}:
        users = [text for text in (*texts.values(), *tests) if f"benchmarks.{name}" in text]
        assert users, f"benchmarks/{name}.py is neither run nor used"
