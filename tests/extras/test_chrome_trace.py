"""The Chrome trace: parts of instances, joined with the transitions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kunserve.control.instance.body import StepWork
from kunserve.core.errors import ConfigError
from kunserve.core.ids import GroupId, InstanceId, RequestId, StepId, TransitionId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import Activation
from kunserve.core.snapshots import Kind, Outcome, TransitionRecord
from kunserve.core.step import Chunk, StepPlan
from kunserve.core.transfer import KvPull
from kunserve_extras.chrome_trace import InstanceTrace, begin_trace, join_trace, part_path
from tests.chrome_trace import check_trace

A, B = InstanceId(0), InstanceId(1)
R = RequestId("r")
PLAN = StepPlan(GroupId(2), StepId(7), (), (), (Chunk(R, 0, 30, False), Chunk(R, 9, 1, True)))
NOTHING = np.zeros(0, dtype=np.int32)


def work(is_first: bool) -> StepWork:
    layers = LayerRange(0, 2) if is_first else LayerRange(2, 4)
    tables = NOTHING.reshape(0, 0)
    return StepWork(PLAN, layers, is_first, not is_first, None, tables, NOTHING)


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_a_microbatch_is_seen_on_both_stages_with_an_arrow(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    begin_trace(path, [A, B])
    first, second = InstanceTrace(str(path), A), InstanceTrace(str(path), B)
    first.computed(work(True), 1.0, 1.5, 0.4)
    first.sent(B, Activation(PLAN), 100, 1.5)
    second.computed(work(False), 1.6, 2.0, 0.3)
    second.pulled(KvPull(TransitionId(1), R, A, LayerRange(0, 2), 0, 3), True, 2.5)
    for trace in (first, second):
        trace.flush()
        trace.close()
    join_trace(path, [A, B], [_record()])
    events = check_trace(path)
    spans = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert [(e["pid"], e["ts"], e["dur"]) for e in spans] == [(0, 1e6, 0.5e6), (1, 1.6e6, 0.4e6)]
    assert spans[0]["args"]["decodes"] == 1 and spans[0]["args"]["prompt_tokens"] == 30
    sums = {name: spans[0]["args"][name] for name in ("context", "pairs", "chunks", "samples")}
    assert sums == {"context": 9, "pairs": 465 + 10, "chunks": 2, "samples": 1}
    arrows = [(e["ph"], e["id"]) for e in events if e["ph"] in "sf"]
    assert arrows == [("s", "2.7"), ("f", "2.7")]
    instants = {e["name"] for e in events if e["ph"] == "i"}
    assert instants == {"activations to 1", "KV from 0"}
    transitions = [e for e in events if e["name"] == "drop 1: done"]
    assert [e["pid"] for e in transitions] == [0, 1] and transitions[0]["dur"] == 2e6
    assert not part_path(path, A).exists()


def test_a_part_that_was_cut_off_loses_its_end_only(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    begin_trace(path, [A])
    trace = InstanceTrace(str(path), A)
    trace.computed(work(True), 1.0, 1.5, 0.4)
    trace.close()
    with part_path(path, A).open("ab") as file:
        file.write(b'{"ph":"X","na')
    join_trace(path, [A, B], [])
    assert any(e["ph"] == "X" for e in events_of(path))


def test_leftovers_of_a_killed_run_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    part_path(path, A).write_text("old")
    begin_trace(path, [A])
    assert not part_path(path, A).exists()


def test_an_unwritable_place_is_told_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the trace"):
        begin_trace(tmp_path / "no" / "t.json", [A])


def _record() -> TransitionRecord:
    before = tuple(GroupLayout(GroupId(i), (Stage(i, LayerRange(0, 4)),)) for i in (A, B))
    return TransitionRecord(
        TransitionId(1),
        Kind.DROP,
        "why",
        1.0,
        before,
        (),
        committed_s=1.5,
        finished_s=3.0,
        outcome=Outcome.DONE,
    )
