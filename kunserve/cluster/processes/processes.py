"""The instances' processes: started, watched, replaced for as long as the cluster lives, ended.

    starting -> ready -> over -> (a pause that doubles) starting ...

A process that misses a deadline is *condemned*: it is killed, and counts as over even if the
kernel cannot end it yet, because a killed process runs none of its code any more.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from kunserve.cluster.driver.background import Background
from kunserve.cluster.processes.launch import InstanceOrder, InstanceProcess, Launcher, blame_for
from kunserve.cluster.waking_clock import WakingClock
from kunserve.control.cluster.requests.quarantine import NOBODY, Blame, blame_of
from kunserve.core.config import ClusterConfig
from kunserve.core.faults import Fault
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Alive
from kunserve.transport.children.child import END_S, LEAVE_S, Pauses, ended

logger = logging.getLogger(__name__)

STEPS_PER_HANG = 10.0
"""A loop that stands still longer than so many of its longest steps hangs."""
FAILED_STARTS = 2
"""Starts in a row that failed, after which nobody should wait for the next one."""


@dataclass(frozen=True, slots=True)
class Death:
    """A process is over."""

    instance_id: InstanceId
    reason: str
    said: bytes
    """What it wrote before its end, if it refused to start."""
    blame: Blame = NOBODY
    """Whether a request may be the cause."""
    num_failed_starts: int = 0
    """Processes in a row, with this one, that were over before they were ready."""
    is_new: bool = False
    """The cluster was to grow by the instance, which has never been ready."""


@dataclass(slots=True)
class _Place:
    """One instance's place in the cluster: the process in it, and how those before it fared."""

    process: InstanceProcess | None = None
    is_ready: bool = False
    was_found: bool = False
    """An earlier front started the process."""
    has_loaded: bool = False
    """The process has been ready, for this front or an earlier one: its heart beats."""
    is_new: bool = False
    """The cluster has grown by it, and it has never been ready yet."""
    keeper: asyncio.Task[None] | None = None
    """Starts one process after the other."""
    since_s: float = 0.0
    """When the process was started, and later when it became ready."""
    heard_s: float = 0.0
    last: Alive | None = None
    moved_s: float = 0.0
    """When its loop was last seen to have moved on."""
    condemned: asyncio.Event = field(default_factory=asyncio.Event)
    verdict: str | None = None
    """Why it was condemned."""
    fault: Fault | None = None
    """If that is known before its end."""
    is_cut_off: bool = False
    """Nobody can tell whether the condemned process ends, so nobody waits for that."""
    pauses: Pauses = field(default_factory=Pauses)
    """Before each but the first."""
    num_failed_starts: int = 0

    @property
    def serves(self) -> bool:
        """Its process may be asked to leave."""
        return self.process is not None and self.is_ready and self.verdict is None


