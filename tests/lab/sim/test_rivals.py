"""Migration and autoscaling in simulated clusters: what they do, and that nothing gets lost."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kunserve.core.config import SchedulerConfig, ServerConfig
from kunserve.core.cost import CostCoefficients
from kunserve.core.errors import ConfigError
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import TokenOutput
from kunserve.core.request import Request, SamplingParams
from kunserve.core.step import Chunk
from kunserve_lab.compare.simulated.scenario import plan_of, scenario_of, world_of
from kunserve_lab.compare.systems import find_system
from kunserve_lab.sim.by_time import TimedWorld, WorldConfig
from kunserve_lab.sim.costs import MeasuredTimes
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.sim.profile import joined_profile
from kunserve_lab.workload.workload import Lengths, Workload
from tests.examples import examples
from tests.lab.sim.worlds import burst, run, scenario, small_profile

COST = CostCoefficients(0.0, 1e-4, 1e-3, 1e-3)


def fragmented() -> Workload:
    """Two instances fill with requests of which one kind ends early: room, but on one of them.

    Then a large one comes, and neither has enough room for it until somebody moves.
    """
    prompts, outputs, moments = [], [], []
    for number in range(12):
        moments.append(0.2 * number)
        prompts.append(2500)
        outputs.append(60 if number % 2 else 700)
    for number in range(4):
        moments.append(8.0 + 0.2 * number)
        prompts.append(7000)
        outputs.append(50)
    return Workload(tuple(moments), Lengths(tuple(prompts), tuple(outputs), "two"), "two kinds")


def test_migration_makes_room_for_the_head_of_a_queue() -> None:
    stuck, moving = run("recompute", scenario(fragmented())), run("migrate", scenario(fragmented()))
    assert moving.num_migrations > 0 and stuck.num_migrations == 0
    assert moving.metrics.ttft.percentile_s(99.0) < stuck.metrics.ttft.percentile_s(99.0)
    assert moving.num_preemptions <= stuck.num_preemptions
    assert moving.metrics.num_failed == 0


def test_where_all_instances_are_full_migration_changes_nothing() -> None:
    """The paper's point: a burst fills all of them alike."""
    even = burst(60, 0.05, (1000, 300))
    still, moving = run("recompute", scenario(even)), run("migrate", scenario(even))
    slower = moving.metrics.ttft.percentile_s(99.0) / still.metrics.ttft.percentile_s(99.0)
    assert 0.9 < slower < 1.1


def spike(quiet_s: float) -> Workload:
    """A burst, then a trickle for as long as an instance takes to be given back."""
    first = burst(80, 0.05, (1000, 200))
    last_s, num = first.arrival_s[-1], int(quiet_s / 4.0)
    moments = (*first.arrival_s, *(last_s + 4.0 * (i + 1) for i in range(num)))
    lengths = Lengths((1000,) * len(moments), (200,) * 80 + (10,) * num, "fixed")
    return Workload(moments, lengths, "spike")


def test_instances_come_late_help_and_are_given_back() -> None:
    world = scenario(spike(120.0), world=WorldConfig(start_s=4.0))
    small, grown = run("recompute", world), run("autoscale", world)
    assert grown.num_ordered > 0 and grown.num_given_back == grown.num_ordered
    assert grown.metrics.ttft.percentile_s(99.0) < small.metrics.ttft.percentile_s(99.0)
    assert small.gpu_hours < grown.gpu_hours < 2 * small.gpu_hours
    assert grown.metrics.num_completed == len(world.workload)


def test_a_drop_bridges_the_time_until_instances_come() -> None:
    world = scenario(spike(60.0), world=WorldConfig(start_s=20.0))
    alone, both = run("autoscale", world), run("drop-autoscale", world)
    assert both.num_drops > 0
    assert both.metrics.ttft.percentile_s(99.0) < alone.metrics.ttft.percentile_s(99.0)
    assert both.metrics.num_completed == len(world.workload)


def test_no_more_than_twice_the_instances_come() -> None:
    world = scenario(burst(100, 0.02, (2000, 150)), world=WorldConfig(start_s=1.0))
    result = run("autoscale", world)
    assert result.num_ordered == 2 and result.metrics.num_completed == 100


@pytest.mark.parametrize("system", ["migrate", "autoscale", "drop-autoscale"])
def test_a_death_is_mended(system: str) -> None:
    kills = ((4.0, 1), (9.0, 0))
    world = scenario(fragmented(), world=WorldConfig(start_s=2.0, detect_s=0.5), kills=kills)
    result = run(system, world, is_drained=True)
    assert all(r.output_tokens == r.asked_output_tokens for r in result.run.records)


def test_limits_of_the_queue_refuse_what_would_wait() -> None:
    limits = ServerConfig(max_num_queued_reqs=5)
    open_door, shut = (
        run("recompute", scenario(burst(60, 0.02), server=server))
        for server in (ServerConfig(), limits)
    )
    assert open_door.metrics.num_failed == 0 < shut.metrics.num_failed
    assert shut.metrics.ttft.percentile_s(99.0) < open_door.metrics.ttft.percentile_s(99.0)


def test_a_system_that_sheds_is_measured_by_what_it_serves_in_time() -> None:
    sheds = replace(find_system("recompute"), name="sheds", max_num_queued_reqs=5)
    world = scenario(burst(60, 0.02))
    open_door, shut = run("recompute", world), run(sheds, world)
    refused = [record for record in shut.run.records if record.was_refused]
    assert 0 < len(refused) == shut.metrics.num_failed
    assert shut.metrics.ttft.percentile_s(99.0) < open_door.metrics.ttft.percentile_s(99.0)


