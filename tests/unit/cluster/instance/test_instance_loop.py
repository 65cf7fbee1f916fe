"""What a turn of an instance's loop promises, over wires that end in this process."""

import os
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from kunserve.cluster.instance import exchange_pause, long_steps
from kunserve.cluster.instance import loop as instance_loop
from kunserve.cluster.instance.device_loop import DeviceLoop
from kunserve.cluster.instance.long_steps import LongSteps
from kunserve.cluster.instance.loop import InstanceLoop
from kunserve.cluster.instance.mover import LayerLoader
from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.state import AgentConfig
from kunserve.core.config import ClusterConfig, SchedulerConfig
from kunserve.core.ids import GroupId, InstanceId, RequestId, StepId
from kunserve.core.layout import GroupLayout, LayerRange, Stage
from kunserve.core.messages import (
    Abort,
    Activation,
    Form,
    Message,
    Outputs,
    Ready,
    Shutdown,
    Submit,
)
from kunserve.core.plan import NOTHING_MEASURED
from kunserve.core.request import Request, SamplingParams
from kunserve.core.snapshots import HeadShape, StageTime
from kunserve.core.step import Chunk, StepPlan
from kunserve.core.tokens import TokenIds
from kunserve.core.transfer import PeerAddress
from kunserve_lab.world.fake_body import FakeBody, FakeModel, fake_spec
from kunserve_lab.world.mover import WorldMover

NUM_LAYERS = 4
ZERO, ONE = InstanceId(0), InstanceId(1)
MODEL = FakeModel(NUM_LAYERS)
ABORT = Abort(RequestId("another"))
HEAD = HeadShape(MODEL.vocab_size, 2.0)


class Body(FakeBody):
    """Says when a step begins, and whether one is computed."""

    is_computing = False
    num_launched = 0
    on_step: Callable[[], None] = staticmethod(lambda: None)

    def execute(self, *given: Any) -> Any:
        self.is_computing = True
        self.on_step()
        outcome = super().execute(*given)
        self.is_computing = False
        return outcome

    def launch(self, *given: Any) -> Any:
        self.num_launched += 1
        outcome = self.execute(*given)
        self.is_computing = True
        return outcome

    def collect(self, *given: Any) -> Any:
        self.num_launched -= 1
        self.is_computing = self.num_launched > 0
        return super().collect(*given)


class Mover(WorldMover):
    """Has nothing to move."""

    poll_sockets = ()
    quiet = completed = staticmethod(nullcontext)
    copies_here = False

    def __init__(self) -> None:
        super().__init__()
        self.loader = LayerLoader(lambda layers, gate: None)
        self.completed = list


class Wires:
    """The front's wire and the peers': what comes is in ``mail`` and ``rings``.

    ``events`` has (what, whether a step was computed then) of each look that found something and
    of each message that was sent.
    """

    bell: int | None = None

    @staticmethod
    def where(peer: InstanceId) -> str:
        return ""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.mail: list[Message] = []
        self.when_served: list[Message] = [Shutdown()]
        self.rings: deque[tuple[Message, Any]] = deque()
        self.events: list[tuple[Any, bool]] = []
        self.poll_sockets: tuple[int, ...] = ()
        self.sent_to_peer: Callable[[Message, Any], None] = lambda message, hidden: None
        self.woken: Callable[[], None] = lambda: None
        self.looked: Callable[[], None] = lambda: None
        self.channel = SimpleNamespace(
            poll_sockets=(),
            start_heartbeat=lambda *_: None,
            receive=self.receive_mail,
            is_behind=False,
            send=self.send_to_front,
        )

    def note(self, what: Any) -> None:
        self.events.append((what, self.body.is_computing))

    def receive_mail(self) -> list[Message]:
        self.looked()
        mail, self.mail = self.mail, []
        for message in mail:
            self.note(message)
        return mail

    def send_to_front(self, message: Message) -> None:
        self.note(message)
        if isinstance(message, Outputs) and message.tokens[-1].finish_reason is not None:
            self.mail += self.when_served

    def send(self, dst: InstanceId, message: Message, payload: Any) -> None:
        self.note(message)
        self.sent_to_peer(message, payload)

    def receive(self, *, is_brief: bool = False) -> list[tuple[Message, Any]]:
        self.note("rings alone" if is_brief else "rings")
        mail = list(self.rings)
        self.rings.clear()
        return mail

    def awake(self) -> None:
        self.woken()

    faults = tell_counts = begin_anew = unreached = late_contacts = patience_s = staticmethod(
        lambda *_: []
    )

    def whether_computing(self, kind: type[Message]) -> list[bool]:
        """For each message of a kind: whether a step was computed when it came or went."""
        return [is_computing for what, is_computing in self.events if isinstance(what, kind)]

    def names(self) -> list[str]:
        return [what if isinstance(what, str) else type(what).__name__ for what, _ in self.events]


