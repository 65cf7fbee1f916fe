"""The report is what the kept results give: no number in it is typed, and none is missing."""

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.paper.kept_results import FIXED, LONGBENCH, runs_of
from benchmarks.paper.kept_tables.real import P99, ROUNDS, groups
from benchmarks.paper.report import checks, drawings, older_runs, own_tables, real_bursts
from benchmarks.paper.report.content import FIGURES, ORDER, PAGES, TEMPLATES, pages, sources
from benchmarks.paper.report.drawings import DRAWINGS, KEPT, digest_of
from benchmarks.paper.report.references import REFERENCES
from benchmarks.paper.report.template import Sources, UnknownName, fill, typed_figures
from benchmarks.paper.report.web_page import write_html
from benchmarks.paper.simulated_code import Codes, codes
from benchmarks.paper.tables import TABLES

AGAIN = "run `make report`"
SOME = Sources(
    values={"a.b": lambda: "3.5x"},
    tables={"one": lambda: "| x |\n|---|\n| 1 |"},
    figures={"map": lambda: "![it](figures/map.png)"},
    references={"paper": "Somebody. A title.", "other": "Somebody else."},
)


def test_committed_pages_are_what_the_kept_results_give() -> None:
    for name, text in pages().items():
        assert (PAGES / f"{name}.md").read_text() == text, AGAIN


@pytest.mark.parametrize("name", DRAWINGS)
def test_committed_pictures_are_drawn_of_what_is_kept_now(name: str) -> None:
    with Image.open(PAGES / FIGURES / f"{name}.png") as picture:
        assert picture.info[KEPT] == digest_of(DRAWINGS[name].points()), AGAIN


@pytest.mark.parametrize("name", ORDER)
def test_no_number_of_the_text_is_typed(name: str) -> None:
    assert typed_figures((TEMPLATES / f"{name}.md").read_text()) == []


@pytest.mark.parametrize(
    ("line", "is_typed"),
    [
        ("P99 falls 3 times", True),
        ("P99 TTFT of Qwen2.5-14B on eight A800, Fig. 2b-e and Table 1", False),
        ("{{claims.72b.lower}}, as [@paper2] says, by `1 + x`", False),
        ("[the first](page-2.md) of 12", True),
        ("{{a}} or 40 %", True),
        ("a quarter of the memory", True),
        ("five times the memory", True),
        ("twice as long, and not said twice", True),
        ("nothing is said twice", False),
        ("two instances take turns three at a time", False),
    ],
)
def test_a_typed_figure_is_found(line: str, is_typed: bool) -> None:
    assert bool(typed_figures(line)) == is_typed


@pytest.mark.parametrize(
    "page", ["{{a.c}}", "{{table:two}}", "{{figure:a.b}}", "{{note:one}}", "[@nobody]"]
)
def test_an_unknown_name_is_an_error(page: str) -> None:
    with pytest.raises(UnknownName):
        fill(page, SOME)


def test_a_page_is_filled() -> None:
    page = "# T\n\n## Abstract\n\n## One\n\n{{a.b}} [@other] [@paper] [@other] {{section:Two}}\n\n"
    text = fill(f"{page}## Two\n\n{{{{table:one}}}}\n\n## References\n", SOME)
    assert "## Abstract" in text and "## 1 One" in text and "## 2 Two" in text
    assert "3.5x [1] [2] [1] Section 2" in text
    assert text.endswith("## References\n\n1. Somebody else.\n2. Somebody. A title.\n")


def test_a_value_whose_results_are_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIXED, "LongBench", "claims_of_nobody")
    with pytest.raises(Exception, match="claims_of_nobody"):
        sources().values["claims.light.medians"]()


def test_every_work_is_cited_and_every_table_is_shown() -> None:
    text = "".join((TEMPLATES / f"{name}.md").read_text() for name in ORDER)
    assert set(re.findall(r"\[@([\w-]+)\]", text)) == set(REFERENCES)
    assert set(own_tables.OWN) <= set(re.findall(r"\{\{table:([\w-]+)\}\}", text))
    assert set(DRAWINGS) == set(re.findall(r"\{\{figure:([\w-]+)\}\}", text))


def test_pictures_have_what_the_rows_have() -> None:
    swept, claims = runs_of(LONGBENCH), runs_of(FIXED["LongBench"])
    drawn = drawings.over_loads()["LongBench"]
    assert drawn["drop-deep"] == {
        at: (run.ttft_p99_s,) * 3 for at in swept.loads for run in [swept.run("drop-deep", at)]
    }
    assert drawn.keys() >= {"tp-pairs", "recompute-chunk"}
    for at in claims.loads:
        p99_s = [run.ttft_p99_s for run in claims.draws("tp-pairs", at).values()]
        assert drawn["tp-pairs"][at] == (statistics.median(p99_s), min(p99_s), max(p99_s))
    assert drawings.late_shares().keys() == FIXED.keys()
    group = groups(ROUNDS)[min(groups(ROUNDS))]
    first = next(iter(drawings.real().values()))
    values = [run.ttft_p99_s for run in group.by_system["drop"]]
    assert first["drop"] == (statistics.median(values), min(values), max(values))


