"""A simulated instance: when its one thread reads mail, runs a step, or remaps memory."""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from kunserve.control.instance.stage_clock import StageClock
from kunserve.control.instance.work import Work
from kunserve.core.config import ClusterConfig
from kunserve_lab.sim.accounts import ClusterAccounts
from kunserve_lab.sim.body import SimBody
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.sim.profile import InstanceProfile
from kunserve_lab.world.mover import WorldMover
from kunserve_lab.world.world import Member, World


class Surroundings(World["SimInstance"]):
    """What an instance asks of the world around it."""

    heap: EventHeap
    profile: InstanceProfile
    accounts: ClusterAccounts

    @abstractmethod
    def compute(self, instance: "SimInstance", work: Work, blocked_s: float) -> None:
        """A step begins after memory work: ``finish`` when it has ended."""


class SimInstance(Member):
    """One simulated process. What it is given waits while its thread is busy."""

    body: SimBody

    def __init__(
        self, world: Surroundings, body: SimBody, mover: WorldMover, config: ClusterConfig
    ) -> None:
        super().__init__(world.make_agent(body, mover), body, mover)
        self.is_busy = False
        """A step runs, or memory is being remapped."""
        self.blocked_s = 0.0
        """How long memory work holds up what is sent now."""
        self._is_computing = False
        self._is_report_due = False
        self._mail: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._world = world
        self._heap = world.heap
        self._report_period_s = config.report_period_s
        self._reads_during_steps = world.profile.reads_during_steps
        """Mail need not wait for the end of a step."""
        self._clock = StageClock(self.instance_id)

    # What it is given

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

    def take(self, act: Callable[..., None], *args: Any) -> None:
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

    def _report(self) -> None:
        self._is_report_due = False
        self._world.report(self)
        self._look()
        stage_time = self._clock.report()
        if stage_time is not None:
            self._world.accounts.note_stage_time(stage_time)
        self._heap.after(self._report_period_s, self.report_due)

    # Steps

    def _go_on(self) -> None:
        """Send what is to be sent, then begin a step if there is one."""
        blocked_s = self.body.take_blocked_s()
        self._send_mail(blocked_s)
        if blocked_s > 0.0:
            self._wait(blocked_s)
            return
        if not self.agent.has_ready_work():
            return
        work = self._world.begin_step(self)
        blocked_s = self.body.take_blocked_s()
        self._send_mail(blocked_s)
        if work is not None:
            self.is_busy = self._is_computing = True
            self._world.compute(self, work, blocked_s)
        elif blocked_s > 0.0:
            self._wait(blocked_s)

    def finish(self, work: Work, began_s: float) -> None:
        """The step that began then, once memory work was over, has ended."""
        self._is_computing = False
        self._clock.computed(self._heap.now_s() - began_s)
        self._world.end_step(self, work)
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
        if self.agent.outbox:
            self.blocked_s = blocked_s
            self._world.send_mail(self)

    def _look(self) -> None:
        """Let the stage clock see what the group does now."""
        self._clock.look(self.agent.layout, self.agent.num_in_flight, self._heap.now_s())
