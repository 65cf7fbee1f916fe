"""Which instances share their weights, and what people are told of it."""

import logging
from dataclasses import replace

import pytest

from kunserve.core.config import MIB
from kunserve.core.ids import InstanceId
from kunserve.server.start import plan
from kunserve.server.start.plan import find_sharers, shared_weights_line
from kunserve_lab.world.fake_body import fake_spec
from tests.unit.server.start.test_flags import parsed

ONE_NODE = [frozenset(range(8))]
TWO_NODES = [frozenset(range(8)), frozenset(range(8, 16))]


def sharers(monkeypatch: pytest.MonkeyPatch, nodes: list[frozenset[int]], *flags: str) -> int:
    monkeypatch.setattr(plan, "numa_nodes", lambda: nodes)
    return find_sharers(parsed(*flags))


@pytest.mark.parametrize(
    ("nodes", "flags", "expected"),
    [
        (ONE_NODE, "--num-instances 2", 2),
        ([], "--num-instances 2", 2),
        (ONE_NODE, "--num-instances 1 --max-instances 3", 1),
        (ONE_NODE, "--num-instances 3 --tensor-parallel-size 2", 3),
        (TWO_NODES, "--num-instances 5", 2),
        (TWO_NODES, "--num-instances 2 --tensor-parallel-size 2", 2),
        (ONE_NODE, "--num-instances 2 --weights shared --overload-policy observe", 2),
        (ONE_NODE, "--num-instances 2 --weights private", 0),
    ],
)
def test_instances_of_a_node_share(
    nodes: list[frozenset[int]], flags: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sharers(monkeypatch, nodes, *flags.split()) == expected


@pytest.mark.parametrize(
    ("nodes", "flags", "why"),
    [
        (ONE_NODE, "--num-instances 1", "there is one instance"),
        (ONE_NODE, "--num-instances 2 --device cuda", "GPUs have memory of their own"),
        (ONE_NODE, "--num-instances 2 --cluster ray", "stand on several hosts"),
        (ONE_NODE, "--num-instances 2 --topology hosts.toml", "stand on several hosts"),
        (TWO_NODES, "--num-instances 2", "no two instances compute on one NUMA node alone"),
        (TWO_NODES, "--num-instances 4 --num-threads 9", "no two instances compute on one"),
        (ONE_NODE, "--num-instances 2 --overload-policy observe", "tells what drops of private"),
        (
            ONE_NODE,
            "--num-instances 2 --pipeline-parallel-size 2 --overload-policy recompute",
            "have one copy in all",
        ),
    ],
)
def test_where_they_cannot_the_start_says_why(
    nodes: list[frozenset[int]],
    flags: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert sharers(monkeypatch, nodes, *flags.split()) == 0
    assert "weights are private: " in caplog.text and why in caplog.text
    assert caplog.records[-1].levelno == logging.INFO


def test_who_asked_for_it_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert sharers(monkeypatch, ONE_NODE, "--num-instances", "1", "--weights", "shared") == 0
    assert caplog.records[-1].levelno == logging.WARNING


def test_the_line_tells_what_it_gives() -> None:
    spec = fake_spec(InstanceId(0), 4, 4 * 256, layer_bytes=16 * MIB)
    assert shared_weights_line([]) is shared_weights_line([spec]) is None
    kv_mib = spec.kv_units * spec.unit_bytes / MIB
    shared = replace(spec, shared_weights_bytes=257 * MIB, memory_bytes=343 * MIB)
    assert shared_weights_line([shared, shared]) == (
        f"weights 257 MiB once for 2 instances, KV {kv_mib:.0f} MiB each (private: 86)"
    )