@pytest.mark.parametrize(
    ("draw", "points", "drawn"),
    [
        (drawings.draw_lines, {"a": {"drop": {0.1: (2.0, 1.0, 3.0), 0.2: (4.0, 4.0, 4.0)}}}, 2.0),
        (drawings.draw_bars, {"a": {"drop": (2.0, 1.0, 3.0)}}, 2.0),
    ],
)
def test_what_is_drawn_is_what_is_given(
    draw: Callable[..., Any], points: dict[str, Any], drawn: float
) -> None:
    words = ("across", "up") if draw is drawings.draw_lines else ("up",)
    (axis,) = draw(points, *words).axes
    if axis.patches:
        assert [bar.get_height() for bar in axis.patches] == [drawn]
    else:
        assert axis.lines[0].get_ydata().tolist() == [drawn, 4.0]


def test_a_second_burst_that_is_not_kept_says_how_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(real_bursts, "kept", lambda folder: folder == ROUNDS)
    *rows, last = real_bursts.table()
    assert real_bursts.SECOND_COMMAND in last[0] and set(last[1:]) == {"-"}
    assert {row[1] for row in rows[1:]} >= {"`recompute`", "`drop`", "`endless`"}


def test_p95_stands_before_p99_and_is_over_equal_requests() -> None:
    group = groups(ROUNDS)[min(groups(ROUNDS))]
    names = list(real_bursts.picks(group))
    assert names.index(real_bursts.P95) + 1 == names.index(P99)
    run = group.by_system["endless"][0]
    told = sorted(v for at, v in enumerate(run.ttft_ms) if v is not None and at not in run.left_out)
    assert real_bursts.p95_s(run) == pytest.approx(told[round(0.95 * len(told))] / 1e3, rel=0.1)


def test_faults_are_counted_or_say_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHAOS", tmp_path / "chaos.jsonl")
    assert checks.CHAOS_COMMAND in checks.faults()[1][0]
    (tmp_path / "chaos.jsonl").write_text(
        '{"seconds": 300.0, "instances": 4, "requests": 10, "identical": 6, "aborted": 2, "cut": 1,'
        ' "poisoned": 1, "wrong": 0, "unfinished": 0, "internal_errors": 0, "left": {"blocks": 0},'
        ' "faults": {"drops": 3, "restores": 2, "kill -9": 4, "words lost": 1}, "commit": "abc"}\n'
    )
    assert checks.faults()[1] == ("5 min, 4", "10", "6", "4", "0", "5", "5", "0", "abc")


def test_what_an_older_simulator_made_is_said() -> None:
    text = "".join((TEMPLATES / f"{name}.md").read_text() for name in ORDER)
    tables = {**TABLES, **own_tables.OWN}
    shown = [tables[name] for name in re.findall(r"\{\{table:([\w-]+)\}\}", text)]
    older = {name for table in shown for name in table.of} & set(codes().older)
    assert {name for name in older if f"{{{{older.{name}}}}}" not in text} == set()


def test_a_notice_goes_with_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    said = older_runs.older_values()
    monkeypatch.setattr(older_runs, "codes", lambda: Codes("c", (older_runs.TARGETS,), ()))
    assert {one() for one in said.values()} == {older_runs.NOTICE, older_runs.MARK}
    monkeypatch.setattr(older_runs, "codes", lambda: Codes("c", (), ()))
    assert {one() for one in said.values()} == {""}


def test_what_lost_is_one_line_each() -> None:
    rows = own_tables.lost()
    assert len(rows) > 20
    for link, line in rows[1:]:
        name = re.search(r"\.\./decisions/([\w-]+\.md)", link)
        assert name is not None and (own_tables.DECISIONS / name[1]).exists()
        assert 3 < len(line.split()) < 60 and "|" not in line


def test_the_web_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    text = "# It\n\n![a](figures/map.png)\n\n[here](https://a.b) and [there](../x.md)\n\n"
    write_html(f"{text}| x |\n|---|\n| 1 |\n", PAGES, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "data:image/png;base64," in page and 'href="https://a.b"' in page
    assert "x.md" not in page and "<td>1</td>" in page


def test_the_pdf_has_every_page(tmp_path: Path) -> None:
    pytest.importorskip("fpdf")
    from benchmarks.paper.report.pdf import blocks, marked, write_pdf

    assert list(blocks("a\nb\n\n* c\n* d\n\n| x |\n|---|\n| 1 |")) == [
        *("a b", "* c", "* d", "| x |\n|---|\n| 1 |")
    ]
    assert marked("*a* **b** `--c` [d](e.md)") == r"__a__ **b** \--c d"
    one, two = tmp_path / "1.pdf", tmp_path / "2.pdf"
    for path in (one, two):
        write_pdf("# It\n\n" + "Words. " * 2000, PAGES, path)
    assert one.read_bytes() == two.read_bytes() and one.read_bytes().startswith(b"%PDF")
