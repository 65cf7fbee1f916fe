"""Requests that share a beginning, when their group changes."""

import pytest

from kunserve.cluster.in_process import StartStep
from kunserve.core.ids import InstanceId
from tests.fake_cluster import FakeCluster

COMMON, OWN, OUTPUT = 16, 3, 12
BLOCK = 4


def sharing(num: int) -> FakeCluster:
    """So many requests on instance 0, all behind one beginning; they decode."""
    cluster = FakeCluster(6, (60, 60), BLOCK, layer_units=120, max_num_seqs=16)
    cluster.kill_instance(InstanceId(1))
    cluster.request(COMMON + OWN, 30, num_common=COMMON)
    cluster.run_until(lambda: all(a.token_ids for a in cluster.accounts.values()))
    for _ in range(num - 1):
        cluster.request(COMMON + OWN, 30, num_common=COMMON)
    cluster.run_until(lambda: all(len(a.token_ids) >= 2 for a in cluster.accounts.values()))
    cluster.start_instance(InstanceId(1))
    is_step = lambda action: isinstance(action, StartStep)  # noqa: E731
    cluster.run_except(is_step, lambda: cluster.agent(1).membership is not None)
    return cluster


@pytest.mark.parametrize("num", [2, 8])
def test_a_shared_beginning_moves_once_and_nobody_is_preempted(num: int) -> None:
    cluster = sharing(num)
    blocks = {r: cluster.agent(0).table.num_blocks(r) for r in cluster.accounts}
    cluster.drop((0, 0, 3), (1, 3, 6))
    cluster.run_until(lambda: bool(cluster.records) and cluster.records[-1].finished_s is not None)
    common = COMMON // BLOCK
    own = sum(count - common for count in blocks.values())
    unit_bytes = cluster.agent(0).state.spec.unit_bytes
    assert cluster.records[-1].requests_moved == num
    assert cluster.records[-1].moved_bytes <= 3 * (common + own + num) * unit_bytes
    assert cluster.num_preemptions == 0
    cluster.finish()


def test_a_group_that_parts_gives_everybody_the_beginning() -> None:
    cluster = sharing(6)
    cluster.drop((0, 0, 3), (1, 3, 6))
    cluster.run_until(lambda: bool(cluster.records) and cluster.records[-1].finished_s is not None)
    (group,) = cluster.groups()
    cluster.restore(group)
    cluster.run_until(lambda: len(cluster.records) == 2)
    cluster.run_until(lambda: cluster.records[-1].finished_s is not None)
    leaders = [cluster.agent(i).membership for i in (0, 1)]
    assert all(one is not None and len(one.layout.stages) == 1 for one in leaders)
    assert cluster.num_preemptions == 0
    cluster.finish()


def test_who_comes_in_the_exchange_shares_what_has_arrived() -> None:
    cluster = sharing(3)
    cluster.drop((0, 0, 3), (1, 3, 6))
    cluster.run_until(lambda: bool(cluster.records) and cluster.records[-1].finished_s is not None)
    late = cluster.request(COMMON + OWN, 4, num_common=COMMON)
    cluster.run_until(lambda: cluster.accounts[late].end is not None)
    totals = [cluster.agent(i).state.totals for i in (0, 1)]
    hits = sum(total.prefix_hit_tokens for total in totals)
    assert hits >= (2 + 1) * COMMON
    cluster.finish()
