"""Instances leave under load, at any moment: every request gets its own tokens, and nothing stays.

Who leaves gives its requests away while others arrive, are cancelled and die with their instance.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.config import ServerConfig, SpeculativeConfig
from kunserve.core.messages import Alive
from kunserve.core.plan import SwapPlan
from kunserve_lab.world.actions import CompletePull, Delivery
from tests.examples import examples
from tests.fake_cluster import FakeCluster


def run_a_little(cluster: FakeCluster, draw: random.Random) -> None:
    """Some of what may happen does, in any order; a pull may fail."""
    for _ in range(draw.randint(1, 30)):
        actions = cluster.actions()
        if not actions:
            return
        action = draw.choice(actions)
        if isinstance(action, CompletePull) and draw.random() < 0.1:
            action = CompletePull(action.instance_id, action.index, fails=True)
        cluster.perform(action)
        cluster.check_after(action)


@pytest.mark.dear
@settings(max_examples=examples(30))
@given(
    pools=st.lists(st.sampled_from([30, 60, 100]), min_size=2, max_size=4),
    block_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.sampled_from([4, 16]),
    swap=st.sampled_from([None, SwapPlan(1e7), SwapPlan(1e7, 500)]),
    seed=st.integers(0, 2**16),
    sizes=st.lists(st.sampled_from([1, 1, 2, 3]), min_size=2, max_size=4),
    has_deaths=st.booleans(),
    guesses=st.booleans(),
)
def test_tokens_are_equal_and_blocks_are_freed_when_instances_leave(
    pools: list[int],
    block_size: int,
    max_num_seqs: int,
    swap: SwapPlan | None,
    seed: int,
    sizes: list[int],
    has_deaths: bool,
    guesses: bool,
) -> None:
    draw = random.Random(seed)
    cluster = FakeCluster(
        pools=pools,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        swap=swap,
        speculative=SpeculativeConfig() if guesses else None,
        vocab_size=4 if guesses else 1000,
    )
    for size in sizes:
        for _ in range(draw.randint(2, 9)):
            num_prompt = draw.randint(1, min(14, cluster.max_model_len // 2))
            most_tokens = min(60, cluster.max_model_len - num_prompt)
            cluster.request(num_prompt, most_tokens, num_common=draw.choice([0, 8]))
        for _ in range(3):
            run_a_little(cluster, draw)
        cluster.pass_time(0.1)
        if draw.random() < 0.5:
            cluster.resize(min(size, len(cluster.controller.placement.specs)))
        elif cluster.members:
            leaver = draw.choice(sorted(cluster.members))
            cluster.hear(leaver, Alive(leaver, wants_to_leave=True))
        for _ in range(draw.randint(1, 20)):
            run_a_little(cluster, draw)
            cluster.pass_time(0.1)
        if draw.random() < 0.3 and cluster.unfinished:
            cluster.cancel(draw.choice(cluster.unfinished))
        if has_deaths and draw.random() < 0.5 and len(cluster.members) > 1:
            cluster.kill_instance(draw.choice(sorted(cluster.members)))
    cluster.pass_time(ServerConfig().shutdown_timeout_s)  # who was asked to end is told to
    while told := [link for link in cluster.links if link[0] is None and cluster.links[link]]:
        cluster.perform(Delivery(*told[0]))
    for instance_id in list(cluster.dead):
        cluster.start_instance(instance_id)
    cluster.finish()
    assert not cluster.controller.placement.migrating
