"""Two orders, one brain: what happens by time, and again by choice, gives the same commands.

The timed world says when what happens. A chosen one (real bytes on its links, fake bodies with
real memory) is led through the same at the same moments. Tokens' values aside, which are the
bodies' business.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kunserve.control.cluster.commands import Deliver, Send
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    OverloadConfig,
    SchedulerConfig,
)
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Connect, Submit
from kunserve.core.plan import Measured, Plan
from kunserve.core.request import Request, SamplingParams
from kunserve.core.snapshots import InstanceSpec
from kunserve.core.step import Chunk
from kunserve.transport.wire.codec import decode
from kunserve_lab.sim.by_time import TimedWorld
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import InstanceProfile
from kunserve_lab.world.actions import CompletePull, Delivery, FinishStep, StartStep
from kunserve_lab.world.by_choice import ChosenWorld
from kunserve_lab.world.fake_body import FakeModel, fake_spec

NUM_LAYERS, NUM_BLOCKS, NUM_INSTANCES = 6, 60, 3

Happening = tuple[str, float, tuple[Any, ...]]


class LinearTimes:
    """Steps that take as long as they are large."""

    def stage_s(self, chunks: Sequence[Chunk], num_layers: int, is_last: bool) -> float:
        return (0.002 + 1e-4 * sum(chunk.num_tokens for chunk in chunks)) * num_layers


class Recorder:
    """A ``Watcher``: everything that happened in a world, in order."""

    def __init__(self) -> None:
        self.happenings: list[Happening] = []

    def happened(self, kind: str, time_s: float, *details: Any) -> None:
        self.happenings.append((kind, time_s, details))

    @property
    def commands(self) -> list[tuple[float, Any]]:
        return [(t, masked(*details)) for kind, t, details in self.happenings if kind == "command"]


PACED_COST = CostCoefficients(0.0, 6e-4, 0.012, 0.012)
"""With an objective, so that decodes skip steps."""


def plan_of(name: str) -> Plan:
    policy: Any = name.removesuffix("-paced")
    is_paced = name.endswith("-paced")
    config = KunServeConfig(
        instance=InstanceConfig(block_size=4),
        scheduler=SchedulerConfig(16, 64, tpot_slo_s=0.05 if is_paced else None),
        overload=OverloadConfig(policy=policy, dwell_s=0.3, restore_hold_s=0.5),
        cluster=ClusterConfig(num_instances=NUM_INSTANCES),
    )
    return Plan(config, Measured(PACED_COST if is_paced else None))


def requests() -> list[tuple[float, Request]]:
    made = []
    for number in range(60):
        # A burst in the first second, then a trickle.
        time_s = 1.0 + (0.02 * number if number < 45 else 0.9 + 0.4 * (number - 45))
        sampling = SamplingParams(max_tokens=10 + number * 7 % 40, temperature=0.0, ignore_eos=True)
        prompt = tuple((number * 31 + i) % 1000 for i in range(5 + number * 13 % 60))
        made.append((time_s, Request(RequestId(f"r{number}"), prompt, sampling, time_s)))
    return made


def spec_of(instance_id: int) -> InstanceSpec:
    return fake_spec(InstanceId(instance_id), NUM_LAYERS, kv_units=NUM_LAYERS * NUM_BLOCKS)


def simulated(policy: str) -> Recorder:
    profile = InstanceProfile(
        model=find_model("smollm2-135m"),
        spec=spec_of(0),
        times=LinearTimes(),
        num_gpus=1,
        network_bytes_per_s=1e6,
        host_bytes_per_s=1e9,
        copy_bytes_per_s=1e9,
        remap_granule_s=0.0,
        message_latency_s=1e-3,
    )
    heap, recorder = EventHeap(), Recorder()
    cluster = TimedWorld(plan_of(policy), profile, heap, lambda token: None, None, recorder)
    for time_s, request in requests():
        heap.at(time_s, cluster.submit, request)
    while heap.now_s() < 60.0:
        heap.step()
    cluster.check_empty()
    return recorder


class Follower(ChosenWorld):
    """A world in which happens what happened in another one, at the same moments."""

    step_s = 0.0

    def __init__(self, policy: str, watcher: Recorder) -> None:
        specs = [spec_of(i) for i in range(NUM_INSTANCES)]
        length = NUM_BLOCKS * specs[0].block_size
        super().__init__(FakeModel(NUM_LAYERS), specs, plan_of(policy), length, watcher)

    def follow(self, kind: str, time_s: float, details: tuple[Any, ...]) -> None:
        self.now_s = time_s
        match kind, details:
            case "submit", (request,):
                self.submit(request)
            case "read", (src, dst, _):
                letters = self.links.get((None, dst))  # a simulated instance needs no addresses
                while letters and isinstance(decode(letters[0].data), Connect):
                    self.perform(Delivery(None, dst))
                self.perform(Delivery(src, dst))
            case "event", (src, _):
                self.perform(Delivery(src, None))
            case "start", (instance_id,):
                self.perform(StartStep(instance_id))
            case "finish", (instance_id,):
                self.perform(FinishStep(instance_id))
            case "pulled", (instance_id, what, ok):
                wanted = [pull.what for pull in self.members[instance_id].mover.pulls]
                self.perform(CompletePull(instance_id, wanted.index(what), fails=not ok))
            case "report", (instance_id,):
                self.report(self.members[instance_id])
                self.collect_mail()
            case "tick", ():
                self.tick()


def masked(command: Any) -> Any:
    """Without tokens' values and peers' addresses."""
    if isinstance(command, Deliver):
        token = command.token
        return (token.request_id, token.position, token.finish_reason)
    if isinstance(command, Send) and isinstance(command.message, Connect):
        return (command.instance_id, [peer for peer, _ in command.message.peers])
    if isinstance(command, Send) and isinstance(command.message, Submit):
        request = command.message.request
        made = tuple(0 for _ in request.output_token_ids)
        request = replace(request, output_token_ids=made)
        return (command.instance_id, replace(command.message, request=request))
    return command


@pytest.mark.parametrize("policy", ["recompute", "drop", "drop-paced"])
def test_equal_commands(policy: str) -> None:
    by_time, by_choice = simulated(policy), Recorder()
    world = Follower(policy, by_choice)
    for happening in by_time.happenings:
        world.follow(*happening)
    assert len(by_time.commands) > 1500
    for place, (one, other) in enumerate(zip(by_time.commands, by_choice.commands, strict=True)):
        assert one == other, f"command {place}"
    world.check_empty()
    assert not world.unfinished
    kinds = {record.kind for record in world.records if record.outcome == "done"}
    assert policy == "recompute" or kinds >= {"drop", "restore"}