class Instance:
    """One that leads a group: of its own, or with a second stage that answers at once."""

    def __init__(
        self,
        loop: type[InstanceLoop] = InstanceLoop,
        agent: type[InstanceAgent] = InstanceAgent,
        num_stages: int = 1,
        head: HeadShape | None = None,
        *,
        leads: bool = True,
        body: type[Body] | None = None,
    ) -> None:
        specs = tuple(fake_spec(i, NUM_LAYERS, 64, head=head) for i in (ZERO, ONE))
        self.body, self.mover = (body or Body)(specs[0], MODEL), Mover()
        self.agent = make_agent(agent, self.body, self.mover)
        self.wires = wires = Wires(self.body)
        bounds = (0, NUM_LAYERS) if num_stages == 1 else (0, 2, NUM_LAYERS)
        layers = [LayerRange(*bound) for bound in pairwise(bounds)]
        order = range(num_stages) if leads else reversed(range(num_stages))
        stages = tuple(Stage(InstanceId(i), one) for i, one in zip(order, layers, strict=True))
        self.leads = leads
        form = Form(GroupLayout(GroupId(1), stages), specs[:num_stages])
        wires.mail.append(form)
        if num_stages > 1:
            self.peer_body = FakeBody(specs[1], MODEL)
            self.peer = make_agent(InstanceAgent, self.peer_body, WorldMover())
            self.peer.on(form, 0.0)
            wires.sent_to_peer = self.tell_peer
        ready = Ready(specs[0], PeerAddress("links", "bulk"), 64, "fake")
        self.make_loop = lambda: loop(
            self.agent,
            self.body,  # type: ignore[arg-type]
            wires.channel,  # type: ignore[arg-type]
            wires,  # type: ignore[arg-type]
            self.mover,  # type: ignore[arg-type]
            ClusterConfig(check_invariants=True),
            ready,
        )

    def serve(self, num_tokens: int = 1) -> Wires:
        """One request, to its end."""
        request = Request(RequestId("r"), TokenIds((5, 6, 7)), SamplingParams(num_tokens), 0.0)
        if self.leads:
            self.wires.mail.append(Submit(request))
        else:
            self.tell_peer(Submit(request), None)
        return self.run()

    def run(self) -> Wires:
        self.make_loop().run()
        return self.wires

    def tell_peer(self, message: Message, payload: Any) -> None:
        hidden = None if payload is None else FakeBody.hidden_from_bytes(bytes(payload))
        self.peer.on(message, 0.0, hidden)
        while (work := self.peer.next_work(0.0)) is not None:
            self.peer.finished(work, work.run(self.peer_body), 0.0)
        answers, self.peer.outbox[:] = tuple(self.peer.outbox), ()
        for dst, answer, beside in answers:
            if dst == ZERO:
                data = None if beside is None else FakeBody.hidden_to_bytes(beside)
                self.wires.rings.append((answer, data))
            elif dst is None and not self.leads:
                self.wires.send_to_front(answer)


def make_agent(kind: type[InstanceAgent], body: FakeBody, mover: WorldMover) -> InstanceAgent:
    instance_id = body.spec.instance_id
    config = AgentConfig(instance_id, SchedulerConfig(), NOTHING_MEASURED, frozenset(), 64)
    return kind(config, body, mover)


class Exchanging(InstanceAgent):
    is_exchanging = True  # type: ignore[assignment]


class InTransition(InstanceAgent):
    is_in_transition = True  # type: ignore[assignment]


# When mail is read


def read_in_steps(
    agent: type[InstanceAgent] = InstanceAgent, loop: type[InstanceLoop] = InstanceLoop
) -> list[bool]:
    """A message comes in each of three steps: whether it is read before its step ends."""
    instance = Instance(loop, agent)
    instance.body.on_step = lambda: instance.wires.mail.append(ABORT)
    return instance.serve(num_tokens=3).whether_computing(Abort)


