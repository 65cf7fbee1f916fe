"""Requests that share beginnings, through drops, restores, lost KV and preemptions.

Denser than `test_transitions`: nearly everybody shares something when groups change.
"""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.plan import SwapPlan
from kunserve_lab.world.actions import CompletePull
from tests.examples import examples
from tests.fake_cluster import FakeCluster


def act(cluster: FakeCluster, draw: random.Random, count: int, fail_share: float) -> None:
    """Let some of what can happen happen, in any order."""
    for _ in range(count):
        actions = cluster.actions()
        if not actions:
            return
        action = draw.choice(actions)
        if isinstance(action, CompletePull) and draw.random() < fail_share:
            action = CompletePull(action.instance_id, action.index, fails=True)
        cluster.perform(action)
        cluster.check()


@settings(max_examples=examples(16))
@given(
    seed=st.integers(0, 2**32),
    num_instances=st.integers(2, 3),
    block_size=st.sampled_from([2, 4]),
    pool=st.sampled_from([16, 24, 40]),
    num_common=st.sampled_from([4, 9, 16]),
    num_requests=st.integers(2, 9),
    fail_share=st.sampled_from([0.0, 0.0, 0.1]),
    swap=st.sampled_from([None, None, SwapPlan(1e7), SwapPlan(1e7, max_park_s=0.5)]),
)
def test_every_request_has_its_own_tokens(
    seed: int,
    num_instances: int,
    block_size: int,
    pool: int,
    num_common: int,
    num_requests: int,
    fail_share: float,
    swap: SwapPlan | None,
) -> None:
    draw = random.Random(seed)
    cluster = FakeCluster(
        6, [pool] * num_instances, block_size, layer_units=60, max_num_seqs=6, swap=swap
    )
    for kind in ("drop", "restore", "drop", "end"):
        for _ in range(num_requests):
            num_prompt = num_common + draw.randrange(1, 6)
            num_prompt = min(num_prompt, cluster.max_model_len - 20)
            cluster.request(
                num_prompt, draw.randrange(4, 20), num_common=draw.choice([0, num_common])
            )
            act(cluster, draw, draw.randrange(15), fail_share)
        if kind == "drop" and len(cluster.groups()) > 1:
            cuts = [0, *sorted(draw.sample(range(1, 6), num_instances - 1)), 6]
            cluster.drop(*((i, cuts[i], cuts[i + 1]) for i in range(num_instances)))
        elif kind == "restore":
            merged = [group for group in cluster.groups() if len(group.stages) > 1]
            if merged:
                cluster.restore(merged[0], None)
        act(cluster, draw, draw.randrange(120), fail_share)
    cluster.finish()
