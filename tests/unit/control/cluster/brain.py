"""A controller whose instances are played by the test: it is told events and asked for commands."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, TypeVar

from kunserve.control.cluster.commands import (
    ControlCommand,
    Deliver,
    LogTransition,
    Outbox,
    Send,
)
from kunserve.control.cluster.controller import Controller
from kunserve.core.config import (
    ClusterConfig,
    InstanceConfig,
    KunServeConfig,
    OverloadConfig,
    SchedulerConfig,
    ServerConfig,
)
from kunserve.core.cost import CostCoefficients
from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.layout import GroupLayout
from kunserve.core.load import LeaderTotals, LoadReport
from kunserve.core.messages import (
    Commit,
    Committed,
    Event,
    ExchangeDone,
    Form,
    Formed,
    LayersLoaded,
    LoadLayers,
    Migrate,
    MigrationOver,
    Outputs,
    Prepare,
    Prepared,
    Ready,
    Report,
    Submit,
    TokenOutput,
)
from kunserve.core.place import ONE_HOST, Place
from kunserve.core.plan import Measured, Plan
from kunserve.core.request import FinishReason, Request, SamplingParams
from kunserve.core.snapshots import TransitionRecord
from kunserve.core.tokens import TokenIds
from kunserve.core.transfer import PeerAddress
from kunserve_lab.world.fake_body import fake_spec

NUM_LAYERS = 4
BLOCKS = 100
"""Of one undropped instance."""
_COUNTERS = {field.name for field in fields(LeaderTotals)}

M = TypeVar("M")


def drained(outbox: Outbox) -> list[ControlCommand]:
    """What is in it, in order; it is empty then."""
    commands, outbox[:] = outbox[:], []
    return commands


class Brain:
    """Every instance is ready; what the controller wants is carried out only when asked for."""

    def __init__(
        self,
        num_instances: int = 2,
        cluster: ClusterConfig | None = None,
        server: ServerConfig | None = None,
        max_num_seqs: int = 256,
        scheduler: SchedulerConfig | None = None,
        num_ranks: Mapping[int, int] = MappingProxyType({}),
        places: Mapping[int, Place] = MappingProxyType({}),
        cost: CostCoefficients | None = None,
        shared_weights_bytes: int = 0,
        **overload: Any,
    ) -> None:
        """``num_ranks`` of instances that have more than one, ``places`` of those that tell."""
        self.num_ranks = num_ranks
        self.places = places
        self.shared_weights_bytes = shared_weights_bytes
        if cluster is None:
            cluster = ClusterConfig(num_instances=num_instances)
        config = KunServeConfig(
            instance=InstanceConfig(block_size=4),
            scheduler=scheduler or SchedulerConfig(max_num_seqs=max_num_seqs),
            overload=OverloadConfig(**{"dwell_s": 0.0, "restore_hold_s": 0.0, **overload}),
            cluster=cluster,
            server=ServerConfig() if server is None else server,
        )
        self.now_s = 100.0
        self.controller = Controller(Plan(config, Measured(cost)))
        self.commands: list[ControlCommand] = []
        self.tokens: list[TokenOutput] = []
        self._numbers: Counter[InstanceId] = Counter()
        self._num_received: Counter[InstanceId] = Counter()
        self._num_requests = 0
        self.slow: set[int] = set()
        """Instances that take their time to form a group: until ``formed``."""
        for number in range(num_instances):
            self.start(number)

    # What happens

    def start(self, number: int) -> None:
        """An instance is ready."""
        num_ranks = self.num_ranks.get(number, 1)
        instance_id = InstanceId(number)
        self._numbers[instance_id] = 0
        spec = fake_spec(instance_id, NUM_LAYERS, NUM_LAYERS * BLOCKS, layer_bytes=3200)
        place = self.places.get(number, ONE_HOST)
        spec = replace(
            spec,
            tensor_parallel_size=num_ranks,
            place=place,
            shared_weights_bytes=self.shared_weights_bytes,
        )
        self.tell(
            number, Ready(spec, PeerAddress(f"links {number}", f"bulk {number}"), 400, "fake")
        )

    def tell(self, number: int, event: Event) -> None:
        """An instance says something."""
        self.controller.on(InstanceId(number), event, self.now_s)
        self._drain()

    def die(self, number: int) -> None:
        """An instance dies."""
        self.controller.lost(InstanceId(number), "killed", self.now_s)
        self._drain()

    def pass_time(self, seconds: float = 0.1) -> None:
        """Time passes; the controller ticks."""
        self.now_s += seconds
        self.controller.tick(self.now_s)
        self._drain()

    def request(
        self,
        prompt_tokens: int = 8,
        max_tokens: int = 8,
        prompt: Sequence[int] | None = None,
        salt: str = "",
        num_prompt_logprobs: int | None = None,
        priority: int = 0,
    ) -> RequestId:
        """A client asks for something: what nobody asked before, if no prompt is given."""
        request_id = RequestId(f"r{self._num_requests}")
        self._num_requests += 1
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, num_prompt_logprobs=num_prompt_logprobs
        )
        if prompt is None:
            prompt = [1000 + self._num_requests] * prompt_tokens
        request = Request(
            request_id, TokenIds(prompt), sampling, self.now_s, cache_salt=salt, priority=priority
        )
        self.controller.arrive(request, self.tokens.append, self.now_s)
        self._drain()
        return request_id

    def report(self, number: int, after_s: float = 0.1, **load: Any) -> None:
        """A leader reports ``load``, counters too; all that was sent to it has arrived."""
        instance_id = InstanceId(number)
        self.now_s += after_s
        self._numbers[instance_id] += 1
        group = self.group_of(number)
        capacity_blocks = self.controller.placement.groups[group.group_id].capacity_blocks
        report = LoadReport(
            group.group_id,
            sequence_number=self._numbers[instance_id],
            num_received=self._num_received[instance_id],
            capacity_blocks=capacity_blocks,
        )
        done = {name: load.pop(name) for name in _COUNTERS & load.keys()}
        report = replace(report, totals=LeaderTotals(**done), **load)
        self.tell(number, Report(instance_id, report))

    def output(self, number: int, request_id: RequestId, end: FinishReason | None = None) -> None:
        """A leader makes the next token of a request."""
        position = sum(t.request_id == request_id for t in self.tokens)
        token = TokenOutput(request_id, position, 7, None, end)
        self.tell(number, Outputs(InstanceId(number), (token,)))

    def keep(self) -> None:
        """Whoever was to move a running request cannot now: it stays."""
        for instance_id, message in self.take(Migrate):
            self.tell(
                instance_id, MigrationOver(message.migration_id, instance_id, "no request can move")
            )

    # Transitions, carried out

    def prepared(self) -> None:
        """Every member that is asked says yes."""
        for instance_id, message in self.take(Prepare):
            self.tell(instance_id, Prepared(message.transition_id, instance_id, None))

    def loaded(self) -> None:
        """Every member of the groups that are asked has loaded its layers."""
        for _, message in self.take(LoadLayers):
            for member in message.members:
                event = LayersLoaded(
                    message.transition_id, member.instance_id, None, 0, 0.0, seconds=0.0
                )
                self.tell(member.instance_id, event)

    def committed(self, leads: dict[int, tuple[RequestId, ...]] | None = None) -> None:
        """Every member that is told commits, and says what it leads."""
        for instance_id, message in self.take(Commit):
            transition = self.controller.transitions.active[message.transition_id]
            layers = next(
                layers
                for layout in transition.record.groups_after
                for member, layers in layout.stages
                if member == instance_id
            )
            sequences = () if leads is None else leads.get(instance_id, ())
            event = Committed(message.transition_id, instance_id, layers, 0, 0, 0.0, 0.0, sequences)
            self.tell(instance_id, event)

    def exchanged(self) -> None:
        """Every new leader has its KV."""
        for transition in tuple(self.controller.transitions.active.values()):
            for layout in transition.record.groups_after:
                event = ExchangeDone(transition.transition_id, layout.group_id, 0, 0, 0.0, 0.0)
                self.tell(layout.leader, event)

    def complete(self) -> None:
        """Whatever transition was begun comes to its end."""
        self.loaded()
        self.prepared()
        self.committed()
        self.exchanged()

    # What is seen

    def take(self, kind: type[M]) -> list[tuple[InstanceId, M]]:
        """Messages of a kind sent since they were last taken, with their addressees."""
        found = [
            (c.instance_id, c.message)
            for c in self.commands
            if isinstance(c, Send) and isinstance(c.message, kind)
        ]
        self.commands = [
            c for c in self.commands if not (isinstance(c, Send) and isinstance(c.message, kind))
        ]
        return found

    def said(self, kind: type[M]) -> list[M]:
        """Commands of a kind that are no messages, since they were last asked for."""
        found = [c for c in self.commands if isinstance(c, kind)]
        self.commands = [c for c in self.commands if not isinstance(c, kind)]
        return found

    @property
    def ended(self) -> list[TransitionRecord]:
        """Transitions that have ended since this was last asked for."""
        return [command.record for command in self.said(LogTransition)]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Members of the groups that stand, by their ids."""
        groups = self.controller.placement.groups
        return [groups[group_id].layout.members for group_id in sorted(groups)]

    def group_of(self, number: int) -> GroupLayout:
        """The group that an instance belongs to."""
        group = self.controller.placement.with_member(InstanceId(number))
        assert group is not None, number
        return group.layout

    def group_id(self, number: int) -> GroupId:
        """Its id."""
        return self.group_of(number).group_id

    def formed(self, number: int) -> None:
        """An instance that was told to form a group has done it."""
        instance_id = InstanceId(number)
        self.tell(number, Formed(instance_id, self.group_id(number), loaded_bytes=0))

    def _drain(self) -> None:
        self.controller.check()
        told = []
        for command in self.controller.drain():
            if isinstance(command, Deliver):
                command.client(command.token)
                continue
            self.commands.append(command)
            if isinstance(command, Send) and isinstance(command.message, Submit):
                self._num_received[command.instance_id] += 1
            if isinstance(command, Send) and isinstance(command.message, Form):
                self._num_received[command.instance_id] = command.message.num_sent
                told.append(command.instance_id)
        for instance_id in told:
            if instance_id not in self.slow:
                self.formed(instance_id)
