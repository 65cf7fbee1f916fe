"""Drops, exchanges and restores over fake instances: memory really moves, tokens do not change."""

import pytest

from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import Returned, ReturnWaiting
from kunserve.core.request import SamplingParams
from kunserve_lab.world.actions import Action, CompletePull, FinishStep, StartStep
from tests.fake_cluster import FakeCluster


def busy(cluster: FakeCluster, count: int = 8, steps: int = 60) -> None:
    """Several requests of different lengths, well under way."""
    for number in range(count):
        sampling = SamplingParams(
            max_tokens=6 + number % 3,
            temperature=float(number % 2),
            seed=number,
            frequency_penalty=1.0 if number % 4 == 3 else 0.0,
        )
        cluster.request(3 + number % 5, sampling=sampling)
    for _ in range(steps):
        actions = cluster.actions()
        if actions:
            cluster.perform(actions[cluster.num_actions % len(actions)])
            cluster.check()


def outcomes(cluster: FakeCluster) -> list[str]:
    return [record.ending for record in cluster.records]


def test_one_instance_alone() -> None:
    cluster = FakeCluster(pools=(12,))
    busy(cluster)
    cluster.finish()


def test_preemption_in_tight_memory_keeps_tokens() -> None:
    cluster = FakeCluster(pools=(8,))
    for _ in range(6):
        cluster.request(6, 9)
    cluster.finish()
    assert cluster.num_preemptions > 0


@pytest.mark.parametrize("num_layers", [4, 5, 9])
def test_two_become_a_pipeline(num_layers: int) -> None:
    cluster = FakeCluster(num_layers)
    busy(cluster)
    cut = num_layers // 2
    cluster.drop((0, 0, cut), (1, cut, num_layers))
    cluster.finish()
    assert outcomes(cluster) == ["done"]
    record = cluster.records[0]
    assert record.requests_moved > 0 and record.moved_bytes > 0 and record.freed_bytes > 0
    busy(cluster)
    cluster.finish()


def test_a_drop_moves_memory_and_capacity_is_the_minimum_over_stages() -> None:
    cluster = FakeCluster(6, pools=(12, 9), layer_units=30)
    before = {i: member.body.kv_units for i, member in cluster.members.items()}
    cluster.drop((0, 0, 4), (1, 4, 6))
    cluster.finish()
    for instance_id, dropped in ((InstanceId(0), 2), (InstanceId(1), 4)):
        member = cluster.members[instance_id]
        assert member.body.kv_units == before[instance_id] + dropped * 30
        assert member.agent.state.table.num_units == member.body.kv_units
        assert member.body.held.num_layers == 6 - dropped
    scheduler = cluster.agent(0).membership.scheduler
    assert scheduler is not None
    # One granule less for sure than what was freed: that is what is promised.
    assert scheduler.load(0, 0, 0.0).capacity_blocks == min(
        (12 * 6 + 2 * 30 - 1) // 4, (9 * 6 + 4 * 30 - 1) // 2
    )
    record = cluster.records[0]
    assert record.freed_bytes == (2 + 4) * 30 * cluster.members[InstanceId(0)].body.spec.unit_bytes


LEVELS = {
    "1+1": [[(0, 0, 3), (1, 3, 8)]],
    "1+1, 2+1": [[(0, 0, 4), (1, 4, 8)], [(0, 0, 3), (2, 3, 5), (1, 5, 8)]],
    "1+1+1": [[(1, 0, 2), (0, 2, 5), (2, 5, 8)]],
    "1+1, 1+1, 2+2": [
        [(0, 0, 4), (1, 4, 8)],
        [(2, 0, 4), (3, 4, 8)],
        [(0, 0, 2), (2, 2, 4), (1, 4, 6), (3, 6, 8)],
    ],
    "1+1+1+1": [[(0, 0, 2), (1, 2, 4), (2, 4, 6), (3, 6, 8)]],
}


@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS.keys())
def test_levels_of_drops_and_the_way_back(levels: list[list[tuple[int, int, int]]]) -> None:
    cluster = FakeCluster(8, pools=(16, 16, 16, 16), layer_units=60)
    for stages in levels:
        busy(cluster, 10)
        cluster.drop(*stages)
        cluster.run_until_idle()
    assert outcomes(cluster) == ["done"] * len(levels)
    busy(cluster, 4, steps=60)
    (group,) = (group for group in cluster.groups() if len(group.stages) > 1)
    scheduler = cluster.agent(group.leader).membership.scheduler
    assert scheduler is not None
    cluster.run_until(lambda: scheduler.used_blocks < 10)
    cluster.restore(group)
    cluster.finish()
    assert outcomes(cluster)[-1] == "done"
    for member in cluster.members.values():
        assert member.body.held == LayerRange(0, 8)
        assert member.body.kv_units == member.agent.state.table.num_units == 16 * 8


