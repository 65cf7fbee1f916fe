"""Random workloads in the simulated world: nothing is lost, leaked or sent faster than links are.

The real controller and agents; every owner's invariants hold after every single event.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kunserve.core.ids import InstanceId
from kunserve.core.transfer import KvPull
from kunserve_lab.compare.simulated.scenario import Scenario, plan_of, world_of
from kunserve_lab.compare.simulated.sim_client import SimClient
from kunserve_lab.compare.simulated.simulation import DRAIN_S, LEAD_S
from kunserve_lab.compare.systems import System, find_system
from kunserve_lab.sim.by_time import TimedWorld, WorldConfig
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.sim.network import Network
from kunserve_lab.workload.workload import Lengths, Workload
from tests.examples import examples
from tests.lab.sim.worlds import run, scenario, small_profile

SYSTEMS = ["recompute", "swap", "park", "migrate", "autoscale", "drop", "drop-park", "basic"]
"""``basic`` is drop without lookahead, and without priority on the links."""
Link = tuple[InstanceId, InstanceId, str]


@dataclass(slots=True)
class Sent:
    """One transfer as it was asked for, and how it ended."""

    link: Link
    num_bytes: float
    asked_s: float
    received_s: float | None = None
    is_refused: bool = False


class CountedNetwork(Network):
    """Writes down every transfer."""

    def __init__(self, heap: EventHeap, bytes_per_s: float, latency_s: float, priority: bool):
        super().__init__(heap, bytes_per_s, latency_s, priority=priority)
        self.clock = heap
        self.sent: list[Sent] = []
        self._is_inside = False

    def send_bulk(
        self,
        src: InstanceId,
        dst: InstanceId,
        num_bytes: float,
        done: Callable[[], None],
        started: Callable[[], bool] | None = None,
    ) -> None:
        if self._is_inside:  # an activation without priority, already written down
            super().send_bulk(src, dst, num_bytes, done, started)
            return
        sent = self._ask(src, dst, "bulk", num_bytes)

        def starts() -> bool:
            sent.is_refused = started is not None and not started()
            return not sent.is_refused

        super().send_bulk(src, dst, num_bytes, self._noting(sent, done), starts)

    def send_activation(
        self, src: InstanceId, dst: InstanceId, num_bytes: float, done: Callable[[], None]
    ) -> None:
        sent = self._ask(src, dst, "activation", num_bytes)
        self._is_inside = True
        super().send_activation(src, dst, num_bytes, self._noting(sent, done))
        self._is_inside = False

    def _ask(self, src: InstanceId, dst: InstanceId, kind: str, num_bytes: float) -> Sent:
        sent = Sent((src, dst, kind), num_bytes, self.clock.now_s())
        self.sent.append(sent)
        return sent

    def _noting(self, sent: Sent, done: Callable[[], None]) -> Callable[[], None]:
        def received() -> None:
            assert sent.received_s is None, sent
            sent.received_s = self.clock.now_s()
            done()

        return received

    def check(self, bytes_per_s: float) -> None:
        """Once all is quiet: everything asked for came, once; no card was faster than it can."""
        bytes_in: dict[str, float] = defaultdict(float)
        by_card: dict[tuple[int, InstanceId], list[Sent]] = defaultdict(list)
        for sent in self.sent:
            assert sent.received_s is not None, sent
            if not sent.is_refused:
                bytes_in[sent.link[2]] += sent.num_bytes
                by_card[0, sent.link[0]].append(sent)
                by_card[1, sent.link[1]].append(sent)
        assert abs(bytes_in["activation"] - self.activation_bytes) < 1.0
        assert abs(bytes_in["bulk"] - self.bulk_bytes) < 1.0
        for through in by_card.values():
            _check_rate(through, bytes_per_s)


def _check_rate(through: list[Sent], bytes_per_s: float) -> None:
    """Whatever was asked for after a moment and had come by another fits between the two."""
    through.sort(key=lambda sent: sent.received_s or 0.0)
    for first_s in sorted({sent.asked_s for sent in through})[:200]:
        num_bytes = 0.0
        for sent in through:
            if sent.asked_s >= first_s:
                num_bytes += sent.num_bytes
                assert sent.received_s is not None
                most = bytes_per_s * (sent.received_s - first_s)
                assert num_bytes <= most * (1.0 + 1e-9) + 1.0, (sent, first_s)


class Pulls:
    """A ``Watcher``: bytes that the brain was told have come, by link."""

    def __init__(self, unit_bytes: int, layer_bytes: int) -> None:
        self._unit_bytes, self._layer_bytes = unit_bytes, layer_bytes
        self.kv_bytes: dict[Link, int] = defaultdict(int)
        self.all_bytes: dict[Link, int] = defaultdict(int)

    def happened(self, kind: str, time_s: float, *details: Any) -> None:
        if kind == "step":
            _, work, end_s = details
            assert end_s > time_s, work
        if kind != "pulled":
            return
        dst, what, ok = details
        if not ok:
            return
        link = (what.src, dst, "bulk")
        num_layers = what.layers.num_layers
        if isinstance(what, KvPull):
            num_bytes = (what.end_block - what.first_block) * num_layers * self._unit_bytes
            self.kv_bytes[link] += num_bytes
        else:
            num_bytes = num_layers * self._layer_bytes
        self.all_bytes[link] += num_bytes


def _named(name: str) -> System:
    if name == "basic":
        return replace(find_system("drop"), lookahead=False, link_priority=False)
    return find_system(name)


def live(system_name: str, world: Scenario, check_every: int = 1) -> TimedWorld:
    """Run a scenario event by event, checking all the way and at the end."""
    system, profile = _named(system_name), world.profile
    heap = EventHeap()
    client = SimClient(heap, world.workload, LEAD_S, lambda record: None)
    pulls = Pulls(profile.spec.unit_bytes, profile.spec.layer_bytes)
    cluster = TimedWorld(
        plan_of(system, profile, world.num_instances, world.scheduler, world.cost),
        profile,
        heap,
        client.received,
        world_of(system, world.world),
        pulls,
    )
    rate = profile.network_bytes_per_s
    network = CountedNetwork(heap, rate, profile.message_latency_s, system.link_priority)
    cluster.network = network
    client.begin(cluster)
    for time_s, instance_id in world.kills:
        heap.at(LEAD_S + time_s, cluster.kill_instance, InstanceId(instance_id))
    quiet_s = None
    while quiet_s is None or heap.now_s() < quiet_s:
        heap.step()
        if quiet_s is None and heap.num_done % check_every == 0:
            cluster.check()
        if quiet_s is None and client.num_left == 0:
            quiet_s = heap.now_s() + DRAIN_S
        assert heap.now_s() < 2000.0, "requests that never end"
    cluster.check_empty()
    records = sorted(client.records, key=lambda record: record.number)
    wanted = world.workload.requests()
    assert [record.number for record in records] == [request.number for request in wanted]
    assert [record.output_tokens for record in records] == [r.output_tokens for r in wanted]
    assert all(record.error is None for record in records)
    network.check(rate)
    received: dict[Link, float] = defaultdict(float)
    for sent in network.sent:
        if not sent.is_refused:
            received[sent.link] += sent.num_bytes
    for link, num_bytes in pulls.all_bytes.items():
        assert num_bytes <= received[link], (link, num_bytes, received[link])
    done = [r for r in cluster.records if r.kind in ("drop", "restore")]
    is_whole = not world.kills and all(r.outcome == "done" for r in done)
    if is_whole and system.overload.policy == "drop":
        assert sum(r.moved_bytes for r in done) == sum(pulls.kv_bytes.values())
    return cluster


@st.composite
def scenarios(draw: st.DrawFn, *, dies: bool) -> Scenario:
    """A burst or a trickle of requests over a few small instances, on GPUs or CPUs."""
    gap_s = draw(st.sampled_from([0.0, 0.05, 0.5]))
    sizes = draw(
        st.lists(
            st.tuples(st.floats(0.0, 1.0), st.integers(1, 3000), st.integers(1, 40)),
            min_size=1,
            max_size=16,
        )
    )
    moments, now_s = [], 0.0
    for share, _, _ in sizes:
        now_s += share * gap_s
        moments.append(now_s)
    lengths = Lengths(tuple(s[1] for s in sizes), tuple(s[2] for s in sizes), "any")
    profile = replace(small_profile(5_000), reads_during_steps=draw(st.booleans()))
    num_instances = draw(st.integers(2, 3))
    kills = ()
    if dies:
        kills = ((draw(st.floats(0.0, 4.0)), draw(st.integers(0, num_instances - 1))),)
    return scenario(
        Workload(tuple(moments), lengths, "any"),
        num_instances,
        profile,
        world=WorldConfig(start_s=2.0, detect_s=0.2),
        kills=kills,
    )


@settings(max_examples=examples(5), suppress_health_check=list(HealthCheck))
@given(scenarios(dies=False), st.sampled_from(SYSTEMS))
def test_nothing_is_lost_and_links_keep_their_accounts(world: Scenario, system: str) -> None:
    live(system, world)


@settings(max_examples=examples(4), suppress_health_check=list(HealthCheck))
@given(scenarios(dies=True), st.sampled_from(SYSTEMS))
def test_not_even_when_an_instance_dies(world: Scenario, system: str) -> None:
    live(system, world)


@settings(max_examples=examples(4), suppress_health_check=list(HealthCheck))
@given(scenarios(dies=True), st.sampled_from(SYSTEMS))
def test_equal_scenarios_have_equal_lives(world: Scenario, system: str) -> None:
    first, second = run(_named(system), world), run(_named(system), world)
    assert first == second


def test_a_burst_moves_kv_and_the_accounts_agree() -> None:
    """What random worlds may miss: a drop and a restore with KV on the links."""
    moments = tuple(0.02 * i for i in range(30)) + tuple(4.0 + i for i in range(8))
    lengths = Lengths((600,) * 38, (30,) * 38, "burst, then trickle")
    world = scenario(Workload(moments, lengths, "burst"), 2, small_profile(8_000))
    for system in ("drop", "basic"):
        cluster = live(system, world, check_every=50)
        assert {record.kind for record in cluster.records} == {"drop", "restore"}
        assert sum(record.moved_bytes for record in cluster.records) > 0
