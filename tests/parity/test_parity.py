"""One trace through the simulator and through the in-process cluster: the same commands.

The simulator says when what happens; the in-process cluster (real bytes on its links, fake bodies
with real memory) is led through the same happenings at the same moments. Both controllers must
give the same commands, tokens' values aside: those are the bodies' business.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import kunserve_lab.world.by_choice as in_process
from kunserve.control.cluster.commands import Deliver, Send
from kunserve.control.cluster.controller import Controller
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
from kunserve.core.step import Chunk
from kunserve.core.transfer import KvPull
from kunserve.transport.wire.codec import decode
from kunserve_lab.sim.by_time import TimedWorld
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.sim.models import find_model
from kunserve_lab.sim.profile import InstanceProfile
from kunserve_lab.world.actions import CompletePull, Delivery, FinishStep, StartStep
from kunserve_lab.world.by_choice import ChosenWorld
from kunserve_lab.world.fake_body import FakeModel, fake_spec

NUM_LAYERS, NUM_INSTANCES, MAX_LEN = 6, 3, 200

Happening = tuple[str, float, tuple[Any, ...]]


class LinearTimes:
    """Steps that take as long as they are large."""

    def stage_s(self, chunks: Sequence[Chunk], num_layers: int, is_last: bool) -> float:
        return (0.002 + 1e-4 * sum(chunk.num_tokens for chunk in chunks)) * num_layers


class Recorder:
    """Everything that happened in the simulated cluster, in order."""

    def __init__(self) -> None:
        self.happenings: list[Happening] = []

    def stepped(self, instance_id: InstanceId, work: Any, start_s: float, end_s: float) -> None:
        pass

    def happened(self, kind: str, time_s: float, *details: Any) -> None:
        self.happenings.append((kind, time_s, details))


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


def simulated(policy: Any) -> list[Happening]:
    spec = fake_spec(InstanceId(0), NUM_LAYERS, kv_units=NUM_LAYERS * 60)
    profile = InstanceProfile(
        model=find_model("smollm2-135m"),
        spec=spec,
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
    return recorder.happenings


class Follower:
    """The in-process cluster, led by a recording."""

    def __init__(
        self, policy: Any, log: list[tuple[float, Any]], patch: pytest.MonkeyPatch
    ) -> None:
        patch.setattr(in_process, "STEP_S", 0.0)
        real_drain = Controller.drain

        def drain(controller: Controller) -> Any:
            commands = real_drain(controller)
            log.extend((self.cluster.now_s, command) for command in commands)
            return commands

        patch.setattr(Controller, "drain", drain)
        specs = [
            fake_spec(InstanceId(i), NUM_LAYERS, kv_units=NUM_LAYERS * 60)
            for i in range(NUM_INSTANCES)
        ]
        self.cluster = ChosenWorld(
            FakeModel(NUM_LAYERS), specs, plan_of(policy), profile_length(specs[0])
        )

    def follow(self, kind: str, time_s: float, details: tuple[Any, ...]) -> None:
        cluster = self.cluster
        cluster.now_s = time_s
        match kind, details:
            case "submit", (request,):
                cluster.submit(request)
            case "read", (src, dst, _):
                self._skip_addresses(dst)
                cluster.perform(Delivery(src, dst))
            case "event", (src, _):
                cluster.perform(Delivery(src, None))
            case "start", (instance_id,):
                cluster.perform(StartStep(instance_id))
            case "finish", (instance_id,):
                cluster.perform(FinishStep(instance_id))
            case "pulled", (instance_id, what, ok):
                index = self._find(instance_id, what)
                cluster.perform(CompletePull(instance_id, index, fails=not ok))
            case "report", (instance_id,):
                cluster.members[instance_id].agent.report(time_s)
                cluster.collect_mail()
            case "tick", ():
                cluster.controller.tick(time_s)
                cluster.carry_out()

    def _skip_addresses(self, dst: InstanceId) -> None:
        """The simulator's instances need no addresses."""
        letters = self.cluster.links.get((None, dst))
        while letters and isinstance(message := decode(letters[0].data), Connect):
            letters.popleft()
            self.cluster.connect(dst, message)

    def _find(self, instance_id: InstanceId, what: Any) -> int:
        pulls = self.cluster.members[instance_id].mover.pulls
        for index, pull in enumerate(pulls):
            if isinstance(what, KvPull):
                if pull.what == what:
                    return index
            elif not isinstance(pull.what, KvPull) and (pull.what.layers, pull.what.src) == (
                what.layers,
                what.src,
            ):
                return index
        raise AssertionError((what, pulls))


def profile_length(spec: Any) -> int:
    return min(8192, spec.kv_units // spec.num_layers * spec.block_size)


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
def test_equal_commands(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    happenings = simulated(policy)
    log: list[tuple[float, Any]] = []
    follower = Follower(policy, log, monkeypatch)
    for kind, time_s, details in happenings:
        if kind != "command":
            follower.follow(kind, time_s, details)
    expected = [(t, masked(details[0])) for kind, t, details in happenings if kind == "command"]
    found = [(t, masked(command)) for t, command in log]
    assert len(expected) > 1500
    for place, (one, other) in enumerate(zip(expected, found, strict=False)):
        assert one == other, f"command {place}"
    assert len(expected) == len(found)
    follower.cluster.check_empty()
    assert not follower.cluster.unfinished
    kinds = [record.kind for record in follower.cluster.records if record.outcome == "done"]
    if policy != "recompute":
        assert "drop" in kinds and "restore" in kinds
