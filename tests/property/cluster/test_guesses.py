"""Guesses change no token: through drops, restores, deaths, lost KV and preemptions.

The fake model knows three tokens only, so that some guesses are right.
"""

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.config import SpeculativeConfig
from kunserve.core.ids import InstanceId
from kunserve.core.plan import SwapPlan
from kunserve.core.request import SamplingParams
from kunserve_lab.world.actions import CompletePull
from tests.examples import examples
from tests.fake_cluster import FakeCluster

FORMS: tuple[Callable[[int, int], SamplingParams], ...] = (
    lambda num, seed: SamplingParams(num, temperature=0.0),
    lambda num, seed: SamplingParams(num, seed=seed, num_logprobs=1),
    lambda num, seed: SamplingParams(num, seed=seed, stop_token_ids=(2,), min_tokens=num // 2),
    lambda num, seed: SamplingParams(num, seed=seed, frequency_penalty=0.5),
)


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


@settings(max_examples=examples(9))
@given(
    seed=st.integers(0, 2**32),
    num_instances=st.integers(2, 3),
    block_size=st.sampled_from([4, 8]),
    pool=st.sampled_from([10, 20]),
    num_requests=st.integers(1, 5),
    fail_share=st.sampled_from([0.0, 0.0, 0.1]),
    swap=st.sampled_from([None, None, SwapPlan(1e7), SwapPlan(1e7, max_park_s=0.5)]),
    head_cost_layers=st.sampled_from([None, 2.0]),
    dies=st.booleans(),
)
def test_every_request_has_its_own_tokens(
    seed: int,
    num_instances: int,
    block_size: int,
    pool: int,
    num_requests: int,
    fail_share: float,
    swap: SwapPlan | None,
    head_cost_layers: float | None,
    dies: bool,
) -> None:
    draw = random.Random(seed)
    cluster = FakeCluster(
        6,
        [pool] * num_instances,
        block_size,
        layer_units=60,
        max_num_seqs=6,
        swap=swap,
        head_cost_layers=head_cost_layers,
        speculative=SpeculativeConfig(prompt_lookup_min=1),
        vocab_size=3,
    )
    for kind in ("drop", "restore", "drop", "death"):
        for _ in range(num_requests):
            sampling = draw.choice(FORMS)(draw.randrange(4, 30), draw.randrange(99))
            cluster.request(draw.randrange(2, 9), sampling=sampling, num_common=draw.choice([0, 6]))
            act(cluster, draw, draw.randrange(15), fail_share)
        if kind == "drop" and len(cluster.groups()) > 1:
            cuts = [0, *sorted(draw.sample(range(1, 6), num_instances - 1)), 6]
            cluster.drop(*((i, cuts[i], cuts[i + 1]) for i in range(num_instances)))
        elif kind == "restore":
            merged = [group for group in cluster.groups() if len(group.stages) > 1]
            if merged:
                cluster.restore(merged[0], None)
        elif kind == "death" and dies:
            cluster.kill_instance(InstanceId(draw.randrange(num_instances)))
        act(cluster, draw, draw.randrange(120), fail_share)
    cluster.finish()


def test_guesses_are_right_now_and_then() -> None:
    """Otherwise the test above would prove little."""
    cluster = FakeCluster(
        pools=(40, 40), block_size=8, speculative=SpeculativeConfig(), vocab_size=2
    )
    for seed in range(4):
        cluster.request(4, sampling=SamplingParams(30, seed=seed))
    cluster.drop((0, 0, 2), (1, 2, 4))
    cluster.finish()
    totals = [cluster.agent(i).state.totals for i in range(2)]
    num_right = sum(total.num_accepted_tokens for total in totals)
    num_guesses = sum(total.num_draft_tokens for total in totals)
    assert 0.2 * num_guesses < num_right < 0.8 * num_guesses
