"""The instance's loop where a device computes beside its thread."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from kunserve.cluster.instance.loop import InstanceLoop
from kunserve.control.instance.body import StepOutcome, StepWork
from kunserve.control.instance.work import Work
from kunserve.core.messages import Activation


class Launched(NamedTuple):
    """A step that the device was asked for."""

    work: Work
    asked: Any
    word: memoryview | None
    """For the next stage: where the device writes its hidden states. None where hosts send them."""


class DeviceLoop(InstanceLoop):
    """For a body that computes beside this thread, on a device.

    What a turn promises is the same but for the front's part, tokens above all: if there is a next
    step it is sent while the device computes that, so that the device does not wait for it; else
    before the turn ends. Where the agent can form the step after that one, too, the device is asked
    for it at once, and the next turn waits for it. An exchange takes nothing that the device needs,
    so steps go on. The next stage hears of a microbatch as soon as the device has all that it
    computes it from, if that one's device can wait for the rest.

    In a pipeline the first stage's step ahead reads what the last stage samples of an earlier one,
    from device to device. So it may have begun before this thread knows those tokens; once it does,
    the step behind it can be formed, even while it waits for this one.
    """

    _ahead: Launched | None = None
    """What the body was asked for behind the step that ran last."""
    _is_told = False
    """The next stage has heard of the step that runs."""

    @property
    def _runs_ahead(self) -> bool:
        return self._ahead is not None

    def _send(self, *, begins: bool = False) -> None:
        self._post.send()
        if not (begins or self._runs_ahead or self._agent.has_ready_work()):
            self._post.send_to_front()

    def _gives_way(self) -> bool:
        return False

    def _next_work(self) -> Work | None:
        return super()._next_work() if self._ahead is None else self._ahead.work

    def _execute(
        self, step: StepWork, work: Work, look_up: Callable[[], None] | None
    ) -> StepOutcome:
        launched, self._ahead = self._ahead or self._launch(work, look_up), None
        awaits = work.hidden is not None or step.awaits_tokens
        self._is_told = not awaits and self._tell(launched)
        self._meanwhile()
        self._run_ahead()
        if step.awaits_tokens or self._may_be_behind_others:
            look_up = self._look_around
        if awaits:
            launched_s = time.monotonic()
            is_there = self._body.await_input(launched.asked, look_up)
            self._awaited_s = time.monotonic() - launched_s
            self._is_told = is_there and self._tell(launched)
            self._run_ahead()
        if self._may_be_behind_others:
            self._look_around()
        outcome = self._body.collect(launched.asked, look_up)
        return replace(outcome, is_told=True) if self._is_told else outcome

    def _launch(self, work: Work, look_up: Callable[[], None] | None = None) -> Launched:
        """Ask the device for a step, and to write for others what it gives."""
        step, membership = work.step, self._agent.membership
        assert isinstance(step, StepWork) and membership is not None, work
        asked = self._body.launch(step, work.hidden, look_up)
        if membership.following is not None:
            to = self._peers.where(membership.following)
            return Launched(work, asked, self._body.write_ahead(asked, to))
        if not membership.is_alone:
            word = self._body.write_tokens(asked, self._peers.where(membership.layout.leader))
            self._post.keep_word(step.plan, word)
        return Launched(work, asked, None)

    def _tell(self, launched: Launched) -> bool:
        """Tell the next stage of a microbatch whose hidden states are being written; whether so."""
        membership, step = self._agent.membership, launched.work.step
        assert membership is not None and isinstance(step, StepWork)
        if launched.word is None or membership.following is None:
            return False
        self._post.pass_on(membership.following, Activation(step.plan), launched.word)
        return True

    def _run_ahead(self) -> None:
        """Ask the device for the step behind, if it can be formed now."""
        membership, body = self._agent.membership, self._body
        maps_next = self._agent.is_preparing and body.maps_when_idle
        if self._ahead is not None or membership is None or self._post.has_no_front or maps_next:
            return
        if not (membership.is_alone or self._may_be_behind_others):
            return
        following = self._agent.next_ahead(time.monotonic(), body)
        if following is not None:
            self._ahead = self._launch(following)

    @property
    def _may_be_behind_others(self) -> bool:
        """Whether the device may wait for other stages behind the step that runs.

        Only if they need nothing more of this one to give what it would wait for: neither a word,
        nor what the device's stream would do behind that wait.
        """
        membership, plan = self._agent.membership, self._plan
        if membership is None or plan is None:
            return False
        if membership.scheduler is None:
            is_given = self._is_told or membership.following is None
            return is_given and not plan.scored  # whose logits are wanted when it ends
        return self._is_told and self._body.ahead.feeds_from(membership.layout.group_id)

    def _look_around(self) -> None:
        """While this thread waits for a step: take what comes, and launch the step behind."""
        if self._ahead is None:
            plan, self._plan = self._plan, None  # what fails in here is not the step's doing
            with self._mover.quiet():
                self._post.read_peers(time.monotonic(), is_brief=True)
            self._post.send()
            self._post.send_to_front()
            self._plan = plan
            self._run_ahead()
        self._look_up()
        if self._agent.forming.is_asked:
            self._body.ahead.stop_waiting()

    def _prepare(self) -> None:
        if self._runs_ahead:
            return
        if self._body.maps_when_idle or not self._agent.has_ready_work():
            super()._prepare()

    def _meanwhile(self) -> None:
        self._post.send_to_front()
        if self._agent.is_preparing and not self._body.maps_when_idle:
            super()._prepare()
