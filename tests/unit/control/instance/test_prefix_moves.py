"""Requests that share a beginning, when their group changes."""

import pytest

from kunserve.core.ids import InstanceId
from kunserve.core.messages import ResetPrefixCache
from kunserve_lab.world.actions import Action, CompletePull, StartStep
from tests.fake_cluster import FakeCluster, link

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
    blocks = {r: cluster.agent(0).state.table.num_blocks(r) for r in cluster.accounts}
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


def hit_tokens(cluster: FakeCluster) -> int:
    return sum(cluster.agent(i).state.totals.prefix_hit_tokens for i in (0, 1))


def cached_blocks(cluster: FakeCluster) -> list[int]:
    """Of each group."""
    members = [cluster.agent(i).membership for i in (0, 1)]
    schedulers = [one.scheduler for one in members if one is not None]
    return [one.cached_blocks for one in schedulers if one is not None]


def is_over(cluster: FakeCluster, number: int) -> bool:
    """Whether so many transitions have begun, and the last one's exchange is over."""
    return len(cluster.records) == number and cluster.records[-1].finished_s is not None


def test_a_reset_in_an_exchange_is_for_what_is_being_moved() -> None:
    """It is found no more at once, and goes when it has landed."""
    cluster = sharing(3)
    cluster.drop((0, 0, 3), (1, 3, 6))
    is_pull = lambda action: isinstance(action, CompletePull)  # noqa: E731
    cluster.run_except(is_pull)
    assert cluster.agent(0).is_exchanging
    for request_id in tuple(cluster.accounts):
        cluster.cancel(request_id)
    cluster.reset_prefix_cache()
    cluster.run_except(is_pull)
    assert cluster.agent(0).is_exchanging
    before = hit_tokens(cluster)
    for _ in range(2):
        cluster.request(COMMON + OWN, 4, num_common=COMMON)
    cluster.run_until(lambda: is_over(cluster, 1))
    cluster.run_until_idle()
    assert hit_tokens(cluster) - before == COMMON, "but the second finds what the first computes"
    assert cached_blocks(cluster) == [COMMON // BLOCK + 2], "with one of the own of each"
    cluster.finish()


def ask_again(cluster: FakeCluster) -> None:
    """Nothing is found but what is computed now."""
    assert not any(cached_blocks(cluster))
    before = hit_tokens(cluster)
    for _ in range(4):
        cluster.request(COMMON + OWN, 1, num_common=COMMON)
    cluster.run_until_idle()
    num_first = sum(num > 0 for num in cached_blocks(cluster))
    assert hit_tokens(cluster) - before == (4 - num_first) * COMMON
    cluster.finish()


def test_a_reset_between_two_groups_is_for_the_new_one() -> None:
    cluster = sharing(4)
    cluster.drop((0, 0, 3), (1, 3, 6))
    cluster.run_except(link(1, 0))
    assert cluster.agent(0)._moment().is_quiescing
    for request_id in tuple(cluster.accounts):
        cluster.cancel(request_id)
    for _ in range(3):
        cluster.reset_prefix_cache()
    cluster.run_except(link(1, 0))
    assert cluster.agent(0).inbox.waiting.count(ResetPrefixCache()) == 1
    cluster.run_until(lambda: is_over(cluster, 1))
    cluster.run_until_idle()
    ask_again(cluster)


@pytest.mark.parametrize("is_restore", [False, True])
def test_a_reset_reaches_leaders_that_the_controller_does_not_know_yet(is_restore: bool) -> None:
    cluster = sharing(4)
    cluster.drop((0, 0, 3), (1, 3, 6))
    if is_restore:
        cluster.run_until(lambda: is_over(cluster, 1))
        (group,) = cluster.groups()
        cluster.restore(group)

    def is_held(action: Action) -> bool:
        is_pull = isinstance(action, CompletePull) and cluster.agent(1).is_exchanging
        return is_pull or link(0, None)(action) or link(1, None)(action)

    cluster.run_until(lambda: all(cluster.agent(i).is_exchanging for i in (0, 1)))
    for request_id in tuple(cluster.accounts):
        cluster.cancel(request_id)
    cluster.run_except(is_held)
    cluster.reset_prefix_cache()
    cluster.run_except(is_held)
    cluster.run_until(lambda: is_over(cluster, 1 + is_restore))
    cluster.run_until_idle()
    ask_again(cluster)
