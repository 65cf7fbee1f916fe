"""What an endpoint picker reads of a pod, by its own rules (llm-d's core-metrics-extractor).

A specification is a name, or a name with labels. Of a family the series with the latest timestamp
counts, and the first of equals: without timestamps, the first that has the labels.
"""

import re
from dataclasses import replace
from pathlib import Path

import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kunserve.core.load import LoadReport
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.live_server import live_server

PICKER = Path(__file__).parents[3] / "deploy" / "gateway" / "picker.yaml"
_SPEC = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?")


def extracted(text: str, spec: str) -> Sample:
    """The series that the picker takes."""
    families: dict[str, Metric] = {one.name: one for one in text_string_to_metric_families(text)}
    found = _SPEC.fullmatch(spec)
    assert found is not None, spec
    name, labels = found[1], dict(re.findall(r'(\w+)="?([^",]*)"?', found[2] or ""))
    latest, recent = None, -1.0
    for sample in families[name].samples:
        timestamp = float(sample.timestamp or 0)
        if labels.items() <= sample.labels.items() and timestamp > recent:
            latest, recent = sample, timestamp
    assert latest is not None, spec
    return latest


def engine_config() -> dict[str, str]:
    plugins = yaml.safe_load(PICKER.read_text())["plugins"]
    (parameters,) = (one["parameters"] for one in plugins if "parameters" in one)
    (config,) = parameters["engineConfigs"]
    assert parameters["defaultEngine"] == config["name"]
    return dict(config)


def test_the_first_series_is_the_whole_pod() -> None:
    engine, config = EchoEngine(), engine_config()
    first, second = engine.snapshot.groups
    loads = (
        LoadReport(
            first.group_id,
            1,
            num_running=2,
            num_waiting=1,
            used_blocks=30,
            capacity_blocks=100,
        ),
        LoadReport(
            second.group_id, 1, num_running=5, num_waiting=7, used_blocks=90, capacity_blocks=100
        ),
    )
    engine.snapshot = replace(engine.snapshot, loads=loads, num_unplaced=4)
    with live_server(engine) as server, server.client() as http:
        text = http.get("/metrics").text
    assert extracted(text, config["queuedRequestsSpec"]).value == 12
    assert extracted(text, config["runningRequestsSpec"]).value == 7
    assert extracted(text, config["kvUsageSpec"]).value == 0.6
    labels = extracted(text, config["cacheInfoSpec"]).labels
    assert int(labels["num_gpu_blocks"]) == 200 and int(labels["block_size"]) > 0
    trap = extracted(text, "vllm:num_requests_waiting").value
    assert trap != 12, "a series of one engine would mislead the picker"


def test_a_pod_whose_groups_have_not_reported_is_empty_not_absent() -> None:
    engine, config = EchoEngine(), engine_config()
    engine.snapshot = replace(engine.snapshot, loads=())
    with live_server(engine) as server, server.client() as http:
        text = http.get("/metrics").text
    for spec in ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"):
        assert extracted(text, config[spec]).value == 0