def test_two_pairs_at_once() -> None:
    cluster = FakeCluster(pools=(12, 12, 12, 12))
    busy(cluster, 12)
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.drop((2, 0, 2), (3, 2, 4))
    cluster.finish()
    assert outcomes(cluster) == ["done", "done"]


def is_pull(action: Action) -> bool:
    return isinstance(action, CompletePull)


def fill(cluster: FakeCluster, free_units: int, count: int = 12) -> None:
    """Long requests until every instance has at most so much KV memory left."""
    for _ in range(count):
        cluster.request(3, 9)

    def is_full(instance_id: InstanceId) -> bool:
        return cluster.agent(instance_id).state.table.free_units <= free_units

    # Who is full waits for the others.
    cluster.run_except(
        lambda action: isinstance(action, StartStep) and is_full(action.instance_id),
        lambda: all(map(is_full, cluster.members)),
    )
    assert all(map(is_full, cluster.members))


def test_new_requests_run_in_freed_memory_while_kv_is_exchanged() -> None:
    cluster = FakeCluster(
        pools=(12, 12), layer_units=60, block_size=1, max_num_seqs=16, caches=False
    )
    fill(cluster, 20, count=4)
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_except(is_pull)
    assert any(member.mover.pulls for member in cluster.members.values())
    late = cluster.request(3, 2)
    cluster.run_except(is_pull)
    assert cluster.accounts[late].end is not None
    assert cluster.unfinished
    cluster.finish()


def test_decodes_spread_over_microbatches() -> None:
    cluster = FakeCluster(pools=(40, 40), max_num_batched_tokens=64)
    for _ in range(8):
        cluster.request(2, 60)
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_until(lambda: bool(cluster.records))
    cluster.run_except(lambda action: False, lambda: cluster.num_actions >= 206)
    sizes = set()
    for _ in range(60):
        cluster.perform(cluster.actions()[0])
        work = cluster.members[InstanceId(1)].work
        if work is not None:
            sizes.add(len(work.step.plan.chunks))
    assert len(cluster.unfinished) == 8
    assert sizes == {4}
    cluster.finish()


def test_a_drop_that_frees_too_little_is_refused() -> None:
    cluster = FakeCluster(pools=(30, 30), layer_units=2)
    busy(cluster)
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.finish()
    assert "too few" in outcomes(cluster)[0]
    assert len(cluster.groups()) == 2


def test_memory_exactly_full_on_both_sides() -> None:
    cluster = FakeCluster(
        pools=(12, 12), block_size=1, max_num_seqs=16, max_num_batched_tokens=64, caches=False
    )
    fill(cluster, 0)
    cluster.drop((0, 0, 2), (1, 2, 4))
    leaders = [cluster.agent(0), cluster.agent(1)]
    cluster.run_except(
        lambda action: isinstance(action, StartStep),
        lambda: all(agent.membership.layout.group_id == 2 for agent in leaders),
    )
    cluster.finish()
    assert outcomes(cluster) == ["done"]
    assert cluster.records[0].requests_moved >= 4
    assert cluster.records[0].moved_bytes == 2 * 12 * 2 * 8


def test_a_leader_returns_what_waits() -> None:
    cluster = FakeCluster(pools=(24,), max_num_seqs=1)
    names = [cluster.request(3, 4) for _ in range(3)]
    cluster.run_except(lambda action: isinstance(action, FinishStep))  # the first one runs
    agent = cluster.agent(0)
    agent.on(ReturnWaiting(tuple(names)), cluster.now_s)
    (answer,) = [out.message for out in agent.outbox if isinstance(out.message, Returned)]
    agent.outbox.clear()
    assert answer == Returned(InstanceId(0), tuple(names[1:]))
    cluster.controller.on(InstanceId(0), answer, cluster.now_s)
    cluster.carry_out()
    cluster.finish()


def test_an_abort_may_cross_the_return_of_its_request() -> None:
    cluster = FakeCluster(pools=(24,), max_num_seqs=1)
    names = [cluster.request(3, 4) for _ in range(2)]
    cluster.run_except(lambda action: isinstance(action, FinishStep))  # the first one runs
    cluster.post(None, InstanceId(0), ReturnWaiting((names[1],)))
    cluster.cancel(names[1])
    cluster.finish()
