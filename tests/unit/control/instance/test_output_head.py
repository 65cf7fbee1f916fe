"""Stages of a pipeline that compute the output head together."""

import pytest

from kunserve.control.instance.body import HeadWork, SampleWork, StepWork
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import FinalRows, HeadPart
from kunserve.core.request import SamplingParams
from kunserve.transport.wire.codec import decode
from kunserve_lab.world.actions import Delivery, FinishStep, StartStep
from tests.fake_cluster import FakeCluster


def pair(**settings: object) -> FakeCluster:
    cluster = FakeCluster(head_cost_layers=2.0, **settings)  # type: ignore[arg-type]
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.run_until_idle()
    return cluster


def is_about(cluster: FakeCluster, action: object, kind: type) -> bool:
    """Whether the action delivers a message of this kind."""
    if not isinstance(action, Delivery):
        return False
    return isinstance(decode(cluster.links[action.src, action.dst][0].data), kind)


def sampled(cluster: FakeCluster, count: int) -> list[RequestId]:
    penalty = SamplingParams(max_tokens=8, temperature=1.0, seed=3, presence_penalty=1.0)
    plain = SamplingParams(max_tokens=8, temperature=0.0, num_prompt_logprobs=1)
    return [cluster.request(5, sampling=(penalty, plain)[i % 2]) for i in range(count)]


def test_both_stages_compute_parts_and_the_leader_samples() -> None:
    cluster = pair()
    sampled(cluster, 4)
    kinds: dict[InstanceId, set[type]] = {member: set() for member in cluster.members}
    while cluster.unfinished:
        for action in cluster.actions():
            if action in cluster.actions():
                cluster.perform(action)
            for name, member in cluster.members.items():
                if member.work is not None:
                    kinds[name].add(type(member.work.step))
    assert {HeadWork, SampleWork} <= kinds[InstanceId(0)]
    assert HeadWork in kinds[InstanceId(1)] and SampleWork not in kinds[InstanceId(1)]
    cluster.finish()


def test_four_stages_of_uneven_length() -> None:
    cluster = FakeCluster(7, (12, 12, 12, 12), head_cost_layers=1.0)
    cluster.drop((0, 0, 3), (1, 3, 5), (2, 5, 6), (3, 6, 7))
    sampled(cluster, 8)
    cluster.finish()


@pytest.mark.parametrize("late", [FinalRows, HeadPart])
def test_parts_and_rows_come_in_any_order(late: type) -> None:
    cluster = FakeCluster(6, (12, 12, 12), head_cost_layers=4.0)
    cluster.drop((0, 0, 2), (1, 2, 4), (2, 4, 6))
    cluster.run_until_idle()
    sampled(cluster, 6)
    for _ in range(40):
        cluster.run_except(
            lambda action: is_about(cluster, action, late) and action.dst == 0  # type: ignore[union-attr]
        )
        for action in cluster.actions():
            if is_about(cluster, action, late):
                cluster.perform(action)
                break
    cluster.finish()


def test_a_request_aborted_before_its_token_is_sampled_leaves_nothing() -> None:
    """Its blocks and what the body knows of it are gone when the last part comes."""
    cluster = pair()
    names = sampled(cluster, 4)
    cluster.run_except(lambda action: is_about(cluster, action, HeadPart))
    for name in names[:2]:
        cluster.cancel(name)
    cluster.run_except(lambda action: is_about(cluster, action, HeadPart))
    cluster.finish()


def test_a_preempted_request_starts_anew_while_its_old_token_is_on_its_way() -> None:
    cluster = pair(pools=(14, 14), block_size=1, layer_units=1, max_num_seqs=6)
    sampled(cluster, 6)
    rounds = 0
    while cluster.unfinished and rounds < 300:
        rounds += 1
        cluster.run_except(lambda action: is_about(cluster, action, HeadPart))
        for action in cluster.actions():
            if is_about(cluster, action, HeadPart):
                cluster.perform(action)
                break
    assert cluster.num_preemptions > 0
    cluster.finish()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", [FinalRows, HeadPart])
def test_a_stage_dies_while_the_head_is_computed(victim: int, kind: type) -> None:
    cluster = pair()
    sampled(cluster, 4)
    cluster.run_except(lambda action: is_about(cluster, action, kind))
    cluster.kill_instance(InstanceId(victim))
    cluster.start_instance(InstanceId(victim))
    cluster.finish()


def test_a_restore_waits_for_the_head() -> None:
    cluster = pair()
    sampled(cluster, 4)
    blocked = (StartStep(InstanceId(1)), FinishStep(InstanceId(1)))
    cluster.run_except(lambda action: is_about(cluster, action, HeadPart) or action in blocked)
    cluster.restore(cluster.groups()[0])
    cluster.finish()
    assert len(cluster.groups()) == 2


def test_results_come_in_the_order_of_their_microbatches() -> None:
    """One of which nothing is sampled passes the one before it, whose head is under way."""
    cluster = pair(pools=(40, 40), max_num_batched_tokens=4, max_model_len=60)
    cluster.request(3, max_tokens=20)
    cluster.run_except(
        lambda action: False, lambda: cluster.agent(0).state.totals.generation_tokens > 1
    )
    scored = SamplingParams(max_tokens=2, temperature=0.0, num_prompt_logprobs=1)
    cluster.request(40, sampling=scored)

    def is_head_work(action: object) -> bool:
        """The leader's part of the head takes as long as it can."""
        work = cluster.members[InstanceId(0)].work
        is_it = work is not None and not isinstance(work.step, StepWork)
        return is_it and action == FinishStep(InstanceId(0))

    while cluster.unfinished:
        cluster.run_except(is_head_work)
        if is_head_work(FinishStep(InstanceId(0))):
            cluster.perform(FinishStep(InstanceId(0)))
    cluster.finish()