def test_mail_waits_for_the_end_of_a_short_step() -> None:
    assert read_in_steps() == [False] * 3


def test_mail_is_read_in_the_middle_of_a_step_in_an_exchange() -> None:
    assert read_in_steps(Exchanging) == [True] * 3


def test_mail_is_read_in_the_middle_of_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once one of as many tokens has lasted: a prompt says nothing of decodes."""
    monkeypatch.setattr(long_steps, "LONG_STEP_S", 0.0)
    monkeypatch.setattr(instance_loop, "LOOK_GAP_S", 0.0)
    assert read_in_steps() == [False, False, True]


def test_looking_up_is_not_done_between_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_steps, "LONG_STEP_S", 0.0)
    monkeypatch.setattr(instance_loop, "LOOK_GAP_S", 1e9)
    assert read_in_steps() == [False] * 3


def test_a_long_prompt_says_nothing_of_the_decodes_after_it() -> None:
    steps = LongSteps()
    for num_tokens, seconds, least in (
        (8, 0.01, None),
        (512, 0.3, 512),
        (8, 0.01, 512),
        (256, 0.15, 256),
        (300, 0.05, 301),
        (8, 0.2, 8),
    ):
        steps.learn(plan_of(num_tokens), seconds)
        found = [n for n in range(1, 600) if steps.may_last(plan_of(n))]
        assert found == list(range(least or 600, 600)), (num_tokens, seconds)


def plan_of(num_tokens: int) -> StepPlan:
    return StepPlan(GroupId(0), StepId(0), (), (), (Chunk(RequestId("r"), 0, num_tokens, 1),))


@pytest.mark.parametrize("agent", [InstanceAgent, InTransition])
@pytest.mark.parametrize("rings", ["the bell", "another socket", "both", "nothing"])
def test_only_rings_are_read_where_only_a_stage_has_woken_the_loop(
    rings: str, agent: type[InstanceAgent]
) -> None:
    instance = Instance(agent=agent)
    wires = instance.wires
    wires.mail = [Shutdown()]
    wires.rings.append((Shutdown(), None))
    bell, socket = (os.eventfd(0) for _ in range(2))
    wires.bell, wires.poll_sockets = bell, (bell, socket)
    for descriptor, ringing in ((bell, "the bell"), (socket, "another socket")):
        if rings in (ringing, "both"):
            os.eventfd_write(descriptor, 1)
    instance.run()
    only_rings = rings == "the bell" and agent is InstanceAgent
    assert wires.names() == (["rings alone"] if only_rings else ["Shutdown", "rings"])
    for descriptor in (bell, socket):
        os.close(descriptor)


def test_a_sleep_without_work_is_no_bubble(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of stages looks before each sleep."""
    time = SimpleNamespace(now_s=1.0, monotonic=lambda: time.now_s)
    monkeypatch.setattr(instance_loop, "time", time)
    instance = Instance(num_stages=2)
    wires = instance.wires
    wires.when_served = []

    def sleep() -> None:
        if wires.rings or wires.mail:
            return
        time.now_s += 1000.0
        if wires.whether_computing(Outputs):
            wires.mail.append(Shutdown())

    wires.woken = sleep
    (*_, stage) = [said for said, _ in instance.serve().events if isinstance(said, StageTime)]
    assert stage.active_s == 0.0, "nothing was in flight in any of the sleeps"


# When mail is sent


def test_the_front_gets_tokens_while_a_device_computes_the_next_step() -> None:
    wires = Instance(DeviceLoop).serve(num_tokens=3)
    assert wires.whether_computing(Outputs) == [True, True, False], "no step follows the last"


def test_it_gets_them_at_once_from_a_body_that_computes_on_the_thread() -> None:
    assert Instance().serve(num_tokens=3).whether_computing(Outputs) == [False] * 3


def test_it_gets_them_at_once_if_a_device_has_no_next_step() -> None:
    assert Instance(DeviceLoop).serve(num_tokens=1).whether_computing(Outputs) == [False]


@pytest.mark.parametrize("loop", [InstanceLoop, DeviceLoop])
def test_no_step_begins_while_the_front_takes_nothing(loop: type[InstanceLoop]) -> None:
    instance = Instance(loop)
    channel, wires = instance.wires.channel, instance.wires
    num_steps, num_looks = 0, 0

    def computed() -> None:
        nonlocal num_steps
        assert not channel.is_behind
        num_steps += 1
        channel.is_behind = num_steps == 2

    def looked() -> None:
        nonlocal num_looks
        num_looks += channel.is_behind
        channel.is_behind = channel.is_behind and num_looks < 5

    instance.body.on_step, wires.looked = computed, looked
    assert len(instance.serve(num_tokens=4).whether_computing(Outputs)) == 4
    assert num_looks == 5, "it has turned on, and read its mail"


