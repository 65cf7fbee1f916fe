"""Every metric of ``/metrics`` is described, in the code and in the docs."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.metric_table import DOCUMENT, EVERYWHERE, process_families, rows, write_table
from kunserve.server.telemetry.metrics import ROWS, FrontMetrics
from tests.unit.server.echo_engine import EchoEngine, run_now

ROOT = Path(__file__).parents[4]


def exported() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of everything that a server with a drop exports."""
    engine = EchoEngine()
    metrics = FrontMetrics(engine, "m")
    run_now(engine.drop(None))
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        suffix = "_total" if family.type == "counter" else ""
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[family.name + suffix] = (family.type, labels)
    return found


def test_the_document_has_the_table_that_the_code_gives() -> None:
    text = (ROOT / DOCUMENT).read_text()
    assert write_table(text) == text, "run `python -m benchmarks.metric_table`"


def test_every_exported_metric_is_in_the_table_and_none_besides() -> None:
    """Those of the Python client have no row, because they tell of the process alone."""
    described = {name.strip("`"): (kind, labels) for name, kind, labels, _ in rows()}
    of_process = {family.name for family in process_families()}
    got = {name: told for name, told in exported().items() if name not in of_process}
    assert described.keys() == got.keys()
    for name, (kind, labels) in got.items():
        assert kind == described[name][0], name
        if labels:
            assert labels - {EVERYWHERE} == set(re.findall(r"`(\w+)`", described[name][1])), name
            assert EVERYWHERE in labels, name


def test_names_are_unique_and_meanings_are_sentences() -> None:
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))
    for row in ROWS:
        assert row.meaning.endswith(".") and "|" not in row.meaning, row.name
