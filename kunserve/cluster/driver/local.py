"""A cluster of processes around one controller: the driver of events, commands and time."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

from kunserve.cluster.api import ServingLimits, Vitals, limits_of
from kunserve.cluster.driver.background import Background
from kunserve.cluster.driver.forced import ForcedTransitions
from kunserve.cluster.driver.group_watch import GroupWatch
from kunserve.cluster.driver.size import SizeDriver
from kunserve.cluster.driver.topology import places_of
from kunserve.cluster.driver.transition_log import log_decision
from kunserve.cluster.processes.front_wires import FrontWires
from kunserve.cluster.processes.launch import (
    FakeSettings,
    InstanceProcess,
    Launcher,
    LocalLauncher,
    startup_error,
)
from kunserve.cluster.processes.orders import InstanceOrders
from kunserve.cluster.processes.processes import Death, Processes
from kunserve.cluster.processes.rejoining import Rejoining
from kunserve.cluster.processes.succession import Succession
from kunserve.cluster.processes.sweep import sweep
from kunserve.cluster.trace import cluster_trace
from kunserve.cluster.waking_clock import WakingClock
from kunserve.control.cluster.commands import (
    Client,
    Condemn,
    ControlCommand,
    Deliver,
    Respawn,
    ScaleDown,
    ScaleUp,
    Send,
)
from kunserve.control.cluster.controller import Controller
from kunserve.control.cluster.standing import Standing
from kunserve.core.errors import ConfigError, InvalidRequest, Overloaded, PromptTooLong, Unavailable
from kunserve.core.faults import Fault
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Alive, Event, Message, Ready, Rejoin, Shutdown
from kunserve.core.plan import Plan
from kunserve.core.request import Request
from kunserve.core.snapshots import ClusterState, StageTime
from kunserve.model.fingerprint import configured_fingerprint
from kunserve.transport.wire.channel import FrontChannel
from kunserve.transport.wire.codec import MalformedMessage
from kunserve.transport.wire.socket_folder import SocketFolder

logger = logging.getLogger(__name__)

TICK_S = 0.1
STUCK_S = 60.0
"""A group with work that completes no step for this long is stuck."""


class LocalCluster:
    """Implements ``EngineClient`` over local processes. Use ``await LocalCluster.start(...)``."""

    def __init__(
        self,
        plan: Plan,
        fake: FakeSettings | None,
        launcher: Launcher,
        succession: Succession | None,
        model_files: str | None = None,
    ) -> None:
        self._config = config = plan.config
        self._fake = fake
        self._succession = succession
        self._launcher = launcher
        ids = succession.ids if succession is not None else ()
        self._first_ids = ids or tuple(map(InstanceId, range(config.cluster.num_instances)))
        places = places_of(config.cluster)
        self._controller = controller = Controller(
            plan, 0 if succession is None else succession.first_id, len(self._first_ids)
        )
        self._clock = clock = WakingClock(time.monotonic)
        self._background = Background()
        self._is_flushing = False
        self._forced = ForcedTransitions(controller, clock.now_s, self._flush, self._until)
        self._sockets = SocketFolder() if succession is None else succession.sockets
        self._wires = FrontWires.open(launcher.front_host, config.cluster, succession)
        network = None if self._wires is None else self._wires.network
        self._channel = FrontChannel(self._on_event, self._on_nonsense, network)
        self._orders = InstanceOrders(
            plan, fake, self._channel, self._sockets, succession, self._wires, model_files, places
        )
        self._processes = Processes(
            config.cluster,
            launcher,
            clock,
            self._background,
            self._orders.of,
            self._on_death,
            self._orders.note,
        )
        self._size = SizeDriver(
            plan, fake, controller, self._processes, launcher, self._channel, clock.now_s
        )
        self._group_watch = GroupWatch(self._processes.patience_s)
        front = "" if succession is None else succession.front
        self._rejoining = Rejoining(self._processes, front)
        self._trace = cluster_trace(config.cluster.trace_out)
        self._ready: dict[InstanceId, Ready] = {}
        self._stage_times: dict[InstanceId, StageTime] = {}
        self._changed = asyncio.Condition()
        self._limits: ServingLimits | None = None
        self._is_draining = self._is_closing = False
        self._has_predecessor = False
        """Whether these settings have worked already, so that a start that fails is tried again."""
        self._startup_error: ConfigError | None = None

    @classmethod
    async def start(
        cls,
        plan: Plan,
        *,
        vocab_size: int,
        fake: FakeSettings | None = None,
        launcher: Launcher | None = None,
        run_folder: Path | None = None,
        on_ready: Callable[[Ready], None] = lambda _: None,
    ) -> "LocalCluster":
        """Spawn every instance and wait until all serve. Raises ConfigError when one cannot.

        With a ``run_folder`` instances outlive this process for a while, and those of an earlier
        one with the same folder and settings are taken over.
        """
        launcher = launcher or LocalLauncher()
        # A replacement must load what its peers have: from them it takes layers.
        files = None if fake is not None else configured_fingerprint(plan.config)
        succession = None
        if run_folder is not None:
            succession = await Succession.begin(run_folder, plan, fake, launcher, files)
        cluster = cls(plan, fake, launcher, succession, files)
        try:
            await cluster._start_all(vocab_size, on_ready)
        except BaseException:
            await cluster.close()
            raise
        return cluster

    async def _start_all(self, vocab_size: int, on_ready: Callable[[Ready], None]) -> None:
        ids = self._first_ids
        found: dict[InstanceId, InstanceProcess] = {}
        loaded: tuple[InstanceId, ...] = ()
        if self._succession is not None:
            found, loaded = await self._succession.take_over(), self._succession.loaded
        if self._wires is None:
            await self._channel.start(self._sockets.address("front"))
        else:
            await self._wires.start(self._channel, found.values())
        with self._background.surviving("sweep"):
            sweep()
        if not found:
            self._launcher.check_start(self._config, self._fake)
        self._trace.begin(ids, found)
        self._has_predecessor = bool(found)
        self._rejoining.begin(found, self._clock.now_s())
        self._background.run("tick", self._tick())
        self._processes.keep({i: found.get(i) for i in ids}, loaded)
        if found:
            await self._rejoin()
        told: set[InstanceId] = set()

        def is_up() -> bool:
            for instance_id in sorted(set(self._ready) - told):
                told.add(instance_id)
                on_ready(self._ready[instance_id])
            num_needed = 1 if found else len(ids)
            return self._startup_error is not None or len(self._ready) >= num_needed

        await self._until(is_up)
        if self._startup_error is not None:
            raise self._startup_error
        limits = limits_of(tuple(self._ready.values()), vocab_size)
        self._limits = self._orders.settled(limits, self._processes)
        placement = self._controller.placement
        await self._until(
            lambda: (
                bool(placement.candidates())
                if found
                else not placement.standing_as(Standing.FORMING)
            )
        )
        self._processes.serve()

    async def _rejoin(self) -> None:
        """Wait until all that run are back, or long enough; then they stand in groups again."""
        await self._until(lambda: self._rejoining.are_back(self._clock.now_s()))
        self._controller.rejoin(self._rejoining.end(), self._clock.now_s())
        self._flush()

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    # Processes

    def _on_death(self, death: Death) -> bool:
        instance_id = death.instance_id
        if self._limits is None and not self._has_predecessor:
            self._startup_error = startup_error(instance_id, death.reason, death.said)
            return False
        was_ready = self._ready.pop(instance_id, None) is not None
        self._channel.forget(instance_id)
        if was_ready:
            self._controller.lost(instance_id, death.reason, self._clock.now_s(), death.blame)
            self._flush()
        elif self._size.gives_up(death):
            self._flush()
            return False
        elif death.said:
            logger.error("%s", startup_error(instance_id, death.reason, death.said))
        return True

    def _on_nonsense(self, instance_id: InstanceId, error: MalformedMessage) -> None:
        self._processes.condemn(instance_id, f"it sent nonsense: {error}", Fault.UNKNOWN)

    # Events and commands

    def _on_event(self, instance_id: InstanceId, event: Message) -> None:
        if instance_id not in self._processes:
            return  # it has left, or is about to
        with self._background.surviving(f"event {type(event).__name__}"):
            self._processes.heard(instance_id, event if isinstance(event, Alive) else None)
            if isinstance(event, Ready | Rejoin):
                if not self._rejoining.is_meant(event):
                    return
                ready = event if isinstance(event, Ready) else event.ready
                lack = None if self._limits is None else self._limits.shortfall(ready)
                if lack is not None:
                    self._processes.condemn(instance_id, lack, Fault.MACHINE)
                    return
                self._ready[instance_id] = ready
                self._processes.ready(instance_id)
            if isinstance(event, Rejoin) and self._rejoining.take(event):
                return
            if isinstance(event, StageTime):
                self._stage_times[instance_id] = event
            self._controller.on(instance_id, cast(Event, event), self._clock.now_s())
        self._flush()

    def _flush(self) -> None:
        """Carry out what the controller has decided, in order, also what is added meanwhile."""
        if self._is_flushing:
            return
        self._is_flushing = True
        may_change = False
        try:
            while commands := self._controller.drain():
                for command in commands:
                    try:  # ``surviving`` for every token would cost more
                        if isinstance(command, Deliver):  # as nearly all are
                            command.client(command.token)
                            continue
                        may_change = True
                        if not isinstance(command, Send):
                            self._carry_out(command)
                        elif not self._channel.send(*command):
                            self._unsent(*command)
                    except Exception:
                        self._background.note(f"command {type(command).__name__}")
        finally:
            self._is_flushing = False
        if may_change:
            self._background.run("notify", self._notify())

    def _carry_out(self, command: ControlCommand) -> None:
        """What is neither a message nor a token: those are sent and delivered."""
        match command:
            case Deliver() | Send() | Respawn():
                pass  # ``Processes`` sees the end of a process itself, also of one not yet ready
            case Condemn(instance_id, reason):
                self._processes.condemn(instance_id, reason, Fault.UNKNOWN)
            case ScaleUp(reason, is_wish=False):
                self._size.grow(reason)
                self._trace.grew(self._processes.ids)
            case ScaleDown(instance_id):
                self._ready.pop(instance_id, None)
                self._stage_times.pop(instance_id, None)
                self._size.shrink(instance_id)
                self._orders.note(self._processes)
            case _:
                log_decision(command)

    def _unsent(self, instance_id: InstanceId, message: Message) -> None:
        """Most likely it has just died; on another host it may be cut off."""
        if instance_id in self._ready:
            reason = f"{type(message).__name__} could not be sent to it"
            is_cut_off = bool(self._wires) and not self._channel.reaches(instance_id)
            self._processes.condemn(instance_id, reason, Fault.UNKNOWN, is_cut_off=is_cut_off)

    async def _notify(self) -> None:
        """Have everybody who waits in ``_until`` look again."""
        async with self._changed:
            self._changed.notify_all()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            with self._background.surviving("watching processes"):
                self._processes.look()
            with self._background.surviving("watching connections"):
                if self._wires is not None and not self._is_closing:
                    self._wires.look(self._ready, self._processes, self._clock.now_s())
            with self._background.surviving("watching groups"):
                self._group_watch.look(self._controller, self._processes, self._clock.now_s())
            with self._background.surviving("tick"):
                self._controller.tick(self._clock.now_s())
            if self._config.cluster.check_invariants:
                with self._background.surviving("check"):
                    self._controller.check()
            with self._background.surviving("hopeless requests"):
                self._end_hopeless()
            self._flush()
            await self._notify()

    def _end_hopeless(self) -> None:
        """While no instance can be started, no request shall wait without a word."""
        if not self._controller.can_serve and self._processes.is_hopeless:
            for request_id in self._controller.give_up_waiting():
                logger.error("request ended, no instance can be started request=%s", request_id)

    # EngineClient

    @property
    def limits(self) -> ServingLimits:
        """See ``EngineClient``."""
        assert self._limits is not None
        return self._limits

    def submit(self, request: Request, deliver: Client) -> None:
        """See ``EngineClient``."""
        if self._is_draining:
            raise Unavailable("the server is shutting down")
        if not self._controller.can_serve:
            raise Unavailable("no instance is alive; a replacement is starting")
        num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        if num_tokens > self.limits.max_model_len:
            raise PromptTooLong(
                f"This model's maximum context length is {self.limits.max_model_len} tokens. "
                f"However, you requested {num_tokens} tokens."
            )
        shed = self._controller.admit(request)
        if shed is not None:
            raise Overloaded(shed.reason, shed.retry_after_s, shed.limit)
        self._controller.arrive(request, deliver, self._clock.now_s())
        self._flush()

    async def admitted(self, request_id: RequestId) -> None:
        """See ``EngineClient``: ``submit`` has said it."""

    def abort(self, request_id: RequestId) -> None:
        """See ``EngineClient``."""
        self._controller.cancel(request_id)
        self._flush()

    def state(self) -> ClusterState:
        """See ``EngineClient``."""
        state = self._controller.state(self._clock.now_s())
        return replace(state, stage_times=tuple(self._stage_times.values()))

    def vitals(self) -> Vitals:
        """See ``EngineClient``."""
        return Vitals(
            num_instances=len(self._processes.ids),
            num_missing=self._processes.num_missing,
            num_starting=self._processes.num_new,
            num_errors=self._background.num_errors,
            pids=self._processes.pids,
        )

    def is_healthy(self) -> bool:
        """See ``EngineClient``."""
        return self._controller.can_serve and not self._is_closing

    def is_progressing(self) -> bool:
        """See ``EngineClient``."""
        return all(load.stuck_s < STUCK_S for load in self.state().loads)

    def num_unfinished(self) -> int:
        """See ``EngineClient``."""
        return self._controller.num_unfinished

    def stop_admission(self) -> None:
        """See ``EngineClient``."""
        self._is_draining = True

    async def drop(self, num_bytes: int | None) -> str:
        """See ``EngineClient``."""
        return await self._forced.drop(num_bytes)

    async def restore(self) -> str:
        """See ``EngineClient``."""
        return await self._forced.restore()

    async def scale(self, num_instances: int) -> str:
        """See ``EngineClient``."""
        said = self._size.resize(num_instances)
        self._flush()
        return said

    def set_paused(self, paused: bool) -> None:
        """See ``EngineClient``."""
        self._controller.set_paused(paused)

    async def reset_prefix_cache(self) -> None:
        """See ``EngineClient``."""
        self._controller.reset_prefix_cache()
        self._flush()

    def pid_of(self, instance_id: InstanceId) -> int | None:
        """The instance's process; None between two."""
        return self._processes.pid_of(instance_id)

    async def kill(self, instance_id: InstanceId) -> None:
        """See ``EngineClient``."""
        if not await self._processes.kill(instance_id):
            raise InvalidRequest(f"instance {instance_id} does not run")

    async def close(self) -> None:
        """See ``EngineClient``."""
        self._is_closing = True
        self._launcher.close()
        await self._processes.close(lambda i: self._channel.send(i, Shutdown()))
        await self._background.close()
        await self._channel.close()
        self._sockets.remove()
        if self._succession is not None:
            self._succession.close()
        self._trace.end(self._controller.transitions.latest())