@pytest.mark.parametrize("loop", [InstanceLoop, DeviceLoop])
def test_peers_get_theirs_before_the_next_step(loop: type[InstanceLoop]) -> None:
    wires = Instance(loop, num_stages=2).serve(num_tokens=3)
    steps = [what for what, _ in wires.events if isinstance(what, Activation)]
    assert [bool(step.plan.chunks) for step in steps] == [True, True, True, False]
    assert wires.whether_computing(Activation) == [False] * 4, "nor do plans without work wait"
    assert len(wires.whether_computing(Outputs)) == 3


def test_the_output_head_follows_its_step_and_nothing_waits_to_be_sent() -> None:
    names = Instance(num_stages=2, head=HEAD).serve(num_tokens=2).names()
    behind = names[names.index("Activation") + 1 : names.index("Outputs")]
    assert behind, "another stage has to answer first"
    assert set(behind) == {"rings alone"}, "no other mail is looked for, and no step begins"


# Exchanges


class Paused(Instance):
    """An exchange goes on, and the front ends the instance after some looks."""

    def num_steps(self, *, copies_here: bool) -> int:
        self.mover.copies_here = copies_here
        looks, steps = [], []

        def looked() -> None:
            looks.append(1)
            if len(looks) == 8:
                self.wires.mail.append(Shutdown())

        self.wires.looked = looked
        self.body.on_step = lambda: steps.append(1)
        self.serve(num_tokens=30)
        return len(steps)


@pytest.mark.parametrize(
    ("loop", "copies_here", "pause_s", "waits"),
    [
        (InstanceLoop, True, 1e9, True),
        (InstanceLoop, True, 0.0, False),
        (InstanceLoop, False, 1e9, False),
        (DeviceLoop, True, 1e9, False),
    ],
)
def test_no_step_begins_while_kv_is_copied_here(
    monkeypatch: pytest.MonkeyPatch,
    loop: type[InstanceLoop],
    copies_here: bool,
    pause_s: float,
    waits: bool,
) -> None:
    for name in ("QUIET_S", "LONGEST_S"):
        monkeypatch.setattr(exchange_pause, name, pause_s)
    num_steps = Paused(loop, Exchanging).num_steps(copies_here=copies_here)
    assert (num_steps == 0) is waits, "and not for long"


def test_a_step_may_begin_when_no_exchange_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIET_S", "LONGEST_S"):
        monkeypatch.setattr(exchange_pause, name, 1e9)
    assert Paused().num_steps(copies_here=True) > 0


# Memory for a change


class Preparing(InstanceAgent):
    """Four pieces are to be mapped; each says whether a step was computed."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.beside: list[bool] = []

    @property
    def is_preparing(self) -> bool:
        return len(self.beside) < 4

    def prepare(self, now_s: float) -> None:
        body = self.state.body
        assert isinstance(body, Body)
        self.beside.append(body.is_computing)


class AsideBody(Body):
    def execute(self, work: Any, hidden: Any, look_up: Any = None, meanwhile: Any = None) -> Any:
        self.is_computing = True
        if meanwhile is not None:
            meanwhile()
        self.is_computing = False
        return super().execute(work, hidden, look_up)


@pytest.mark.parametrize(
    ("loop", "when_idle", "beside"),
    [(InstanceLoop, True, False), (DeviceLoop, True, False), (DeviceLoop, False, True)],
)
def test_memory_is_mapped_between_steps_or_beside_them(
    loop: type[InstanceLoop], when_idle: bool, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsideBody, "maps_when_idle", when_idle)
    monkeypatch.setitem(globals(), "Body", AsideBody)
    instance = Instance(loop, Preparing)
    instance.agent.state.step_s = 0.0
    wires = instance.serve(num_tokens=6)
    assert isinstance(instance.agent, Preparing)
    found = instance.agent.beside
    assert len(found) == 4
    # Before the group is formed there is nothing that a device could do beside.
    assert any(found) == beside
    assert Outputs in [type(what) for what, _ in wires.events]
