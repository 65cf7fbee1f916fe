"""A cluster on this machine: spawned instance processes around one controller."""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kunserve.cluster.api import Deliver as DeliverTo
from kunserve.cluster.api import ServingLimits
from kunserve.cluster.launch import (
    FakeSettings,
    InstanceOrder,
    StartupFailure,
    check_memory,
    start_instance,
)
from kunserve.cluster.trace import begin_trace, join_trace
from kunserve.control.cluster.controller import (
    Announce,
    Controller,
    Deliver,
    Respawn,
    ScaleDown,
    ScaleUp,
    Send,
)
from kunserve.core.config import KunServeConfig
from kunserve.core.errors import (
    ConfigError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Unavailable,
)
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.messages import Event, Message, Ready, Shutdown
from kunserve.core.request import Request
from kunserve.core.snapshots import ClusterState, StageTime, TransitionRecord
from kunserve.transport.channel import FrontChannel
from kunserve.transport.socket_folder import SocketFolder

logger = logging.getLogger(__name__)

TICK_S = 0.1
STUCK_S = 60.0
"""A group with work that completes no step for this long is stuck."""
MAX_RESPAWNS = 5
"""Deaths of one instance within a minute after which it stays dead."""


@dataclass(slots=True)
class _Process:
    """One instance's process and its watcher."""

    process: asyncio.subprocess.Process
    watcher: asyncio.Task[None]


