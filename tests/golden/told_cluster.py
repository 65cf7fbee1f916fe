"""A cluster of fake instances that writes down what happens in it, one line each."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest

from kunserve.control.cluster.commands import (
    ControlCommand,
    Deliver,
    LogObserved,
    LogQuarantine,
    LogReason,
    LogRerun,
    LogTransition,
    Respawn,
    ScaleDown,
    ScaleUp,
    Send,
)
from kunserve.control.cluster.controller import Controller
from kunserve.control.cluster.requests.quarantine import NOBODY, Blame
from kunserve.control.instance.body import HostCopy, StepWork
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Message, Rejoin
from kunserve.core.request import Request
from kunserve_lab.world.actions import Action, CompletePull, StartStep
from kunserve_lab.world.fake_body import FakeBody
from kunserve_lab.world.world import Address
from tests.cut_cluster import CutCluster
from tests.golden.letters import (
    command_words,
    copy_words,
    event_words,
    peer_words,
    plan_words,
    pull_words,
    record_words,
)

Copies: TypeAlias = tuple[HostCopy, ...]


class ToldCluster(CutCluster):
    """Every letter when it is sent, every step and pull when it begins or ends.

    Times are virtual: an action takes a millisecond, and a wait as long as it is told to.
    """

    def __init__(self, patch: pytest.MonkeyPatch, **settings: Any) -> None:
        """As ``FakeCluster``. ``patch`` ends with the story."""
        self.lines: list[str] = []
        self._listen(patch)
        super().__init__(**settings)

    def _listen(self, patch: pytest.MonkeyPatch) -> None:
        """Hear what is no letter, and no command: rejoining, copies to host memory."""
        real_rejoin, real_swap = Controller.rejoin, FakeBody.swap_units

        def rejoin(controller: Controller, events: Sequence[Rejoin], now_s: float) -> None:
            for event in events:
                self.note(f"{event.ready.spec.instance_id} -> front {event_words(event)}")
            real_rejoin(controller, events, now_s)

        def swap_units(body: FakeBody, out: Copies, back: Copies, *, beside_step: bool) -> None:
            instance_id, beside = body.spec.instance_id, " beside a step" if beside_step else ""
            for copies, way in ((out, "to host"), (back, "from host")):
                if copies:
                    self.note(f"{instance_id} copies{beside} {way} {copy_words(copies)}")
            real_swap(body, out, back, beside_step=beside_step)

        patch.setattr(Controller, "rejoin", rejoin)
        patch.setattr(FakeBody, "swap_units", swap_units)

    def note(self, text: str) -> None:
        """One line, at this moment."""
        self.lines.append(f"{self.now_s:8.3f} {text}")

    def chapter(self, title: str) -> None:
        """What the story does next."""
        self.lines.append(f"-- {title}")

    # What a story does

    def submit(self, request: Request) -> None:
        """A client sends a request."""
        self.note(f"client: {request.request_id}")
        super().submit(request)

    def cancel(self, request_id: RequestId) -> None:
        """A client goes away."""
        self.note(f"client: {request_id} goes away")
        super().cancel(request_id)

    def kill_instance(self, instance_id: InstanceId, blame: Blame = NOBODY) -> None:
        """An instance dies."""
        self.note(f"{instance_id} dies")
        super().kill_instance(instance_id, blame)

    def start_instance(self, instance_id: InstanceId) -> None:
        """An instance reports for duty."""
        self.note(f"{instance_id} starts")
        super().start_instance(instance_id)

    # What happens then

    def post(self, src: Address, dst: Address, message: Message, hidden: Any = None) -> None:
        """A letter sets out."""
        if src is None:
            words = command_words(message)
        elif dst is None:
            words = event_words(message)
        else:
            words = peer_words(message)
        if words is not None:
            places = ("front" if place is None else place for place in (src, dst))
            self.note(f"{' -> '.join(map(str, places))} {words}")
        super().post(src, dst, message, hidden)

    def perform(self, action: Action) -> None:
        """A step begins, or a pull ends."""
        if isinstance(action, CompletePull):
            pull = self.members[action.instance_id].mover.pulls[action.index]
            fails = " fails" if action.fails else ""
            self.note(f"{action.instance_id} {pull_words(pull.what)}{fails}")
        super().perform(action)
        if isinstance(action, StartStep):
            work = self.members[action.instance_id].work
            if work is not None and isinstance(work.step, StepWork) and work.step.is_first:
                self.note(f"{action.instance_id} {plan_words(work.step.plan)}")

    def drain(self) -> list[ControlCommand]:
        """The controller commands."""
        commands = super().drain()
        for command in commands:
            self._commanded(command)
        return commands

    def _commanded(self, command: ControlCommand) -> None:
        match command:
            case Deliver(token):
                if token.finish_reason is not None:
                    num = token.position + (token.token_id is not None)
                    self.note(f"end {token.request_id}: {token.finish_reason}, {num} tokens")
            case LogTransition(record):
                self.note(record_words(record))
            case Respawn(instance_id):
                self.note(f"respawn {instance_id}")
            case ScaleUp(reason, is_wish):
                self.note(f"scale up{' (a wish)' if is_wish else ''}: {reason}")
            case ScaleDown(instance_id):
                self.note(f"scale down {instance_id}")
            case LogReason(group_id, reason):
                self.note(f"reason g{group_id}: {reason}")
            case LogRerun(request_id, num_tokens):
                self.note(f"again {request_id} after {num_tokens} tokens")
            case LogQuarantine(request_id, reason):
                self.note(f"quarantine {request_id}: {reason}")
            case LogObserved(text):
                self.note(f"observed: {text}")
            case Send():
                pass  # noted when it sets out