def _kill_started(starting: asyncio.Future[InstanceProcess]) -> None:
    """Nobody wants the process any more, if it was started."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().kill()


class Processes:
    """One process for each instance, always. Belongs to one event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        launcher: Launcher,
        clock: WakingClock,
        background: Background,
        order_of: Callable[[InstanceId], InstanceOrder],
        on_death: Callable[[Death], bool],
        on_change: Callable[["Processes"], None] = lambda _: None,
    ) -> None:
        """``on_death`` says whether the instance is to be started again.

        ``on_change`` is called when ``marks`` or ``loaded`` have changed.
        """
        self._config = config
        self._launcher = launcher
        self._clock = clock
        self._background = background
        self._order_of = order_of
        self._on_death = on_death
        self._on_change = on_change
        self._places: dict[InstanceId, _Place] = {}
        self._removed: set[asyncio.Task[None]] = set()
        """What still goes on for instances that have left."""
        self._num_noted_missing: int | None = None
        """As last logged; None before the cluster serves."""

    # What is known

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._places

    @property
    def ids(self) -> tuple[InstanceId, ...]:
        """Of all instances, whether they serve or not."""
        return tuple(self._places)

    @property
    def num_missing(self) -> int:
        """Instances that do not serve: being started anew, or waiting for the next start."""
        return sum(not place.is_ready and not place.is_new for place in self._places.values())

    @property
    def num_new(self) -> int:
        """Instances by which the cluster grows: not ready yet."""
        return sum(place.is_new for place in self._places.values())

    @property
    def is_hopeless(self) -> bool:
        """No instance serves, and each one has failed to start more than once."""
        return all(
            not place.is_ready and place.num_failed_starts >= FAILED_STARTS
            for place in self._places.values()
        )

    @property
    def marks(self) -> dict[InstanceId, str]:
        """Of all processes, by which a launcher finds them again."""
        places = self._places.items()
        return {i: place.process.mark for i, place in places if place.process is not None}

    @property
    def made_keys(self) -> dict[InstanceId, str]:
        """Public keys of processes that have others than they were ordered with."""
        found = ((i, place.process) for i, place in self._places.items())
        return {i: one.public_key for i, one in found if one is not None and one.public_key}

    @property
    def loaded(self) -> tuple[InstanceId, ...]:
        """Those of them that have been ready, and so have a heart that beats."""
        places = self._places.items()
        return tuple(i for i, place in places if place.process is not None and place.has_loaded)

    def was_found(self, instance_id: InstanceId) -> bool:
        """Whether an earlier front started the instance's process."""
        place = self._places.get(instance_id)
        return place is not None and place.was_found

    def pid_of(self, instance_id: InstanceId) -> int | None:
        """The process in the instance's place; None between two."""
        place = self._places.get(instance_id)
        return None if place is None or place.process is None else place.process.pid

    @property
    def pids(self) -> tuple[tuple[InstanceId, int], ...]:
        """Of all processes."""
        places = self._places.items()
        return tuple((i, place.process.pid) for i, place in places if place.process is not None)

    # Beginnings

    def keep(
        self,
        found: Mapping[InstanceId, InstanceProcess | None],
        loaded: Collection[InstanceId] = (),
    ) -> None:
        """Start every instance, or go on with a process that was found; from now on replace.

        ``loaded``: those that had been ready for an earlier front. The others may load still.
        """
        for instance_id, process in found.items():
            was_found = process is not None
            has_loaded = was_found and instance_id in loaded
            place = _Place(process=process, was_found=was_found, has_loaded=has_loaded)
            self._begin(instance_id, place)

    def add(self, instance_id: InstanceId) -> None:
        """The cluster grows: start one more instance."""
        assert instance_id not in self._places, instance_id
        self._begin(instance_id, _Place(is_new=True))

    def _begin(self, instance_id: InstanceId, place: _Place) -> None:
        self._places[instance_id] = place
        place.keeper = self._background.run(
            f"processes of instance {instance_id}", self._keep(instance_id, place)
        )

    def remove(self, instance_id: InstanceId, ask_to_leave: Callable[[], object]) -> None:
        """The cluster shrinks: the instance may leave by itself for a while, and is ended then."""
        place = self._places.pop(instance_id)
        self._dismiss(place, ask_to_leave)
        end = self._background.run(f"end of instance {instance_id}", self._see_off(place))
        self._removed.add(end)
        end.add_done_callback(self._removed.discard)
        self._note_missing()

    @staticmethod
    def _dismiss(place: _Place, ask_to_leave: Callable[[], object]) -> None:
        assert place.keeper is not None
        place.keeper.cancel()
        if place.serves:
            ask_to_leave()

    @staticmethod
    async def _see_off(place: _Place) -> None:
        assert place.keeper is not None
        await asyncio.gather(place.keeper, return_exceptions=True)
        process = place.process
        if process is None:
            return
        if not await ended(process, LEAVE_S if place.serves else 0.0):
            logger.error("killed, but does not end pid=%d", process.pid)
        place.process = None

    async def _keep(self, instance_id: InstanceId, place: _Place) -> None:
        """One instance's processes, one after the other. Ends when nobody wants it any more."""
        process = place.process
        while True:
            said, exit_code = b"", None
            try:
                if process is None:
                    process = await self._start(instance_id)
                reason = await self._end_of(instance_id, place, process)
                said, exit_code = process.said, process.exit_code
            except Exception as error:
                reason = f"cannot be started: {error}"
                if process is not None:
                    reason = f"nobody can watch it: {error}"
                    process.kill()
                if process is not None or not isinstance(error, OSError):
                    self._background.note(f"processes of instance {instance_id}")
            process = None
            pause_s = self._count_end(place)
            is_wanted = True
            with self._background.surviving("death of an instance"):
                blame = blame_for(exit_code, said) if place.fault is None else blame_of(place.fault)
                death = Death(
                    instance_id, reason, said, blame, place.num_failed_starts, place.is_new
                )
                is_wanted = self._on_death(death)
            if not is_wanted:
                if place.is_new:
                    self._places.pop(instance_id, None)
                return
            logger.error(
                "instance is over instance=%d reason=%r next_start_s=%.2f",
                instance_id,
                reason,
                pause_s,
            )
            self._note_missing()
            await asyncio.sleep(pause_s)

    async def _start(self, instance_id: InstanceId) -> InstanceProcess:
        starting = asyncio.ensure_future(self._launcher.start(self._order_of(instance_id)))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_kill_started)
            await asyncio.wait({starting}, timeout=END_S)
            starting.cancel()  # the launcher ends what it has begun
            raise

    async def _end_of(
        self, instance_id: InstanceId, place: _Place, process: InstanceProcess
    ) -> str:
        """Wait until the process is over; why it is."""
        place.process, place.verdict, place.last = process, None, None
        place.fault, place.is_cut_off = None, False
        place.condemned.clear()
        place.since_s = place.heard_s = place.moved_s = self._clock.now_s()
        self._note_change()
        over = asyncio.ensure_future(process.wait())
        condemned = asyncio.ensure_future(place.condemned.wait())
        try:
            await asyncio.wait({over, condemned}, return_when=asyncio.FIRST_COMPLETED)
            if not over.done():
                await asyncio.wait({over}, timeout=0.0 if place.is_cut_off else END_S)
            if not over.done() and not place.is_cut_off:
                logger.error(
                    "killed, but does not end instance=%d pid=%d", instance_id, process.pid
                )
        finally:
            condemned.cancel()
            over.cancel()
        return place.verdict or over.result()

    def _count_end(self, place: _Place) -> float:
        """Take the process out of its place; how long to wait for the next start."""
        served_s = self._clock.now_s() - place.since_s if place.is_ready else 0.0
        place.num_failed_starts = 0 if place.is_ready else place.num_failed_starts + 1
        place.process, place.is_ready = None, False
        place.was_found = place.has_loaded = False
        return place.pauses.after(served_s)

    # What instances say

    def ready(self, instance_id: InstanceId) -> None:
        """The instance is loaded and serves."""
        place = self._places[instance_id]
        place.is_ready = place.has_loaded = True
        place.is_new = False
        place.num_failed_starts = 0
        place.since_s = place.moved_s = self._clock.now_s()
        self._note_missing()
        self._note_change()

    def _note_change(self) -> None:
        with self._background.surviving("account of the processes"):
            self._on_change(self)

    def heard(self, instance_id: InstanceId, alive: Alive | None) -> None:
        """The instance said something; a heartbeat tells whether its loop moves on."""
        place = self._places[instance_id]
        now_s = place.heard_s = self._clock.now_s()
        if alive is not None:
            if place.last is None or alive.num_turns != place.last.num_turns:
                place.moved_s = now_s
            place.last = alive

    # Watching

    def look(self) -> None:
        """Condemn every process that has missed a deadline. Called about ten times a second."""
        now_s = self._clock.now_s()
        for instance_id, place in self._places.items():
            if place.process is not None and place.verdict is None:
                verdict = self._judge(place, now_s)
                if verdict is not None:
                    self.condemn(instance_id, *verdict)

    def _judge(self, place: _Place, now_s: float) -> tuple[str, Fault] | None:
        config = self._config
        if not place.is_ready:
            if now_s - place.since_s > config.start_timeout_s:
                limit_s = config.start_timeout_s
                late = f"not ready within {limit_s:g} s (--start-timeout raises the limit)"
                return late, Fault.UNKNOWN
            if not (place.was_found and (place.has_loaded or place.last)):
                return None  # a heart beats from the first turn of the loop on
        if now_s - place.heard_s > config.heartbeat_timeout_s:
            return f"no heartbeat for {now_s - place.heard_s:.1f} s", Fault.UNKNOWN
        still_s, last = now_s - place.moved_s, place.last
        limit_s, fault = self._patience_of(place), Fault.REQUEST
        if last is None or not last.is_computing:
            limit_s = max(limit_s, config.start_timeout_s)  # it may load weights, as at a start
            fault = Fault.UNKNOWN
        if still_s <= limit_s:
            return None
        return f"its loop stands still since {still_s:.1f} s", fault

    def patience_s(self, instance_id: InstanceId) -> float:
        """How long the instance may take for what is a step's work."""
        return self._patience_of(self._places[instance_id])

    def longest_step_s(self, instance_id: InstanceId) -> float:
        """Of the instance's steps, as it has told; 0 before it has."""
        last = self._places[instance_id].last
        return 0.0 if last is None else last.longest_step_s

    def _patience_of(self, place: _Place) -> float:
        longest_step_s = 0.0 if place.last is None else place.last.longest_step_s
        return max(self._config.hang_timeout_s, STEPS_PER_HANG * longest_step_s)

    def condemn(
        self, instance_id: InstanceId, reason: str, fault: Fault, *, is_cut_off: bool = False
    ) -> None:
        """Kill the instance's process, for a reason that is logged once.

        One that ``is_cut_off`` counts as over at once, because nothing that it says is heard.
        """
        place = self._places[instance_id]
        if place.process is None or place.verdict is not None:
            return
        place.verdict, place.fault, place.is_cut_off = reason, fault, is_cut_off
        logger.error("instance killed instance=%d reason=%r", instance_id, reason)
        place.process.kill()
        place.condemned.set()

    async def kill(self, instance_id: InstanceId) -> bool:
        """Kill the instance's process and wait a while for its end; False if there is none."""
        place = self._places.get(instance_id)
        process = None if place is None else place.process
        if place is None or process is None:
            return False
        place.fault = Fault.ORDER
        await ended(process)
        return True

    def serve(self) -> None:
        """The cluster serves: from now on every change of its capacity is logged."""
        self._num_noted_missing = 0
        self._note_missing()

    def _note_missing(self) -> None:
        num_missing, num_places = self.num_missing, len(self._places)
        if self._num_noted_missing in (None, num_missing):
            return
        self._num_noted_missing = num_missing
        if num_missing:
            logger.warning(
                "capacity is missing instances_missing=%d of=%d", num_missing, num_places
            )
        else:
            logger.info("capacity is complete instances=%d", num_places)

    # The end

    async def close(self, ask_to_leave: Callable[[InstanceId], object]) -> None:
        """End all processes at once: those that serve are asked first, the others are killed."""
        self._num_noted_missing = None
        places = self._places
        for instance_id, place in places.items():
            self._dismiss(place, partial(ask_to_leave, instance_id))
        await asyncio.gather(*map(self._see_off, places.values()), *self._removed)