def test_joined_instances_hold_one_copy_of_the_weights() -> None:
    world = scenario(burst(60, 0.02), num_instances=4)
    pairs = find_system("tp-pairs")
    there = scenario_of(pairs, world)
    alone, joined = world.profile, there.profile
    assert (there.num_instances, joined.num_gpus) == (2, 2 * alone.num_gpus)
    gained = joined.spec.kv_units * joined.spec.unit_bytes - 2 * (
        alone.spec.kv_units * alone.spec.unit_bytes
    )
    assert gained == pytest.approx(alone.model.weights_bytes, rel=0.01)
    some = [Chunk(RequestId("r"), 0, 2048, True)]
    times = [one.times.stage_s(some, one.spec.num_layers, True) for one in (alone, joined)]
    assert 0.5 < times[1] / times[0] < 0.8, "half the work, and what joins the shards"
    result = run("tp-pairs", world, is_drained=True)
    assert result.metrics.num_completed == 60 and result.num_ordered == 0
    assert run("recompute", world).gpu_hours > 0.5 * result.gpu_hours > 0


def test_instances_that_cannot_be_joined_are_refused() -> None:
    pairs = find_system("tp-pairs")
    with pytest.raises(ConfigError, match="groups of 2 instances, and 3 cannot"):
        scenario_of(pairs, scenario(burst(5, 0.1), num_instances=3))
    with pytest.raises(ConfigError, match="none to die"):
        scenario_of(pairs, scenario(burst(5, 0.1), kills=((1.0, 0),)))
    measured = replace(small_profile(), times=MeasuredTimes(COST, 48))
    with pytest.raises(ConfigError, match="cannot be joined"):
        joined_profile(measured, 2)


def test_admission_by_the_first_chunk_fills_memory_sooner() -> None:
    long = scenario(burst(10, 0.3, (8000, 800)))
    whole, chunk = run("recompute", long), run("recompute-chunk", long, is_drained=True)
    assert chunk.metrics.num_completed == whole.metrics.num_completed == 10
    assert chunk.lost_tokens > whole.lost_tokens, "a prompt is thrown out half-way"


class _Checking:
    """Asks every owner after whatever happens."""

    cluster: TimedWorld | None = None

    def happened(self, kind: str, time_s: float, *details: Any) -> None:
        if self.cluster is not None and kind in ("event", "pulled"):
            self.cluster.check()


@settings(max_examples=examples(4), suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(
        st.tuples(st.floats(0, 0.3), st.integers(1, 3000), st.integers(1, 150)),
        min_size=5,
        max_size=40,
    ),
    system=st.sampled_from(["migrate", "recompute-chunk", "autoscale", "drop-autoscale"]),
    num_instances=st.integers(2, 4),
    reads=st.booleans(),
    kills=st.lists(st.tuples(st.floats(0.5, 8), st.integers(0, 3)), max_size=2),
    host=st.sampled_from([5e7, 2e9, 2e10]),
)
def test_no_request_is_lost_and_no_block_leaks(
    sizes: list[tuple[float, int, int]],
    system: str,
    num_instances: int,
    reads: bool,
    kills: list[tuple[float, int]],
    host: float,
) -> None:
    """Every token once and in its place, on links from hopeless to fast."""
    profile = replace(small_profile(8_000), reads_during_steps=reads, network_bytes_per_s=host)
    tokens: dict[RequestId, list[int]] = {}
    ended: set[RequestId] = set()

    def on_token(token: TokenOutput) -> None:
        assert token.request_id not in ended
        if token.token_id is not None:
            assert token.position == len(tokens[token.request_id])
            tokens[token.request_id].append(token.token_id)
        if token.finish_reason is not None:
            ended.add(token.request_id)

    heap, watcher = EventHeap(), _Checking()
    chosen = find_system(system)
    cluster = TimedWorld(
        plan_of(chosen, profile, num_instances, SchedulerConfig(256, 2048), None),
        profile,
        heap,
        on_token,
        world_of(chosen, WorldConfig(start_s=3.0, detect_s=0.5)),
        watcher,
    )
    watcher.cluster = cluster
    moment_s = 1.0
    for number, (gap_s, num_prompt, num_output) in enumerate(sizes):
        moment_s += gap_s
        sampling = SamplingParams(num_output, temperature=0.0, ignore_eos=True)
        request_id = RequestId(f"r{number}")
        tokens[request_id] = []
        request = Request(request_id, (0,) * num_prompt, sampling, moment_s)
        heap.at(moment_s, cluster.submit, request)
    for kill_s, instance_id in kills:
        heap.at(1.0 + kill_s, cluster.kill_instance, InstanceId(instance_id % num_instances))
    while len(ended) < len(sizes):
        heap.step()
        assert heap.now_s() < 2000.0
    assert [len(tokens[RequestId(f"r{i}")]) for i in range(len(sizes))] == [s[2] for s in sizes]
    # A restore over the slowest link takes ten minutes.
    end_s = heap.now_s() + 90.0
    while heap.now_s() < end_s or cluster.is_moving:
        heap.step()
        assert heap.now_s() < end_s + 2000.0, "a transition that never ends"
    cluster.check_empty()