class LocalCluster:
    """Implements ``EngineClient`` over local processes. Use ``await LocalCluster.start(...)``."""

    def __init__(self, config: KunServeConfig, fake: FakeSettings | None) -> None:
        self._config = config
        self._fake = fake
        self._controller = Controller(config)
        self._sockets = SocketFolder()
        self._channel = FrontChannel(self._on_event)
        self._processes: dict[InstanceId, _Process] = {}
        self._deliver: dict[RequestId, DeliverTo] = {}
        self._heard_s: dict[InstanceId, float] = {}
        self._deaths: dict[InstanceId, list[float]] = {}
        self._ready: dict[InstanceId, Ready] = {}
        self._stage_times: dict[InstanceId, StageTime] = {}
        self._changed = asyncio.Condition()
        self._limits: ServingLimits | None = None
        self._is_draining = False
        self._is_closing = False
        self._ticker: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._startup_error: ConfigError | None = None

    @classmethod
    async def start(
        cls,
        config: KunServeConfig,
        *,
        vocab_size: int,
        fake: FakeSettings | None = None,
        on_ready: Callable[[Ready], None] = lambda _: None,
    ) -> "LocalCluster":
        """Spawn every instance and wait until all serve. Raises ConfigError when one cannot."""
        cluster = cls(config, fake)
        try:
            await cluster._start_all(vocab_size, on_ready)
        except BaseException:
            await cluster.close()
            raise
        return cluster

    async def _start_all(self, vocab_size: int, on_ready: Callable[[Ready], None]) -> None:
        if self._fake is None:
            check_memory(self._config)
        await self._channel.start(self._sockets.address("front"))
        self._ticker = asyncio.create_task(self._tick())
        ids = [InstanceId(i) for i in range(self._config.cluster.num_instances)]
        if self._config.cluster.trace_out is not None:
            begin_trace(Path(self._config.cluster.trace_out), ids)
        for instance_id in ids:
            await self._spawn(instance_id)
        told: set[InstanceId] = set()

        def is_up() -> bool:
            for instance_id in sorted(set(self._ready) - told):
                told.add(instance_id)
                on_ready(self._ready[instance_id])
            return self._startup_error is not None or len(self._ready) == len(ids)

        try:
            async with asyncio.timeout(self._config.cluster.start_timeout_s):
                await self._until(is_up)
        except TimeoutError:
            missing = sorted(set(ids) - set(self._ready))
            raise ConfigError(
                f"instances {missing} were not ready within "
                f"{self._config.cluster.start_timeout_s:g} s (--start-timeout raises the limit)"
            ) from None
        if self._startup_error is not None:
            raise self._startup_error
        specs = [ready.spec for ready in self._ready.values()]
        pools = [spec.kv_units // spec.num_layers * spec.block_size for spec in specs]
        self._limits = ServingLimits(
            max_model_len=min(min(pools), *(r.max_model_len for r in self._ready.values())),
            block_size=specs[0].block_size,
            vocab_size=vocab_size,
        )

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    # Processes

    async def _spawn(self, instance_id: InstanceId) -> None:
        order = InstanceOrder(
            instance_id=instance_id,
            fake=self._fake,
            front_address=self._channel.address,
            socket_folder=str(self._sockets.path),
            config=self._config,
        )
        process = await start_instance(order)
        watcher = asyncio.create_task(self._watch(instance_id, process))
        self._processes[instance_id] = _Process(process, watcher)

    async def _watch(self, instance_id: InstanceId, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        said = await process.stdout.read()
        code = await process.wait()
        if self._is_closing:
            return
        if instance_id not in self._ready and self._limits is None:
            self._startup_error = _startup_error(instance_id, said, code)
            await self._notify()
            return
        logger.error("instance died instance=%d exit_code=%s", instance_id, code)
        self._ready.pop(instance_id, None)
        self._channel.forget(instance_id)
        self._controller.lost(instance_id, f"exit code {code}", time.monotonic())
        self._flush()

    async def _respawn(self, instance_id: InstanceId) -> None:
        now_s = time.monotonic()
        deaths = [t for t in self._deaths.get(instance_id, []) if now_s - t < 60.0]
        self._deaths[instance_id] = [*deaths, now_s]
        if len(deaths) >= MAX_RESPAWNS:
            logger.error("instance dies again and again, giving up instance=%d", instance_id)
            return
        await asyncio.sleep(min(10.0, 0.25 * 2 ** len(deaths)))
        if not self._is_closing:
            await self._spawn(instance_id)

    # Events and commands

    def _on_event(self, instance_id: InstanceId, event: Message) -> None:
        self._heard_s[instance_id] = time.monotonic()
        if isinstance(event, Ready):
            self._ready[instance_id] = event
        if isinstance(event, StageTime):
            self._stage_times[instance_id] = event
        self._controller.on(instance_id, _as_event(event), time.monotonic())
        self._flush()

    def _flush(self) -> None:
        notify = False
        for command in self._controller.drain():
            match command:
                case Deliver(token):
                    deliver = self._deliver.get(token.request_id)
                    if token.finish_reason is not None:
                        self._deliver.pop(token.request_id, None)
                    if deliver is not None:
                        deliver(token)
                case Send(instance_id, message):
                    self._channel.send(instance_id, message)
                    notify = True
                case Respawn(instance_id):
                    self._run(self._respawn(instance_id))
                case Announce(record):
                    log_transition(record)
                    notify = True
                case ScaleUp(reason):
                    logger.warning("scale_up_wanted reason=%r", reason)
                case ScaleDown():
                    raise AssertionError("a cluster on one machine does not grow, nor shrink")
        if notify:
            self._run(self._notify())

    def _run(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._kill_silent()
            self._controller.tick(time.monotonic())
            self._flush()
            await self._notify()

    def _kill_silent(self) -> None:
        """A process without a heartbeat hangs (it beats also during a long step): end it."""
        limit_s = self._config.cluster.heartbeat_timeout_s
        for instance_id in self._ready:
            silent_s = time.monotonic() - self._heard_s[instance_id]
            process = self._processes[instance_id].process
            if silent_s > limit_s and process.returncode is None:
                logger.error("no heartbeat instance=%d silent_s=%.1f", instance_id, silent_s)
                process.kill()

    # EngineClient

    @property
    def limits(self) -> ServingLimits:
        """See ``EngineClient``."""
        assert self._limits is not None
        return self._limits

    def submit(self, request: Request, deliver: DeliverTo) -> None:
        """See ``EngineClient``."""
        if self._is_draining:
            raise Unavailable("the server is shutting down")
        if not self._controller.can_serve:
            raise Unavailable("no instance is alive; a replacement is starting")
        asked_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        if asked_tokens > self.limits.max_model_len:
            raise PromptTooLong(
                f"This model's maximum context length is {self.limits.max_model_len} tokens. "
                f"However, you requested {asked_tokens} tokens."
            )
        shed = self._controller.admit(request)
        if shed is not None:
            raise Overloaded(shed.reason, shed.retry_after_s)
        self._deliver[request.request_id] = deliver
        self._controller.arrive(request, time.monotonic())
        self._flush()

    def abort(self, request_id: RequestId) -> None:
        """See ``EngineClient``."""
        self._deliver.pop(request_id, None)
        self._controller.cancel(request_id)
        self._flush()

    def state(self) -> ClusterState:
        """See ``EngineClient``."""
        state = self._controller.state(time.monotonic())
        return replace(state, stage_times=tuple(self._stage_times.values()))

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
        ids = self._controller.force_drop(num_bytes, time.monotonic())
        self._flush()
        if not ids:
            raise InvalidRequest("nothing can be dropped: one group is left, or all are changing")
        return await self._outcome(ids, {"committing", "preparing", "loading"})

    async def restore(self) -> str:
        """See ``EngineClient``."""
        begun = self._controller.force_restore(time.monotonic())
        self._flush()
        ids = [item for item in begun if not isinstance(item, str)]
        if not ids:
            why = "; ".join(str(item) for item in begun) or "no group is dropped"
            raise InvalidRequest(f"nothing was restored: {why}")
        return await self._outcome(ids, {"committing", "preparing", "loading", "exchanging"})

    async def _outcome(self, ids: list[TransitionId], unfinished: set[str]) -> str:
        active = self._controller.transitions.active

        def is_over() -> bool:
            return not any(i in active and active[i].phase in unfinished for i in ids)

        await self._until(is_over)
        records = [r for r in self._controller.transitions.latest() if r.transition_id in ids]
        failed = [r.outcome for r in records if r.outcome not in ("running", "done")]
        if failed:
            raise InvalidRequest("; ".join(failed))
        return "; ".join(describe(record) for record in records)

    async def kill(self, instance_id: InstanceId) -> None:
        """See ``EngineClient``."""
        process = self._processes.get(instance_id)
        if process is None or process.process.returncode is not None:
            raise InvalidRequest(f"instance {instance_id} does not run")
        process.process.send_signal(signal.SIGKILL)
        await process.process.wait()

    async def close(self) -> None:
        """See ``EngineClient``."""
        self._is_closing = True
        if self._ticker is not None:
            self._ticker.cancel()
        for instance_id in self._ready:
            self._channel.send(instance_id, Shutdown())
        for entry in self._processes.values():
            try:
                async with asyncio.timeout(3.0):
                    await entry.process.wait()
            except TimeoutError:
                entry.process.kill()
                await entry.process.wait()
            entry.watcher.cancel()
        for task in tuple(self._background):
            task.cancel()
        await self._channel.close()
        self._sockets.remove()
        if self._config.cluster.trace_out is not None:
            self._join_trace(Path(self._config.cluster.trace_out))

    def _join_trace(self, path: Path) -> None:
        try:
            join_trace(path, self._processes, self._controller.transitions.latest())
        except OSError as error:
            logger.error("cannot write the trace path=%s: %s", path, error.strerror)
        else:
            logger.info("trace written path=%s", path)


def _as_event(message: Message) -> Event:
    return message  # type: ignore[return-value]


def _startup_error(instance_id: InstanceId, said: bytes, code: int | None) -> ConfigError:
    try:
        failure = msgspec.json.decode(said, type=StartupFailure)
    except msgspec.MsgspecError:
        return ConfigError(f"instance {instance_id} died at start with exit code {code}")
    return failure.to_error()


def describe(record: TransitionRecord) -> str:
    """One line on a transition: what, why, and what was measured."""
    before = "+".join("".join(str(len(g.stages))) for g in record.groups_before)
    after = "+".join(str(len(g.stages)) for g in record.groups_after)
    took_s = (record.finished_s or record.started_s) - record.started_s
    return (
        f"{record.kind} id={record.transition_id} outcome={record.outcome!r} "
        f"trigger={record.trigger!r} groups={before}->{after} bytes={record.freed_bytes} "
        f"remap_ms={record.remap_s * 1e3:.2f} gap_ms={record.gap_s * 1e3:.1f} "
        f"requests_moved={record.requests_moved} moved_bytes={record.moved_bytes} "
        f"max_stall_ms={record.max_stall_s * 1e3:.0f} total_ms={took_s * 1e3:.0f}"
    )


def log_transition(record: TransitionRecord) -> None:
    """One line per drop or restore."""
    level = logging.INFO if record.outcome == "done" else logging.WARNING
    logger.log(level, describe(record))
