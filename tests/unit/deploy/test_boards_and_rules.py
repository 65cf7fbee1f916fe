"""Every metric that a panel or a rule asks for is one that we export, with the labels it names."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.metric_table import process_families
from benchmarks.serving.boards import (
    BOARD,
    DOCUMENT,
    RULES,
    VARIABLES,
    documented,
    queries,
    with_values,
)
from kunserve.server.start.command import serve_command
from kunserve.server.telemetry.metric_row import Row, Type
from kunserve.server.telemetry.metrics import ROWS, FrontMetrics
from tests.unit.server.echo_engine import EchoEngine

ROOT = Path(__file__).parents[3]
TARGET_LABELS = {"job", "instance"}
"""Prometheus adds them."""
OWN = re.compile(r"\b(?:vllm|kunserve):\w+|\b(?:process|python)_\w+")
MATCHER = re.compile(r"(\w[\w:]*)\{([^}]*)\}")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
GROUPED = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")


def families() -> dict[str, Row[Any]]:
    """By every name that a sample of theirs has."""
    found = {}
    for family in (*ROWS, *process_families()):
        suffixes = ("_bucket", "_sum", "_count") if family.type is Type.HISTOGRAM else ("",)
        found |= {family.name + suffix: family for suffix in suffixes}
    return found


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((ROOT / RULES).read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def board() -> dict[str, Any]:
    return json.loads((ROOT / BOARD).read_text())  # type: ignore[no-any-return]


def expressions() -> Iterator[str]:
    for rule in rules():
        yield rule["expr"]
    for query in queries(board()):
        yield query.expression
    for variable in board()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"]
    for query in documented((ROOT / DOCUMENT).read_text()):
        yield query.expression


needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool")
RECORDED = {rule["record"] for rule in rules() if "record" in rule}
KNOWN = families()


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_an_expression_asks_for_what_is_exported(expression: str) -> None:
    plain = expression
    for name in RECORDED:
        plain = plain.replace(name, "recorded")
    asked = OWN.findall(plain)
    assert asked or plain != expression or "up{" in plain, expression
    known_labels = {"le"} | TARGET_LABELS
    for name in asked:
        assert name in KNOWN, name
        known_labels |= set(KNOWN[name].labels)
    for name, matchers in MATCHER.findall(plain):
        labels = set(LABEL.findall(matchers)) - TARGET_LABELS
        if name in KNOWN:
            has = {*KNOWN[name].labels, "le"} if name.endswith("_bucket") else KNOWN[name].labels
            assert labels <= set(has), (name, labels)
    for group in GROUPED.findall(plain):
        named = {label.strip() for label in group.split(",") if label.strip()}
        assert named <= known_labels, (expression, named)


def test_bounds_that_rules_name_are_bounds_of_their_histograms() -> None:
    exposed = FrontMetrics(EchoEngine(), "m").exposition().decode()
    for expression in expressions():
        for name, bound in re.findall(r'([\w:]+_bucket)\{[^}]*le="([^"]+)"', expression):
            assert re.search(rf'^{name}\{{.*le="{bound}"', exposed, re.MULTILINE), expression


def test_alerts_say_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
            assert set(rule["annotations"]) == {"summary", "description", "runbook"}, rule["alert"]
    names = [rule["alert"] for rule in rules() if "alert" in rule]
    assert len(names) == len(set(names))
    flags = set(re.findall(r"--[a-z-]+", (ROOT / RULES).read_text()))
    assert flags <= {option for parameter in serve_command.params for option in parameter.opts}


def test_the_board_is_whole() -> None:
    content = board()
    panels = content["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(references) == len(set(references)), panel["title"]
    variables = {variable["name"] for variable in content["templating"]["list"]}
    for query in queries(content):
        for name in re.findall(r"\$\{?(\w+)\}?", query.expression):
            assert name in variables | {"__rate_interval"}, query.expression
    for annotation in content["annotations"]["list"]:
        assert annotation.get("expr") == annotation.get("target", {}).get("expr")
    assert "$" not in with_values(next(queries(content)).expression, {})


def test_where_the_board_is_found_its_data_source_is_too() -> None:
    provisioning = ROOT / "deploy/grafana/provisioning"
    source = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())
    (prometheus,) = source["datasources"]
    assert prometheus["type"] == "prometheus" and prometheus["isDefault"]
    dashboards = yaml.safe_load((provisioning / "dashboards/kunserve.yml").read_text())
    assert dashboards["providers"][0]["options"]["path"] == "/var/lib/grafana/dashboards"


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "deploy/prometheus/prometheus.yml"),
        ("test", "rules", "tests/unit/deploy/alerts_test.yml"),
    ],
)
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_queries_of_the_board_and_of_the_docs_are_promql(tmp_path: Path) -> None:
    written = {with_values(one, VARIABLES) for one in expressions() if "label_values" not in one}
    made = [{"record": f"query{number}", "expr": one} for number, one in enumerate(sorted(written))]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": made}]}))
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
