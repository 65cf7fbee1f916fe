"""When the loop around an agent reads mail."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kunserve.cluster.instance import loop as instance_loop
from kunserve.cluster.instance.loop import InstanceLoop, Woken
from kunserve.cluster.instance.mover import LayerLoader
from kunserve.control.instance.body import StepWork
from kunserve.control.instance.work import Work
from kunserve.core.config import ClusterConfig
from kunserve.core.ids import GroupId, InstanceId, RequestId, StepId
from kunserve.core.layout import LayerRange
from kunserve.core.messages import Abort
from kunserve.core.step import StepPlan
from kunserve.core.transfer import PeerAddress
from kunserve_lab.world.fake_body import fake_spec

NUM_LAYERS = 4
ABORT = Abort(RequestId("r"))


READY = SimpleNamespace(address=PeerAddress("links", "bulk"))


class StepBody:
    """Looks up between the layers of a step, and says when mail comes: in the first one."""

    computes_aside = False

    def __init__(self) -> None:
        self.spec = fake_spec(InstanceId(0), NUM_LAYERS, 8)
        self.mail: list[Any] = []
        self.is_computing = False

    def execute(self, step: Any, hidden: Any, look_up: Any) -> None:
        self.is_computing = True
        self.mail.append(ABORT)
        for _ in range(NUM_LAYERS):
            if look_up is not None:
                look_up()
        self.is_computing = False


def read_in_step(is_exchanging: bool, *, lasts: bool = False) -> list[bool]:
    """Run a step during which a message comes; for each message whether a step ran.

    ``lasts``: steps of as many tokens have lasted.
    """
    body, read = StepBody(), []
    agent = SimpleNamespace(
        is_stopping=False,
        is_exchanging=is_exchanging,
        has_head_work=False,
        is_in_transition=False,
        layout=None,
        num_in_flight=None,
        has_ready_work=lambda: True,
        report=lambda now_s: None,
        has_mail=False,
        drain=list,
        drain_preemptions=list,
        on=lambda message, now_s: read.append(body.is_computing),
    )
    plan = StepPlan(GroupId(0), StepId(0), (), (), ())
    none = np.zeros(0, np.int32)
    steps = [Work(StepWork(plan, LayerRange(0, NUM_LAYERS), True, True, none, none, none), None)]

    def next_work(now_s: float) -> Any:
        agent.is_stopping = not steps
        return steps.pop() if steps else None

    def receive() -> list[Any]:
        mail, body.mail = body.mail, []
        return mail

    agent.next_work = next_work
    agent.finished = lambda work, outcome, now_s: None
    channel = SimpleNamespace(
        poll_sockets=(),
        start_heartbeat=lambda *_: None,
        receive=receive,
        send=lambda message: None,
    )
    peers = SimpleNamespace(
        poll_sockets=(),
        receive=lambda **_: [],
        awake=list,
        bell=None,
        faults=list,
        tell_counts=list,
        unreached=list,
    )
    mover = SimpleNamespace(
        poll_sockets=(),
        quiet=nullcontext,
        completed=list,
        copies_here=False,
        loader=LayerLoader(lambda layers: None),
    )
    loop: Any = InstanceLoop(agent, body, channel, peers, mover, ClusterConfig(), READY)  # type: ignore[arg-type]
    loop._long_tokens = 0 if lasts else None
    loop.run()
    return read


def test_mail_waits_for_the_end_of_a_short_step() -> None:
    assert read_in_step(is_exchanging=False) == [False]


def test_mail_is_read_in_the_middle_of_a_step_in_an_exchange() -> None:
    assert read_in_step(is_exchanging=True) == [True]


def test_mail_is_read_in_the_middle_of_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_loop, "LOOK_GAP_S", 0.0)
    assert read_in_step(is_exchanging=False, lasts=True) == [True]


def test_looking_up_is_not_done_between_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_loop, "LOOK_GAP_S", 1e9)
    assert read_in_step(is_exchanging=False, lasts=True) == [False]


def test_a_long_prompt_says_nothing_of_the_decodes_after_it() -> None:
    loop: Any = object.__new__(InstanceLoop)
    loop._long_tokens = None
    for num_tokens, seconds, long_tokens in (
        (8, 0.01, None),
        (512, 0.3, 512),
        (8, 0.01, 512),
        (256, 0.15, 256),
        (300, 0.05, 301),
        (8, 0.2, 8),
    ):
        loop._learn(num_tokens, seconds)
        assert loop._long_tokens == long_tokens, num_tokens


class DeviceBody(StepBody):
    """Is asked for a step, and free until it is computed."""

    computes_aside = True

    def execute(self, step: Any, hidden: Any, look_up: Any, meanwhile: Any = None) -> None:
        self.is_computing = True
        meanwhile()
        self.is_computing = False

    def hidden_to_bytes(self, hidden: Any) -> memoryview:
        return memoryview(hidden)


def sent_in_steps(num_steps: int, has_more: bool) -> list[tuple[str, int, bool]]:
    """(what, of which step, whether another one was being computed when it was sent)."""
    body, sent, outbox = DeviceBody(), [], []
    done = 0

    def next_work(now_s: float) -> Any:
        agent.is_stopping = done == num_steps
        return None if agent.is_stopping else work

    def finished(work: Any, outcome: Any, now_s: float) -> None:
        nonlocal done
        outbox.extend([(None, f"tokens {done}", None), (InstanceId(1), f"hidden {done}", b"")])
        done += 1

    def drain() -> list[Any]:
        mail = outbox.copy()
        outbox.clear()
        return mail

    def note(message: Any) -> None:
        what, step = message.split()
        sent.append((what, int(step), body.is_computing))

    plan = StepPlan(GroupId(0), StepId(0), (), (), ())
    none = np.zeros(0, np.int32)
    work = Work(StepWork(plan, LayerRange(0, NUM_LAYERS), True, True, none, none, none), None)
    agent = SimpleNamespace(
        is_stopping=False,
        is_exchanging=False,
        has_head_work=False,
        is_in_transition=False,
        layout=None,
        num_in_flight=None,
        has_ready_work=lambda: has_more,
        report=lambda now_s: None,
        has_mail=True,
        drain=drain,
        drain_preemptions=list,
        next_work=next_work,
        finished=finished,
    )
    channel = SimpleNamespace(
        poll_sockets=(), start_heartbeat=lambda *_: None, receive=list, send=note
    )
    peers = SimpleNamespace(
        poll_sockets=(),
        receive=lambda **_: [],
        awake=list,
        bell=None,
        faults=list,
        tell_counts=list,
        unreached=list,
        send=lambda dst, message, payload: note(message),
    )
    mover = SimpleNamespace(
        poll_sockets=(),
        quiet=nullcontext,
        completed=list,
        copies_here=False,
        loader=LayerLoader(lambda layers: None),
    )
    loop: Any = InstanceLoop(agent, body, channel, peers, mover, ClusterConfig(), READY)  # type: ignore[arg-type]
    loop.run()
    return sent


def test_the_front_gets_tokens_while_a_device_computes_the_next_step() -> None:
    sent = sent_in_steps(3, has_more=True)
    assert [(step, beside) for what, step, beside in sent if what == "tokens"] == [
        (0, True), (1, True), (2, False),
    ]  # fmt: skip
    assert [(step, beside) for what, step, beside in sent if what == "hidden"] == [
        (0, False), (1, False), (2, False),
    ], "peers wait for theirs"  # fmt: skip


def test_it_gets_them_at_once_if_there_is_no_next_step() -> None:
    sent = sent_in_steps(2, has_more=False)
    assert [beside for what, _, beside in sent if what == "tokens"] == [False, False]


class HeadAgent:
    """A stage with a step, a part of the output head after it, and words of plans without work."""

    is_stopping = False
    is_in_transition = False
    layout = num_in_flight = None

    def __init__(self) -> None:
        self.events: list[str] = []
        self.outbox: list[Any] = []
        self.rows_left = 0
        self.is_exchanging = False
        plan = StepPlan(GroupId(0), StepId(0), (), (), ())
        none = np.zeros(0, np.int32)
        step = StepWork(plan, LayerRange(0, NUM_LAYERS), True, True, none, none, none)
        self.steps = [Work(step, None)]
        self.head = SimpleNamespace(step=SimpleNamespace(plan=plan), run=lambda body: None)

    @property
    def has_mail(self) -> bool:
        return bool(self.outbox)

    @property
    def has_head_work(self) -> bool:
        return self.rows_left > 0

    def has_ready_work(self) -> bool:
        return bool(self.steps) or self.has_head_work

    def next_work(self, now_s: float) -> Any:
        if self.has_head_work:
            self.rows_left -= 1
            return self.head
        if self.steps:
            return self.steps.pop()
        self.outbox.append((InstanceId(1), "a plan without work", None))
        self.is_stopping = True
        return None

    def finished(self, work: Any, outcome: Any, now_s: float) -> None:
        self.events.append("part" if work is self.head else "step")

    def on(self, message: Any, now_s: float, hidden: Any = None) -> None:
        self.rows_left += 1
        self.outbox.append((InstanceId(1), "answer", None))

    def drain(self) -> list[Any]:
        outbox, self.outbox = self.outbox, []
        return outbox

    drain_preemptions = list
    report = check = staticmethod(lambda *_: None)


def test_the_output_head_follows_its_step_and_nothing_waits_to_be_sent() -> None:
    agent, body = HeadAgent(), StepBody()
    coming = [[("final rows", None)], []]

    def receive(*, is_brief: bool = False) -> list[Any]:
        agent.events.append("brief look" if is_brief else "look")
        return coming.pop(0) if is_brief and coming else []

    channel = SimpleNamespace(
        poll_sockets=(), start_heartbeat=lambda *_: None, receive=list, send=lambda message: None
    )
    peers = SimpleNamespace(
        poll_sockets=(),
        receive=receive,
        awake=list,
        bell=None,
        faults=list,
        tell_counts=list,
        unreached=list,
        send=lambda dst, message, payload: agent.events.append(message),
    )
    mover = SimpleNamespace(
        poll_sockets=(),
        quiet=nullcontext,
        completed=list,
        copies_here=True,
        loader=LayerLoader(lambda layers: None),
    )
    agent.head.step = agent.steps[0].step
    loop: Any = InstanceLoop(agent, body, channel, peers, mover, ClusterConfig(), READY)  # type: ignore[arg-type]
    loop._next_report_s = 1e9
    loop._poller = SimpleNamespace(poll=lambda timeout_ms: agent.events.append("sleep") or [])
    loop._run = lambda work: agent.finished(work, None, 0.0)
    loop.run()
    assert agent.events == [
        *("look", "step", "brief look", "answer", "part", "brief look"),
        *("sleep", "look", "a plan without work"),
    ]


BELL, SOCKET = 7, 8


@pytest.mark.parametrize(
    ("found", "is_in_transition", "expected"),
    [
        ([(BELL, 1)], False, Woken.BY_STAGES),
        ([(BELL, 1)], True, Woken.BY_ANY),
        ([(BELL, 1), (SOCKET, 1)], False, Woken.BY_ANY),
        ([(SOCKET, 1)], False, Woken.BY_ANY),
        ([], False, Woken.BY_ANY),
    ],
)
def test_who_has_woken_the_loop(
    found: list[tuple[int, int]], is_in_transition: bool, expected: Woken
) -> None:
    loop: Any = object.__new__(InstanceLoop)
    loop._agent = SimpleNamespace(
        is_exchanging=False, is_in_transition=is_in_transition, has_ready_work=lambda: False
    )
    loop._awaits_group, loop._lease, loop._beside = False, None, None
    loop._next_report_s = 0.0
    loop._gate = SimpleNamespace(is_waiting=False)
    looks: list[str] = []
    loop._look = lambda: looks.append("clock") or 0.0
    loop._poller = SimpleNamespace(poll=lambda timeout_ms: looks.append("sleep") or found)
    loop._peers = SimpleNamespace(bell=BELL, awake=list)
    assert loop._wait() is expected
    assert looks == ["clock", "sleep"], "a sleep without work would count as a bubble"


@pytest.mark.parametrize(
    ("woken", "expected"),
    [
        (Woken.BY_STAGES, ["rings"]),
        (Woken.BY_ANY, ["all, slept"]),
        (Woken.BUSY, ["all"]),
    ],
)
def test_only_rings_are_read_where_only_a_stage_has_woken_the_loop(
    woken: Woken, expected: list[str]
) -> None:
    loop: Any = object.__new__(InstanceLoop)
    reads: list[str] = []

    class Agent:
        is_exchanging = False

        @property
        def is_stopping(self) -> bool:
            return bool(reads)

        def next_work(self, now_s: float) -> None:
            return None

    loop._agent, loop._lease, loop._trace, loop._checks = Agent(), None, None, False
    loop._channel = SimpleNamespace(start_heartbeat=lambda *_: None)
    loop._mover = SimpleNamespace(quiet=nullcontext)
    loop._heartbeat_period_s, loop._num_turns, loop._longest_step_s = 1.0, 0, 0.0
    loop._awaits_group = False
    loop._wait = lambda: woken
    loop._look = lambda: 0.0
    loop._read_peers = lambda now_s, is_brief: reads.append("rings" if is_brief else "peers")
    loop._read_mail = lambda has_slept: reads.append("all, slept" if has_slept else "all")
    loop._report_if_due = loop._send_mail = loop._send_to_front = lambda: None
    loop.run()
    assert reads == expected


def test_no_step_begins_while_kv_is_copied_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for copies_here, computes_aside, expected in (
        (True, False, True),
        (False, False, False),
        (True, True, False),
    ):
        loop: Any = object.__new__(InstanceLoop)
        loop._agent = SimpleNamespace(is_exchanging=True)
        loop._mover = SimpleNamespace(copies_here=copies_here)
        loop._computes_aside = computes_aside
        loop._exchange_since_s = None
        monkeypatch.setattr(instance_loop, "EXCHANGE_PAUSE_S", 1e9)
        assert loop._gives_way() is expected
        monkeypatch.setattr(instance_loop, "EXCHANGE_PAUSE_S", 0.0)
        assert not loop._gives_way(), "not for long"
        loop._agent.is_exchanging = False
        assert not loop._gives_way() and loop._exchange_since_s is None
