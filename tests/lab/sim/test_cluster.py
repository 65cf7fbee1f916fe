"""Whole simulated clusters: every request ends, nothing leaks, equal seeds give equal runs."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kunserve.control.group.scheduler import Scheduler
from kunserve.core.config import OverloadConfig
from kunserve.core.errors import ConfigError
from kunserve.core.step import StepPlan
from kunserve_lab.compare.systems import SYSTEMS, find_system
from kunserve_lab.sim.by_time import WorldConfig
from kunserve_lab.workload.workload import Lengths, Workload
from tests.examples import examples
from tests.lab.sim.worlds import GEMMA, burst, run, scenario, small_profile

OVERLOAD = burst(60, 0.1)


def test_a_burst_queues_under_recompute_and_not_under_drop() -> None:
    slow, fast = run("recompute", scenario(OVERLOAD)), run("drop", scenario(OVERLOAD))
    assert slow.metrics.num_completed == fast.metrics.num_completed == 60
    assert fast.num_drops == 1 and slow.num_drops == 0
    assert fast.metrics.ttft.percentile_s(99.0) < 0.7 * slow.metrics.ttft.percentile_s(99.0)
    assert all(r.output_tokens == r.asked_output_tokens for r in fast.run.records)


@pytest.mark.parametrize(("system", "largest"), [("drop", 4), ("drop-pairs", 2)])
def test_groups_grow_no_larger_than_allowed(system: str, largest: int) -> None:
    result = run(system, scenario(burst(300, 0.02), num_instances=4))
    sizes = {len(new.members) for record in result.transitions for new in record.groups_after}
    assert max(sizes) == largest
    assert result.metrics.num_completed == 300


def test_a_handover_takes_as_long_as_its_tokens() -> None:
    """So a commit with long prompts costs more than a message."""
    gaps_s = []
    for token_s in (0.0, 20e-6):
        profile = replace(small_profile(), codec_token_s=token_s)
        result = run("drop", scenario(OVERLOAD, profile=profile))
        gaps_s.append(result.transitions[0].gap_s)
        assert result.metrics.num_failed == 0
    num_tokens = (gaps_s[1] - gaps_s[0]) / 20e-6
    assert num_tokens > 10_000, "the KV memory of an instance holds 20,000"


def test_a_restore_over_a_slow_link_takes_its_time() -> None:
    """Half of the layers take a minute, and each instance pulls them as one."""
    made = small_profile()
    half_bytes = made.spec.num_layers // 2 * made.spec.layer_bytes
    profile = replace(made, network_bytes_per_s=half_bytes / 60.0)
    first = burst(40, 0.1)
    moments = (*first.arrival_s, *(60.0 + 10.0 * i for i in range(12)))
    lengths = Lengths((1000,) * len(moments), (100,) * len(moments), "fixed")
    result = run("drop", scenario(Workload(moments, lengths, "a burst"), profile=profile))
    endings = [(record.kind, record.ending) for record in result.transitions]
    assert endings == [("drop", "done"), ("restore", "done")]
    restore = result.transitions[-1]
    assert restore.finished_s is not None and restore.finished_s - restore.started_s > 60.0


def test_restored_twice() -> None:
    """Two bursts with quiet between them: each drop is followed by a restore."""
    first = burst(50, 0.1)
    quiet = tuple(12.0 + i for i in range(30))
    again = tuple(50.0 + moment for moment in first.arrival_s)
    later = tuple(62.0 + i for i in range(30))
    moments = (*first.arrival_s, *quiet, *again, *later)
    lengths = Lengths((1000,) * len(moments), (200,) * len(moments), "fixed")
    result = run("drop", scenario(Workload(moments, lengths, "two bursts")))
    done = [record.kind for record in result.transitions if record.outcome == "done"]
    assert done == ["drop", "restore", "drop", "restore"]
    assert result.metrics.num_failed == 0


NO_RESTORE = OverloadConfig(policy="drop", restore_below=0.0)


@pytest.mark.parametrize(
    "system", sorted(name for name, one in SYSTEMS.items() if not one.shares_weights)
)
def test_equal_settings_equal_results(system: str) -> None:
    num_instances = max(2, find_system(system).pipeline_stages)
    workload = burst(8 * num_instances, 0.16 / num_instances)  # a fifth more than memory holds
    profile = small_profile(8_000, *([GEMMA] if find_system(system).keeps_ring else []))
    world = scenario(workload, num_instances, profile, world=WorldConfig(start_s=5.0))
    assert run(system, world).run == run(system, world).run


def test_instances_of_their_own_memories_share_no_weights() -> None:
    with pytest.raises(ConfigError, match="shared is for real instances of one machine"):
        run("shared", scenario(burst(4, 1.0)))


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_static_pipelines_stand_from_the_start(num_stages: int) -> None:
    system = replace(find_system("static-pp"), pipeline_stages=num_stages)
    result = run(system, scenario(burst(20, 0.2), num_instances=8))
    assert result.num_drops == 0 and result.bubble_ratio is not None
    assert result.metrics.num_completed == 20


def test_restore_can_be_switched_off() -> None:
    quiet = tuple(20.0 + i for i in range(30))
    moments = (*OVERLOAD.arrival_s, *quiet)
    lengths = Lengths((1000,) * len(moments), (200,) * len(moments), "fixed")
    world = scenario(Workload(moments, lengths, "burst"))
    assert run("drop", world).num_restores == 1
    drop = find_system("drop")
    assert run(replace(drop, overload=NO_RESTORE), world).num_restores == 0


def test_a_death_is_mended_and_no_request_is_lost() -> None:
    world = scenario(OVERLOAD, world=WorldConfig(start_s=3.0, detect_s=0.5), kills=((4.0, 1),))
    for system in ("recompute", "drop"):
        result = run(system, world)
        assert result.metrics.num_completed == 60
        assert all(r.output_tokens == r.asked_output_tokens for r in result.run.records)


def test_more_instances_when_nothing_is_left_to_drop() -> None:
    world = scenario(burst(200, 0.07, (1000, 300)), world=WorldConfig(start_s=2.0))
    small, large = run("drop", world), run("drop-autoscale", world)
    assert large.metrics.ttft.mean_s < small.metrics.ttft.mean_s
    assert large.gpu_hours / large.metrics.duration_s > small.gpu_hours / small.metrics.duration_s


def test_a_request_that_can_never_fit_fails_at_once() -> None:
    workload = Workload((0.0, 0.1), Lengths((50_000, 100), (10, 10), "one too long"), "two")
    result = run("drop", scenario(workload))
    assert [record.error is None for record in result.run.records] == [False, True]


@settings(max_examples=examples(6), suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.floats(0, 0.5), st.integers(1, 3000), st.integers(1, 150)),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from(["recompute", "drop", "no priority"]),
    st.integers(1, 4),
    st.booleans(),
)
def test_no_request_is_lost_and_no_block_leaks(
    sizes: list[tuple[float, int, int]], system: str, num_instances: int, reads: bool
) -> None:
    moments, now_s = [], 0.0
    for gap_s, _, _ in sizes:
        now_s += gap_s
        moments.append(now_s)
    lengths = Lengths(tuple(s[1] for s in sizes), tuple(s[2] for s in sizes), "any")
    profile = replace(small_profile(8_000), reads_during_steps=reads)
    world = scenario(Workload(tuple(moments), lengths, "any"), num_instances, profile)
    unordered = replace(find_system("drop"), link_priority=False)
    result = run(unordered if system == "no priority" else system, world, is_drained=True)
    assert result.metrics.num_completed == len(sizes)
    assert [r.output_tokens for r in result.run.records] == [s[2] for s in sizes]


@pytest.mark.parametrize("reads_during_steps", [True, False])
def test_a_shortage_is_acted_upon_within_a_tenth_of_a_second(
    reads_during_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the moment that a scheduler finds memory short to the decision to drop."""
    short_since: list[float] = []
    schedule = Scheduler.schedule

    def watched(scheduler: Scheduler, now_s: float, **given: bool) -> StepPlan | None:
        plan = schedule(scheduler, now_s, **given)
        if scheduler.is_memory_short:
            short_since.append(now_s)
        return plan

    monkeypatch.setattr(Scheduler, "schedule", watched)
    profile = replace(small_profile(), reads_during_steps=reads_during_steps)
    result = run("drop", scenario(OVERLOAD, profile=profile))
    decided_s = result.transitions[0].started_s
    assert short_since and 0.0 <= decided_s - short_since[0] < 0.1, (short_since[0], decided_s)


@pytest.mark.parametrize("system", ["recompute", "drop", "park", "swap"])
def test_the_urgent_wait_least_whatever_the_system_does(system: str) -> None:
    """One in six of a burst that overflows memory: none waits half as long as most others."""
    num = 150
    priorities = tuple(-1 if number % 6 == 5 else 0 for number in range(num))
    lengths = Lengths((1000,) * num, (200,) * num, "fixed", priorities=priorities)
    workload = Workload(tuple(i * 0.04 for i in range(num)), lengths, "even")
    result = run(system, scenario(workload))
    assert result.metrics.num_completed == num
    ttft_s: dict[int, list[float]] = {-1: [], 0: []}
    for record in result.run.records:
        ttft_s[priorities[record.number]].append(record.token_times_s[0] - record.planned_s)
    assert max(ttft_s[-1]) < 0.5 * sorted(ttft_s[0])[len(ttft_s[0]) // 2]
