"""At a commit tokens go to whoever leads a request from now on, sizes to everybody."""

from typing import Any

import pytest

from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Handover, Returned
from kunserve.core.plan import SwapPlan
from tests.fake_cluster import FakeCluster

Sent = list[tuple[InstanceId | None, Any]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Every message that an instance sends, with its addressee."""
    messages: Sent = []
    send = InstanceState.send

    def noting(
        self: InstanceState, dst: InstanceId | None, message: Any, hidden: Any = None
    ) -> None:
        messages.append((dst, message))
        send(self, dst, message, hidden)

    monkeypatch.setattr(InstanceState, "send", noting)
    return messages


def tokens_to(sent: Sent) -> dict[int, set[RequestId]]:
    """Requests whose tokens each instance was handed."""
    found: dict[int, set[RequestId]] = {}
    for dst, message in sent:
        if dst is not None and isinstance(message, Handover):
            names = {one.request.request_id for one in message.sequences}
            found.setdefault(int(dst), set()).update(names)
    return found


def kv_to(sent: Sent, instance: int) -> set[RequestId]:
    """Requests of whose KV an instance was told."""
    handovers = [
        message for dst, message in sent if isinstance(message, Handover) and dst == instance
    ]
    return {one.request_id for message in handovers for one in message.kv}


def led_by(cluster: FakeCluster, leader: int) -> set[RequestId]:
    scheduler = cluster.agent(leader).membership.scheduler
    return {r for r in cluster.accounts if scheduler.migration.knows(r)}


def test_at_a_drop_only_the_new_leader_gets_tokens(sent: Sent) -> None:
    cluster = FakeCluster(pools=(12, 12, 12), num_layers=6)
    for _ in range(6):
        cluster.request(5, 8)
    cluster.run_until(lambda: all(cluster.agent(i).num_in_flight for i in range(3)))
    cluster.drop((0, 0, 2), (1, 2, 4), (2, 4, 6))
    cluster.run_until(lambda: bool(cluster.records))
    handed = kv_to(sent, 0)
    assert len(handed) > 2
    assert tokens_to(sent) == {0: handed, 1: set(), 2: set()}
    assert kv_to(sent, 1), "sizes of the others' requests"
    cluster.finish()


def test_at_a_restore_each_gets_the_tokens_of_its_own(sent: Sent) -> None:
    cluster = FakeCluster(pools=(24, 24))
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_until(lambda: len(cluster.records) == 1)
    for _ in range(6):
        cluster.request(5, 16)
    cluster.run_until(lambda: len(led_by(cluster, 0)) == 6)
    cluster.run_until(lambda: cluster.agent(0).membership.scheduler.used_blocks >= 18)
    sent.clear()
    cluster.restore(cluster.groups()[0])
    cluster.run_until(lambda: len(cluster.records) == 2)
    handed = tokens_to(sent)[1]
    assert handed and handed < set(cluster.accounts)
    assert handed.isdisjoint(led_by(cluster, 0))
    cluster.finish()


def test_what_is_swapped_goes_back_to_the_controller(sent: Sent) -> None:
    cluster = FakeCluster(pools=(14, 14), swap=SwapPlan(2e5))
    for _ in range(12):
        cluster.request(5, 14)
    members = [cluster.members[InstanceId(i)] for i in range(2)]
    cluster.run_until(lambda: any(member.body.host.num_bytes for member in members))
    sent.clear()
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_until(lambda: len(cluster.records) == 1)
    handovers = [message for _, message in sent if isinstance(message, Handover)]
    assert all(one.num_blocks for message in handovers for one in message.kv)
    returned = [
        r for _, message in sent if isinstance(message, Returned) for r in message.request_ids
    ]
    assert any(cluster.accounts[request_id].token_ids for request_id in returned)
    cluster.finish()
