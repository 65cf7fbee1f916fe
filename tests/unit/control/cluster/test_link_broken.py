"""A word between two instances is lost or comes twice: their group forms anew, nobody dies."""

import pytest

from kunserve.core.ids import InstanceId
from kunserve.core.messages import LinkBroken
from kunserve.core.snapshots import Outcome
from tests.fake_cluster import FakeCluster

ZERO, ONE = InstanceId(0), InstanceId(1)


@pytest.mark.parametrize("harm", ["lose", "double"])
@pytest.mark.parametrize(("src", "dst"), [(ZERO, ONE), (ONE, ZERO)])
def test_a_pipeline_whose_link_is_broken_serves_on(
    harm: str, src: InstanceId, dst: InstanceId
) -> None:
    cluster = FakeCluster()
    for _ in range(4):
        cluster.request(6, 9)
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_until(lambda: len(cluster.groups()) == 1)
    cluster.run_until(lambda: bool(cluster.links.get((src, dst))))
    before = {i: member.agent for i, member in cluster.members.items()}
    getattr(cluster, harm)(src, dst)
    cluster.finish()
    assert {i: member.agent for i, member in cluster.members.items()} == before
    assert len(cluster.groups()) == 2
    assert cluster.controller.state(cluster.now_s).num_quarantined == 0


def test_words_lost_in_an_exchange_fail_it() -> None:
    cluster = FakeCluster()
    for _ in range(4):
        cluster.request(6, 9)
    cluster.run_until(lambda: all(a.token_ids for a in cluster.accounts.values()))
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_until(lambda: bool(cluster.links.get((ONE, ZERO))))
    cluster.lose(ONE, ZERO)
    cluster.finish()
    assert [str(record.outcome) for record in cluster.records] != []
    assert len(cluster.groups()) == 2


def test_what_comes_too_late_changes_nothing() -> None:
    """Of an instance that has died meanwhile, or a second word on what forms anew already."""
    cluster = FakeCluster()
    cluster.request(6, 9)
    broken = LinkBroken(ZERO, ONE, "lost")
    cluster.controller.on(ZERO, broken, cluster.now_s)
    cluster.carry_out()
    groups = cluster.groups()
    cluster.controller.on(ONE, LinkBroken(ONE, ZERO, "lost"), cluster.now_s)
    cluster.carry_out()
    assert cluster.groups() == groups
    cluster.kill_instance(ONE)
    groups = cluster.groups()
    cluster.controller.on(ZERO, broken, cluster.now_s)
    cluster.carry_out()
    assert cluster.groups() == groups
    cluster.finish()


@pytest.mark.parametrize("moment", range(0, 24, 2))
def test_a_first_contact_that_fails_costs_only_the_migration(moment: int) -> None:
    """Nobody forms anew, whoever has the request by then."""
    cluster = FakeCluster()
    cluster.request(9, 3)
    cluster.request(9, 12)
    cluster.run_until(lambda: all(a.token_ids for a in cluster.accounts.values()))
    before = {i: member.agent for i, member in cluster.members.items()}
    groups = cluster.groups()
    source, target = (cluster.controller.placement.with_member(i) for i in (ZERO, ONE))
    assert source is not None and target is not None
    cluster.migrate(source.layout.group_id, target.layout.group_id)
    begin = cluster.num_actions
    cluster.run_except(lambda action: False, lambda: cluster.num_actions >= begin + moment)
    cluster.controller.on(ONE, LinkBroken(ONE, ZERO, "no answer", is_down=True), cluster.now_s)
    cluster.carry_out()
    cluster.controller.check()
    assert cluster.controller.balance.partners(ZERO) == set()
    cluster.finish()
    assert {i: member.agent for i, member in cluster.members.items()} == before
    assert cluster.groups() == groups
    assert cluster.controller.state(cluster.now_s).num_rerun == 0


def test_a_first_contact_that_fails_costs_only_the_drop() -> None:
    """Nothing is committed, and the two have never spoken: nobody computes anything again."""
    cluster = FakeCluster()
    for _ in range(4):
        cluster.request(6, 9)
    cluster.run_until(lambda: all(a.token_ids for a in cluster.accounts.values()))
    before = {i: member.agent for i, member in cluster.members.items()}
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.controller.on(ZERO, LinkBroken(ZERO, ONE, "no answer", is_down=True), cluster.now_s)
    cluster.carry_out()
    cluster.finish()
    assert [record.outcome for record in cluster.records] == [Outcome.ROLLED_BACK]
    assert {i: member.agent for i, member in cluster.members.items()} == before
    assert cluster.controller.state(cluster.now_s).num_rerun == 0
