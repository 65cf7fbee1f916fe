"""A simulated instance: when its one thread reads mail, runs a step, or remaps memory."""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kunserve.control.instance.agent import InstanceAgent
from kunserve.control.instance.stage_clock import StageClock
from kunserve.control.instance.work import Work
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Message
from kunserve.core.snapshots import StageTime
from kunserve.core.transfer import KvPull, LayerLoad, LayerPull
from kunserve_lab.sim.body import SimBody
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.sim.mover import SimMover


class Surroundings(Protocol):
    """What an instance asks of the cluster around it."""

    def send_mail(self, instance: "SimInstance", blocked_s: float) -> None:
        """Put what its agent wants to send on the wires, once memory work is over."""
        ...

    def begin_step(self, instance: "SimInstance", work: Work, blocked_s: float) -> float:
        """A step begins after memory work; when it will end."""
        ...

    def end_step(self) -> None:
        """A step has ended, be its instance alive or not."""
        ...

    def note_stage_time(self, time: StageTime) -> None:
        """News of how long a pipeline's stage has computed."""
        ...

    def note(self, kind: str, *details: Any) -> None:
        """Something reaches an agent."""
        ...


class SimInstance:
    """One simulated process. What it is given waits while its thread is busy."""

    def __init__(
        self,
        agent: InstanceAgent,
        body: SimBody,
        mover: SimMover,
        heap: EventHeap,
        surroundings: Surroundings,
        report_period_s: float,
        reads_during_steps: bool,
    ) -> None:
        """``reads_during_steps``: mail need not wait for the end of a step."""
        self.instance_id: InstanceId = body.spec.instance_id
        self.agent = agent
        self.body = body
        self.mover = mover
        self.is_busy = False
        """A step runs, or memory is being remapped."""
        self.is_dead = False
        self._is_computing = False
        self._is_report_due = False
        self._mail: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._heap = heap
        self._surroundings = surroundings
        self._report_period_s = report_period_s
        self._reads_during_steps = reads_during_steps
        self._clock = StageClock(self.instance_id)

    # What it is given

    def read(self, src: InstanceId | None, message: Message, hidden: Any) -> None:
        """A message is here; ``src`` None is the controller."""
        self._take(self._read, src, message, hidden)

    def pulled(self, what: KvPull | LayerPull | LayerLoad, ok: bool) -> None:
        """A pull has ended."""
        self._take(self._pulled, what, ok)

    def report_due(self) -> None:
        """It is time for a load report. The next one is set after it."""
        if self.is_dead:
            return
        if not self.is_busy:
            self._report()
            self._go_on()
        elif self._is_computing and self._reads_during_steps:
            self._report()
            self._send_mail()
        else:
            self._is_report_due = True

    def _take(self, act: Callable[..., None], *args: Any) -> None:
        """Act now if the thread idles, else when it looks up.

        In an exchange every body lets it look up between layers, which is at once here.
        """
        if self.is_dead:
            return
        if not self.is_busy:
            act(*args)
            self._go_on()
        elif self._is_computing and (self._reads_during_steps or self.agent.is_exchanging):
            act(*args)
            self._send_mail()
        else:
            self._mail.append((act, args))

    def _read(self, src: InstanceId | None, message: Message, hidden: Any) -> None:
        self._surroundings.note("read", src, self.instance_id, message)
        self.agent.on(message, self._heap.now_s(), hidden)

    def _pulled(self, what: KvPull | LayerPull | LayerLoad, ok: bool) -> None:
        self._surroundings.note("pulled", self.instance_id, what, ok)
        if isinstance(what, KvPull):
            self.agent.pulled_kv(what, ok, self._heap.now_s())
        else:
            self.agent.pulled_layers(what.layers, what.src, ok, self._heap.now_s())

    def _report(self) -> None:
        self._is_report_due = False
        self._surroundings.note("report", self.instance_id)
        self.agent.report(self._heap.now_s())
        self._look()
        stage_time = self._clock.report()
        if stage_time is not None:
            self._surroundings.note_stage_time(stage_time)
        self._heap.after(self._report_period_s, self.report_due)

    # Steps

    def _go_on(self) -> None:
        """Send what is to be sent, then begin a step if there is one."""
        agent = self.agent
        blocked_s = self.body.take_blocked_s()
        self._send_mail(blocked_s)
        if blocked_s > 0.0:
            self._wait(blocked_s)
            return
        if not agent.has_ready_work():
            return
        self._surroundings.note("start", self.instance_id)
        work = agent.next_work(self._heap.now_s())
        blocked_s = self.body.take_blocked_s()
        self._send_mail(blocked_s)
        if work is not None:
            self.is_busy = self._is_computing = True
            end_s = self._surroundings.begin_step(self, work, blocked_s)
            self._heap.at(end_s, self._finish, work, self._heap.now_s() + blocked_s)
        elif blocked_s > 0.0:
            self._wait(blocked_s)

    def _finish(self, work: Work, began_s: float) -> None:
        self._surroundings.end_step()
        if self.is_dead:
            return
        now_s = self._heap.now_s()
        self._is_computing = False
        self._clock.computed(now_s - began_s)
        self._surroundings.note("finish", self.instance_id)
        self.agent.finished(work, work.run(self.body), now_s)
        self._look_up()

    def _wait(self, blocked_s: float) -> None:
        self.is_busy = True
        self._heap.after(blocked_s, self._look_up)

    def _look_up(self) -> None:
        """The thread is free: read what came meanwhile."""
        if self.is_dead:
            return
        self.is_busy = False
        while self._mail:
            act, args = self._mail.popleft()
            act(*args)
        if self._is_report_due:
            self._report()
        self._go_on()

    def _send_mail(self, blocked_s: float = 0.0) -> None:
        """Called after everything that the agent was told."""
        self._look()
        if self.agent.has_mail:
            self._surroundings.send_mail(self, blocked_s)

    def _look(self) -> None:
        """Let the stage clock see what the group does now."""
        self._clock.look(self.agent.layout, self.agent.num_in_flight, self._heap.now_s())
