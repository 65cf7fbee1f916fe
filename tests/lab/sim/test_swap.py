"""Swapping in simulated time: bytes are conserved, the link is finite, and steps hide it."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kunserve.control.instance.work import Work
from kunserve.core.config import OverloadConfig
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import Request, SamplingParams
from kunserve_lab.compare.simulated.scenario import plan_of
from kunserve_lab.compare.simulated.simulation import simulate
from kunserve_lab.compare.systems import find_system
from kunserve_lab.sim.by_time import TimedWorld
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.sim.profile import InstanceProfile
from tests.lab.sim.worlds import burst, run, scenario, small_profile

LONG_OUTPUTS = burst(60, 0.05, (300, 600))
"""Prompts that fit together in two small pools, and outputs that do not."""


class StepTimes:
    """Compares every step with what it would take without copies beside it."""

    def __init__(self, profile: InstanceProfile) -> None:
        self._times = profile.times
        self.steps_s = self.compute_s = 0.0
        self.copied = 0
        """Steps with copies beside them."""
        self.computed: Counter[RequestId] = Counter()
        """Tokens of each request, on the first stage."""

    def happened(self, kind: str, time_s: float, *details: Any) -> None:
        if kind == "step":
            self._step(time_s, *details)

    def _step(self, start_s: float, instance_id: InstanceId, work: Work, end_s: float) -> None:
        plan, layers = work.step.plan, work.step.layers
        if plan.swapped_out or plan.swapped_in:
            self.copied += 1
            self.steps_s += end_s - start_s
            self.compute_s += self._times.stage_s(plan.chunks, layers.num_layers, work.step.is_last)
        for chunk in plan.chunks if work.step.is_first else ():
            self.computed[chunk.request_id] += chunk.num_tokens


def test_what_leaves_comes_back_and_nothing_is_computed_twice() -> None:
    world = scenario(LONG_OUTPUTS)
    watcher = StepTimes(world.profile)
    result = simulate(find_system("swap"), world, watcher=watcher, is_drained=True)
    assert result.metrics.num_completed == 60 and result.num_preemptions > 0
    assert result.lost_tokens == 0
    assert result.swapped_out_bytes == result.swapped_back_bytes > 0
    assert set(watcher.computed.values()) == {300 + 600 - 1}
    assert run("recompute", world).lost_tokens > 0, "the same load makes others compute again"


def test_who_was_preempted_finds_what_is_left_of_its_kv() -> None:
    """As on a real server: blocks that nobody took meanwhile need not be computed again."""
    computed, world = [], scenario(LONG_OUTPUTS)
    for caches in (True, False):
        scheduler = replace(world.scheduler, enable_prefix_caching=caches)
        world = replace(world, scheduler=scheduler)
        watcher = StepTimes(world.profile)
        result = simulate(find_system("recompute"), world, watcher=watcher)
        assert result.num_preemptions > 0
        computed.append(watcher.computed.total())
    assert 60 * (300 + 600 - 1) < computed[0] < computed[1]


def test_copies_hide_behind_steps_and_a_slow_link_stretches_them() -> None:
    world = scenario(LONG_OUTPUTS)
    watcher = StepTimes(world.profile)
    simulate(find_system("swap"), world, watcher=watcher)
    assert watcher.copied > 0
    assert watcher.steps_s <= 1.01 * watcher.compute_s
    # A block takes longer than a step: one is copied all the same, at the link's rate.
    slow = replace(world.profile, host_bytes_per_s=1e8)
    watcher = StepTimes(slow)
    block_bytes = slow.spec.num_layers * slow.spec.unit_bytes
    simulate(find_system("swap"), replace(world, profile=slow), watcher=watcher)
    assert watcher.copied > 0
    assert watcher.steps_s >= 0.999 * watcher.copied * block_bytes / 1e8


def test_steps_wait_for_copies_that_nothing_hides() -> None:
    slow = replace(small_profile(), host_bytes_per_s=1e8)
    world = scenario(LONG_OUTPUTS, profile=slow)
    hidden = run("swap", world)
    watcher = StepTimes(slow)
    waiting = replace(find_system("swap"), hides_host_copies=False)
    result = simulate(waiting, world, watcher=watcher)
    assert watcher.copied > 0 and result.metrics.num_completed == 60
    block_s = slow.spec.num_layers * slow.spec.unit_bytes / 1e8
    assert watcher.steps_s >= 0.999 * (watcher.compute_s + watcher.copied * block_s)
    assert result.metrics.duration_s > hidden.metrics.duration_s


@pytest.mark.parametrize("host_blocks", [0, 20])
def test_full_host_memory_falls_back_to_recomputing(host_blocks: int) -> None:
    profile = small_profile()
    block_bytes = profile.spec.num_layers * profile.spec.unit_bytes
    result = run("swap", scenario(LONG_OUTPUTS, host_bytes=host_blocks * block_bytes))
    assert result.metrics.num_completed == 60 and result.lost_tokens > 0
    assert (result.swapped_out_bytes > 0) == (host_blocks > 0)


class _Counting:
    """A client that counts tokens."""

    def __init__(self) -> None:
        self.tokens: Counter[RequestId] = Counter()
        self.ends: Counter[RequestId] = Counter()

    def __call__(self, output: TokenOutput) -> None:
        self.tokens[output.request_id] += output.token_id is not None
        self.ends[output.request_id] += output.finish_reason is not None


def test_pipelines_swap_too() -> None:
    pipelines = replace(find_system("static-pp"), overload=OverloadConfig(policy="swap"))
    world = scenario(burst(170, 0.05, (300, 700)), profile=small_profile(3_000))
    watcher = StepTimes(world.profile)
    result = simulate(pipelines, world, watcher=watcher, is_drained=True)
    assert result.metrics.num_completed == 170 and result.lost_tokens == 0
    assert result.swapped_out_bytes == result.swapped_back_bytes > 0
    assert set(watcher.computed.values()) == {300 + 700 - 1}
    assert watcher.steps_s <= 1.01 * watcher.compute_s


def test_every_owner_agrees_after_every_event() -> None:
    world = scenario(LONG_OUTPUTS, 1, small_profile(6_000))
    heap, client = EventHeap(), _Counting()
    plan = plan_of(find_system("swap"), world.profile, 1, world.scheduler, world.cost)
    cluster = TimedWorld(plan, world.profile, heap, client)
    requests = [
        Request(
            RequestId(f"r{i}"),
            (0,) * 300,
            SamplingParams(max_tokens=400, ignore_eos=True),
            1.0 + 0.02 * i,
        )
        for i in range(24)
    ]
    for request in requests:
        heap.at(request.arrival_s, cluster.submit, request)
    *whole, cancelled = [request.request_id for request in requests]
    heap.at(8.0, cluster.cancel, cancelled)
    while client.ends.total() < len(whole):
        heap.step()
        cluster.check()
    assert all(client.tokens[r] == 400 and client.ends[r] == 1 for r in whole)
    out_bytes, back_bytes = cluster.swapped_bytes
    assert out_bytes >= back_bytes > 0
    until_s = heap.now_s() + 1.0
    while heap.now_s() < until_s:
        heap.step()
    cluster.check_empty()
