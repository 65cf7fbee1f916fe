"""Steps that run ahead change no token: through drops, restores, aborts, ends and preemptions.

Bodies compute a step when it ends, so whatever is done to its KV before shows in a token. The
model knows seven tokens, of which one ends an output: often a step computes one for nothing.
"""

import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch

from kunserve.control.group.in_flight import InFlight
from kunserve.control.group.scheduler import Scheduler
from kunserve.core.request import SamplingParams
from kunserve.core.step import StepPlan
from tests.examples import examples
from tests.fake_cluster import FakeCluster

FORMS = (
    lambda num, seed: SamplingParams(num, temperature=0.0),
    lambda num, seed: SamplingParams(num, seed=seed, num_logprobs=1),
    lambda num, seed: SamplingParams(num, seed=seed, stop_token_ids=(2,), min_tokens=num // 2),
    lambda num, seed: SamplingParams(num, seed=seed, frequency_penalty=0.5, ignore_eos=True),
)


def play(
    seed: int, *, pool: int, block_size: int, caches: bool, begins_as_pair: bool = False
) -> FakeCluster:
    """Arrivals, aborts, drops and restores in an order that the seed gives."""
    draw = random.Random(seed)
    cluster = FakeCluster(
        pools=[pool] * 2,
        block_size=block_size,
        vocab_size=7,
        eos_token_ids=frozenset({0}),
        caches=caches,
    )
    cluster.runs_ahead = True
    if begins_as_pair:
        cluster.drop((0, 0, 2), (1, 2, 4))
        cluster.run_until_idle()
    for _ in range(6):
        for number in range(draw.randint(1, 4)):
            sampling = FORMS[number](draw.randint(1, 20), draw.randint(0, 99))
            num_prompt = min(draw.choice([draw.randint(1, 12), 45]), pool * block_size // 2)
            cluster.request(num_prompt, sampling=sampling, num_common=draw.choice([0, 9]))
        for _ in range(draw.randint(0, 150)):
            if not (actions := cluster.actions()):
                break
            cluster.perform(draw.choice(actions))
            cluster.check()
        chance = draw.random()
        groups = cluster.groups()
        if chance < 0.15 and cluster.unfinished:
            cluster.cancel(draw.choice(cluster.unfinished))
        elif chance < 0.35 and len(groups) == 2 and not cluster.controller.transitions.active:
            cluster.drop((0, 0, 2), (1, 2, 4))
        elif chance < 0.6 and len(groups) == 1 and len(groups[0].stages) == 2:
            cluster.restore(groups[0])
        elif chance < 0.7 and len(groups) == 2 and not cluster.controller.balance._active:
            cluster.migrate(groups[0].group_id, groups[1].group_id)
    cluster.finish()
    return cluster


@settings(max_examples=examples(25))
@given(
    seed=st.integers(0, 2**32),
    pool=st.sampled_from([10, 16, 30]),
    block_size=st.sampled_from([2, 4]),
    caches=st.booleans(),
    begins_as_pair=st.booleans(),
)
def test_every_request_has_its_own_tokens(
    seed: int, pool: int, block_size: int, caches: bool, begins_as_pair: bool
) -> None:
    play(seed, pool=pool, block_size=block_size, caches=caches, begins_as_pair=begins_as_pair)


def test_steps_do_run_ahead_and_some_compute_a_token_for_nothing(
    monkeypatch: MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()
    begin, schedule = InFlight.begin_ahead, Scheduler.schedule_ahead

    def scheduled(scheduler: Scheduler, *given: Any) -> StepPlan | None:
        plan = schedule(scheduler, *given)
        if plan is not None and scheduler._num_stages > 1:
            counts["in pairs"] += 1
            counts["of one microbatch"] += scheduler.num_in_flight == 1
        return plan

    def counted(in_flight: InFlight) -> None:
        begin(in_flight)
        for step in in_flight._steps.values():
            counts["steps"] += 1
            counts["mixed"] += step.num_prompt_tokens > 0 and len(step.sequences) > 1
            counts["tokens"] += len(step.sampling)
            counts["for nothing"] += step.sampling.count(None)

    monkeypatch.setattr(InFlight, "begin_ahead", counted)
    monkeypatch.setattr(Scheduler, "schedule_ahead", scheduled)
    for seed in range(8):
        play(seed, pool=30, block_size=2, caches=bool(seed % 2), begins_as_pair=seed > 3)
    assert counts["steps"] > 100 and counts["mixed"] > 5, counts
    assert counts["in pairs"] > 15, counts
    assert 5 < counts["of one microbatch"] < counts["in pairs"] - 5, counts
    assert 5 < counts["for nothing"] < counts["tokens"] / 2, counts
