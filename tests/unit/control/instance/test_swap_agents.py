"""Swapping through agents and bodies of real bytes: every token as if nobody had been moved."""

import pytest

from kunserve.core.ids import InstanceId
from kunserve.core.plan import SwapPlan
from kunserve_lab.world.actions import StartStep
from tests.fake_cluster import FakeCluster

FAST, SLOW = SwapPlan(1e7), SwapPlan(2e5)
"""Everything within a step, and a block or two."""


def totals(cluster: FakeCluster) -> tuple[int, int]:
    """Preemptions and lost tokens so far."""
    each = [member.agent.state.totals for member in cluster.members.values()]
    return sum(t.num_preemptions for t in each), sum(t.lost_tokens for t in each)


def host_bytes(cluster: FakeCluster) -> int:
    return sum(member.body.host.num_bytes for member in cluster.members.values())


def load_up(cluster: FakeCluster, num_requests: int = 6) -> None:
    """Prompts that fit together and outputs that do not."""
    for _ in range(num_requests):
        cluster.request(5, 14)


@pytest.mark.parametrize("swap", [FAST, SLOW])
def test_one_instance_swaps_and_loses_nothing(swap: SwapPlan) -> None:
    cluster = FakeCluster(pools=(14,), swap=swap)
    load_up(cluster)
    cluster.run_until(lambda: host_bytes(cluster) > 0)
    cluster.finish()
    num_preemptions, lost_tokens = totals(cluster)
    assert num_preemptions > 0 and lost_tokens == 0


@pytest.mark.parametrize("swap", [FAST, SLOW])
def test_every_stage_of_a_pipeline_swaps_its_layers(swap: SwapPlan) -> None:
    cluster = FakeCluster(pools=(12, 12), swap=swap, layer_units=4)
    cluster.drop((0, 0, 3), (1, 3, 4))
    cluster.run_until(lambda: len(cluster.records) == 1)
    load_up(cluster, 12)
    bodies = [member.body for member in cluster.members.values()]
    cluster.run_until(lambda: all(body.host.num_bytes > 0 for body in bodies))
    cluster.finish()
    assert totals(cluster)[1] == 0


def test_a_drop_computes_again_what_was_swapped() -> None:
    cluster = FakeCluster(pools=(14, 14), swap=SLOW)
    load_up(cluster, 12)
    cluster.run_until(lambda: host_bytes(cluster) > 0)
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_until(lambda: len(cluster.records) == 1)
    assert totals(cluster)[1] > 0
    cluster.finish()


def test_a_drop_between_a_plan_that_swaps_and_the_next() -> None:
    """What the last plan copied out is nothing to the new group, where the request starts anew."""
    cluster = FakeCluster(pools=(14, 14), swap=SLOW)
    load_up(cluster, 12)
    agent = cluster.agent(0)
    cluster.run_until(lambda: bool(agent.membership.swapped_out))
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_except(lambda action: action == StartStep(InstanceId(0)))
    assert len(agent.membership.layout.stages) == 2
    cluster.finish()


def test_host_memory_is_never_more_than_promised() -> None:
    cluster = FakeCluster(pools=(14,), swap=SwapPlan(1e7, host_bytes=6 * 4 * 16))
    load_up(cluster, 10)
    seen: list[int] = []

    def watch() -> bool:
        seen.append(host_bytes(cluster))
        return not cluster.unfinished

    cluster.run_until(watch)
    assert 0 < max(seen) <= 6 * 4 * 16
    assert totals(cluster)[1] > 0, "what did not fit was computed again"
    cluster.finish()
