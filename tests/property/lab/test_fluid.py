"""The fluid model of a burst: what must hold for every burst, mix and memory."""

import functools

import numpy as np
import pytest

from kunserve_lab.sim.devices import find_device
from kunserve_lab.sim.fluid import Bursts, Capacity, Flow, capacity_of, flow
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import gpu_profile
from kunserve_lab.sim.steady import mix_of
from kunserve_lab.workload.lengths import burstgpt_lengths, random_lengths, scale_lengths

LENGTHS = {
    "short": burstgpt_lengths(500, seed=0),
    "long": scale_lengths(burstgpt_lengths(500, seed=1), 4.0),
    "answers": random_lengths(200, 600, 900, 0.5, seed=2),
}
CASES = [("short", 0.5), ("long", 0.9), ("long", 0.5)]
"""Lengths, and the share of a GPU's memory that is used."""
ABOUT_S, ABOUT = 0.5, 1.1
"""A tick, and what differs by the rounding of ticks and of the table of step times."""
DRAWN = 10


def draw() -> Bursts:
    """Bursts of all kinds, then each of them higher, then each of them longer."""
    rng = np.random.default_rng(0)
    height, length_s = rng.uniform(0.5, 3.0, DRAWN), rng.uniform(1.0, 80.0, DRAWN)
    base = rng.uniform(0.0, 0.8, DRAWN)
    return Bursts(
        np.concatenate([height, 1.2 * height, height]),
        np.concatenate([length_s, length_s, 1.2 * length_s]),
        np.tile(base, 3),
    )


@functools.cache
def capacity(name: str, utilization: float, num_instances: int = 8) -> Capacity:
    profile = gpu_profile(
        find_model("Qwen/Qwen2.5-14B"), find_device("a800"), memory_utilization=utilization
    )
    mix = mix_of(LENGTHS[name])
    return capacity_of(profile, mix, num_instances=num_instances, max_tokens=2048, max_seqs=1024)


@functools.cache
def flows(case: tuple[str, float]) -> tuple[Flow, Flow, Flow]:
    able, bursts = capacity(*case), draw()
    return (
        flow(able, bursts, drops=False),
        flow(able, bursts, drops=True),
        flow(able, bursts, drops=False, endless=True),
    )


@pytest.mark.parametrize("case", CASES)
def test_memory_that_suffices_is_as_good_as_endless_memory(case: tuple[str, float]) -> None:
    alone, dropped, endless = flows(case)
    room = ~alone.waits_for_memory
    assert room.any() and not room.all() and not endless.waits_for_memory.any()
    assert np.array_equal(alone.p99_s[room], dropped.p99_s[room])
    assert np.allclose(alone.p99_s[room], endless.p99_s[room])


@pytest.mark.parametrize("case", CASES)
def test_more_memory_never_hurts(case: tuple[str, float]) -> None:
    alone, dropped, endless = flows(case)
    # More memory lets more decode at once, which slows prompts: by a tick or a tenth, not more.
    assert (endless.p99_s <= ABOUT * alone.p99_s + ABOUT_S).all()
    assert (endless.p99_s <= ABOUT * dropped.p99_s + ABOUT_S).all()


@pytest.mark.parametrize("case", CASES)
def test_a_worse_burst_waits_longer(case: tuple[str, float]) -> None:
    for found in flows(case)[::2]:  # a drop that a worse burst brings on may help the earlier one
        same, higher, longer = found.p99_s.reshape(3, DRAWN)
        assert (higher >= same / ABOUT - ABOUT_S).all()
        assert (longer >= same / ABOUT - ABOUT_S).all()


def test_drops_remove_what_the_rule_allows() -> None:
    """Where memory does not limit throughput. Young requests are small, so more fit at first."""
    alone, dropped, _ = flows(("long", 0.9))
    most_s = capacity("long", 0.9).removable_s
    assert (alone.p99_s - dropped.p99_s <= 1.5 * most_s + ABOUT_S).all()
    assert (alone.p99_s - dropped.p99_s).max() > 0.3 * most_s


def test_no_drop_for_a_queue_that_waits_for_compute() -> None:
    """The controller's rule: what waits must be no more than what pairs free."""
    able = capacity("short", 0.9)
    bursts = Bursts(np.array([1.35, 3.0]), np.array([90.0, 60.0]), np.array([0.5, 0.5]))
    alone, dropped = flow(able, bursts, drops=False), flow(able, bursts, drops=True)
    assert alone.waits_for_memory.all() and list(alone.waits_for_compute) == [False, True]
    assert dropped.p99_s[0] < alone.p99_s[0]
    assert dropped.p99_s[1] == alone.p99_s[1]


@pytest.mark.parametrize("name", sorted(LENGTHS))
def test_capacity_follows_memory(name: str) -> None:
    small, large = capacity(name, 0.5), capacity(name, 0.9)
    assert small.num_full < large.num_full and small.full_rate < large.full_rate
    assert small.gain > large.gain > 0.0 == capacity(name, 0.9, 1).gain
    assert large.residence_s * large.full_rate == pytest.approx(large.num_full)
    assert small.floor_s(0.5) == pytest.approx(large.floor_s(0.5), rel=0.2)
    assert large.most_gain(0.5) > 1.0


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_steps_of_hardly_a_token(max_tokens: int) -> None:
    profile = gpu_profile(find_model("Qwen/Qwen2.5-14B"), find_device("a800"))
    able = capacity_of(
        profile, mix_of(LENGTHS["short"]), num_instances=1, max_tokens=max_tokens, max_seqs=8
    )
    assert np.isfinite(able.table.seconds(np.array([0]), np.array([1.0]), np.array([1.0]))).all()
