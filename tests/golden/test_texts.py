"""Texts that people and programs read: ``/metrics``, and what every command says of itself."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kunserve.cli import main
from kunserve.cluster.api import Vitals
from kunserve.core.config import ServerConfig
from kunserve.core.ids import InstanceId
from kunserve.core.load import LeaderTotals
from kunserve.core.snapshots import ObservedDrops, StageTime
from tests.golden.kept import compare
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.live_server import live_server

TEXTS = Path(__file__).parent / "texts"
WIDTH = 80
"""Characters, whatever the terminal has."""
SAMPLE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
BUCKET = re.compile(r'le="(?P<bound>[^"]*)",?')
MEASURED = re.compile(r"^(process|python)_|_seconds(?!.*_count$)|loop_lag|resident_memory")
"""Names of samples whose values depend on the machine or on the time."""
COMMANDS = (None, *main.list_commands(click.Context(main)))


def test_metrics(renew: bool) -> None:
    """Families, helps, types, labels, buckets, and the values that only requests decide."""
    with live_server(server=ServerConfig(enable_admin=True)) as server, server.client() as client:
        pids = ((InstanceId(1), os.getpid()),)
        server.configure(per_tick=64, wholeness=Vitals(2, 1, 0, pids=pids), num_cached=1)
        completion = {"prompt": ["hello", "world"], "max_tokens": 4, "n": 2}
        assert client.post("/v1/completions", json=completion).status_code == 200
        assert client.post("/v1/completions", json={"prompt": [400]}).status_code == 400
        server.configure(admitting=False)
        assert client.post("/v1/completions", json=completion).status_code == 503
        assert client.post("/kunserve/drop", json={}).status_code == 200
        server.call(lambda: _add_what_few_clusters_have(server.engine))
        text = client.get("/metrics").text
    compare(TEXTS / "metrics.txt", list(_masked(text)), renew)


def _add_what_few_clusters_have(engine: EchoEngine) -> None:
    """Requests that run, stages that compute, and drops that would have been made."""
    state = engine.snapshot
    group_id = state.groups[0].group_id
    loads = (replace(state.loads[0], num_running=3, num_waiting=2, used_blocks=25),)
    done = LeaderTotals(7, 70, prompt_tokens=50, generation_tokens=9, steps=(2, *[1] * 13))
    first, second = state.instances
    engine.snapshot = replace(
        state,
        instances=(replace(first, totals=done), second),
        loads=loads,
        observed=ObservedDrops(3, 2, 4096, num_requests=9, num_merged=1, num_requests_now=4),
        stage_times=tuple(
            StageTime(InstanceId(stage), group_id, 2, 1.5, 2.0 if stage == 0 else None)
            for stage in range(2)
        ),
    )


def _masked(text: str) -> Iterator[str]:
    """Buckets of a histogram on one line, and values only where they are told."""
    bounds: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            yield line
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample is not None, line
        name, labels, value = sample["name"], sample["labels"] or "", sample["value"]
        if name == "python_info":
            labels, value = "<this Python>", "1"
        is_measured = MEASURED.search(name) is not None
        shown = "<measured>" if is_measured else value
        bound = BUCKET.search(labels)
        if bound is None:
            yield f"{name}{{{labels}}} {shown}" if labels else f"{name} {shown}"
            continue
        bounds.append(bound["bound"] if is_measured else f"{bound['bound']}:{value}")
        if bound["bound"] == "+Inf":
            yield f"{name}{{{BUCKET.sub('', labels)}}} {' '.join(bounds)}"
            bounds.clear()


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str | None, renew: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``kunserve COMMAND --help`` prints."""
    for name in [name for name in os.environ if name.startswith("KUNSERVE_")]:
        monkeypatch.delenv(name)
    words = ["--help"] if command is None else [command, "--help"]
    result = CliRunner().invoke(main, words, prog_name="kunserve", terminal_width=WIDTH)
    assert result.exit_code == 0, result.output
    path = TEXTS / f"help-{command or 'kunserve'}.txt"
    compare(path, [line.rstrip() for line in result.output.splitlines()], renew)


def test_no_text_without_a_test() -> None:
    helps = {f"help-{command or 'kunserve'}" for command in COMMANDS}
    assert {path.stem for path in TEXTS.iterdir()} == helps | {"metrics"}
