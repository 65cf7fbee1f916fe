"""Which processors a rank computes on."""

import os
from collections.abc import Set
from pathlib import Path

import pytest

from kunserve.engine.nodes import numa_nodes, place_ranks, stay_on_one, visiting

TWO = [frozenset({0, 1}), frozenset({2, 3})]


def sysfs(root: Path, **lists: str) -> Path:
    for name, text in lists.items():
        (root / name).mkdir()
        (root / name / "cpulist").write_text(text + "\n")
    return root


def test_nodes_have_the_processors_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    root = sysfs(tmp_path, node0="0-2,12", node10="9", node2="4,6-7", node3="", node4="20-23")
    (root / "node5").mkdir()
    (root / "possible").write_text("0-10")
    expected = [{0, 1, 2}, {4, 6, 7}, {9}]
    assert numa_nodes(root) == [frozenset(cpus) for cpus in expected]
    assert numa_nodes(tmp_path / "nowhere") == []


def test_ranks_are_spread_over_nodes() -> None:
    assert place_ranks(0, 2, TWO) == TWO
    assert place_ranks(1, 4, TWO) == [TWO[0], TWO[0], TWO[1], TWO[1]]
    four = [frozenset({number}) for number in range(4)]
    assert place_ranks(0, 2, four) == four[:2]
    assert place_ranks(1, 2, four) == four[2:], "the next instance takes the next nodes"
    assert place_ranks(2, 2, four) == four[:2]


@pytest.mark.parametrize("nodes", [[], TWO[:1]])
def test_nobody_is_pinned_where_there_is_one_node(nodes: list[frozenset[int]]) -> None:
    assert place_ranks(3, 2, nodes) == [None, None]


def test_a_visit_ends() -> None:
    before = os.sched_getaffinity(0)
    with visiting(frozenset({min(before)})):
        assert os.sched_getaffinity(0) == {min(before)}
    with visiting(None):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


def test_instances_of_one_rank_take_the_nodes_in_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stays: list[Set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: stays.append(cpus))
    for instance in range(3):
        stay_on_one(instance, 2, TWO)
    assert stays == [TWO[0], TWO[1], TWO[0]]
    assert not caplog.messages
    stay_on_one(0, 3, TWO)
    assert "--tensor-parallel-size" in caplog.text
    stay_on_one(0, 1, TWO[:1])
    assert len(stays) == 3, "more threads than a node has processors, and a machine of one node"
