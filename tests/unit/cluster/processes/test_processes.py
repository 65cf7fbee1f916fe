"""Processes that are started, watched and replaced; no real process, no model."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from kunserve.cluster.driver.background import Background
from kunserve.cluster.processes import processes as processes_module
from kunserve.cluster.processes.launch import InstanceOrder
from kunserve.cluster.processes.processes import FAILED_STARTS, Death, Processes
from kunserve.cluster.waking_clock import WakingClock
from kunserve.control.cluster.requests.quarantine import Cause
from kunserve.core.config import ClusterConfig, KunServeConfig
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Alive
from kunserve.core.plan import Plan
from kunserve.transport.children import child

ZERO, ONE = InstanceId(0), InstanceId(1)
CONFIG = ClusterConfig(start_timeout_s=50.0, heartbeat_timeout_s=10.0, hang_timeout_s=20.0)


class Process:
    """Ends when told to."""

    def __init__(self, instance_id: InstanceId, pid: int, is_killable: bool) -> None:
        self.instance_id = instance_id
        self.pid = pid
        self.said = b""
        self.exit_code: int | None = None
        self.num_kills = 0
        self.error: Exception | None = None
        self._is_killable = is_killable
        self._over = asyncio.Event()

    async def wait(self) -> str:
        if self.error is not None:
            raise self.error
        await self._over.wait()
        return "it ended"

    def end(self) -> None:
        self._over.set()

    def kill(self) -> None:
        self.num_kills += 1
        if self._is_killable:
            self._over.set()


class World:
    """A launcher, a clock that the test moves, and what was told of deaths."""

    def __init__(self, num_instances: int = 1) -> None:
        self.started: list[Process] = []
        self.deaths: list[Death] = []
        self.error: Exception | None = None
        self.wait_error: Exception | None = None
        """What whoever waits for the next process gets."""
        self.is_killable = True
        self.outside_s = 0.0
        self.background = Background()
        self.processes = Processes(
            CONFIG,
            self,
            WakingClock(lambda: self.outside_s),
            self.background,
            lambda i: InstanceOrder(i, None, "", "", Plan(KunServeConfig())),
            self._on_death,
            self._on_change,
        )
        self.loaded: list[tuple[InstanceId, ...]] = []
        """As it was at each change."""
        self.ids = [InstanceId(i) for i in range(num_instances)]

    async def start(self, order: InstanceOrder) -> Process:
        if self.error is not None:
            raise self.error
        process = Process(order.instance_id, 100 + len(self.started), self.is_killable)
        process.error, self.wait_error = self.wait_error, None
        self.started.append(process)
        return process

    def has_started(self, num: int) -> bool:
        """So many processes in all, and the last one of each instance in its place."""
        return len(self.started) == num and all(
            self.processes.pid_of(i) is not None for i in self.ids
        )

    def _on_death(self, death: Death) -> bool:
        self.deaths.append(death)
        return True

    def _on_change(self, _: Processes) -> None:
        self.loaded.append(self.processes.loaded)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.outside_s += 0.25
            self.processes.look()


async def until(probe: Callable[[], object]) -> None:
    async with asyncio.timeout(30.0):
        while not probe():
            await asyncio.sleep(0.001)


def story(
    tell: Callable[[World], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    num_instances: int = 1,
) -> None:
    monkeypatch.setattr(child, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(processes_module, "END_S", 0.01)
    monkeypatch.setattr(processes_module, "LEAVE_S", 0.01)
    monkeypatch.setattr(child, "END_S", 0.01)

    async def main() -> None:
        world = World(num_instances)
        world.processes.keep(dict.fromkeys(world.ids))
        await until(lambda: world.has_started(num_instances))
        await tell(world)
        await world.processes.close(lambda _: None)
        assert world.background.num_errors == 0
        await world.background.close()

    asyncio.run(main())


def test_a_replacement_that_dies_or_hangs_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(world: World) -> None:
        world.processes.ready(ZERO)
        world.processes.serve()
        world.started[0].end()
        await until(lambda: world.has_started(2))
        assert world.processes.num_missing == 1
        world.started[1].end()  # before it was ready
        await until(lambda: world.has_started(3))
        world.pass_time(CONFIG.start_timeout_s + 1.0)  # it hangs while it loads
        await until(lambda: world.has_started(4))
        assert "not ready within 50 s" in world.deaths[-1].reason
        for number in range(4, 12):
            world.started[-1].end()
            await until(lambda n=number: world.has_started(n + 1))
        world.processes.ready(ZERO)
        assert world.processes.num_missing == 0

    story(tell, monkeypatch)


def test_a_start_that_is_refused_by_the_system_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def tell(world: World) -> None:
        world.processes.ready(ZERO)
        world.error = BlockingIOError("no process left")
        world.started[0].end()
        await until(lambda: len(world.deaths) > FAILED_STARTS)
        assert "no process left" in world.deaths[-1].reason
        assert world.processes.is_hopeless
        world.error = None
        await until(lambda: world.has_started(2))
        world.processes.ready(ZERO)
        assert not world.processes.is_hopeless

    story(tell, monkeypatch)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_start_that_takes_for_ever_holds_up_no_end(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """It is broken off; and what it has started all the same is killed."""
    broken_off: list[InstanceId] = []

    async def start(self: World, order: InstanceOrder) -> Process:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            broken_off.append(order.instance_id)
            if not is_late:
                raise
        self.started.append(Process(order.instance_id, 100, is_killable=True))
        return self.started[-1]

    async def main() -> None:
        world = World()
        world.processes.keep({ZERO: None})
        await asyncio.sleep(0.001)
        async with asyncio.timeout(10.0):
            await world.processes.close(lambda _: None)
        await until(lambda: broken_off == [ZERO])
        if is_late:
            await until(lambda: world.started and world.started[0].num_kills == 1)
        await world.background.close()

    monkeypatch.setattr(processes_module, "END_S", 0.01)
    monkeypatch.setattr(World, "start", start)
    asyncio.run(main())


def test_pauses_between_starts_grow_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def tell(world: World) -> None:
        world.error = OSError("no")
        world.started[0].end()
        await until(lambda: len(pauses) > 12)

    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds != 0.001:
            pauses.append(seconds)
        await sleep(0.0)

    monkeypatch.setattr(processes_module.asyncio, "sleep", note)
    story(tell, monkeypatch)
    assert pauses[:4] == [0.002, 0.004, 0.008, 0.016]
    assert max(pauses) <= child.MAX_PAUSE_S


def test_a_silent_instance_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(world: World) -> None:
        world.processes.ready(ZERO)
        world.processes.heard(ZERO, None)
        world.pass_time(CONFIG.heartbeat_timeout_s - 1.0)
        world.processes.heard(ZERO, None)
        world.pass_time(CONFIG.heartbeat_timeout_s - 1.0)
        assert not world.started[0].num_kills
        world.pass_time(2.0)
        assert world.started[0].num_kills == 1
        await until(lambda: world.deaths)
        assert "no heartbeat" in world.deaths[0].reason

    story(tell, monkeypatch)


def test_a_process_that_was_found_may_load_as_long_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        world = World(3)
        world.started = [Process(i, 100 + i, is_killable=True) for i in world.ids]
        found = dict(zip(world.ids, world.started, strict=True))
        world.processes.keep(found, loaded=(InstanceId(2),))
        await until(lambda: len(world.loaded) == 3)
        assert world.loaded[-1] == (2,), "what an earlier front knew is not forgotten"
        world.processes.heard(ONE, Alive(ONE, 1, 0.0, is_computing=False))
        world.pass_time(CONFIG.heartbeat_timeout_s - 1.0)
        assert [process.num_kills for process in world.started] == [0, 0, 0]
        world.pass_time(2.0)
        assert [process.num_kills for process in world.started] == [0, 1, 1]
        world.pass_time(CONFIG.start_timeout_s - CONFIG.heartbeat_timeout_s - 2.0)
        assert world.started[0].num_kills == 0
        world.pass_time(2.0)
        assert world.started[0].num_kills == 1
        await until(lambda: len(world.deaths) == 3)
        await world.processes.close(lambda _: None)
        await world.background.close()

    monkeypatch.setattr(processes_module, "END_S", 0.01)
    asyncio.run(main())


def test_who_has_loaded_is_known_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(world: World) -> None:
        world.processes.ready(ZERO)
        world.started[0].end()
        await until(lambda: world.has_started(2))
        assert world.loaded == [(), (ZERO,), ()]

    story(tell, monkeypatch)


@pytest.mark.parametrize("error", [OSError("no process"), ValueError("of Ray"), KeyError("order")])
def test_a_place_is_kept_whatever_a_start_raises(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, anything but an OSError ended the keeper, and the instance never came back."""

    async def tell(world: World) -> None:
        world.error = error
        world.started[0].end()
        await until(lambda: len(world.deaths) == 4)
        assert all("cannot be started" in death.reason for death in world.deaths[1:])
        world.error = None
        await until(lambda: world.has_started(2))
        assert bool(world.background.num_errors) is not isinstance(error, OSError), "a bug is told"
        world.background._errors.clear()

    story(tell, monkeypatch)


def test_a_process_that_nobody_can_watch_is_killed_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def tell(world: World) -> None:
        world.wait_error = RuntimeError("the actor has another class")
        world.started[0].end()
        await until(lambda: world.has_started(3))
        assert world.started[1].num_kills == 1
        assert "nobody can watch it: the actor has" in world.deaths[1].reason
        assert world.background.num_errors == 1
        world.background._errors.clear()

    story(tell, monkeypatch)


def beat(world: World, seconds: float, alive: Alive) -> None:
    for _ in range(round(seconds)):
        world.pass_time(1.0)
        world.processes.heard(ZERO, alive)


def test_a_loop_that_stands_still_in_a_step_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(world: World) -> None:
        world.processes.ready(ZERO)
        for turn in range(100):
            beat(world, 1.0, Alive(ZERO, turn, 0.1, is_computing=True))
        assert not world.started[0].num_kills
        beat(world, CONFIG.hang_timeout_s - 2.0, Alive(ZERO, 99, 0.1, is_computing=True))
        assert not world.started[0].num_kills
        beat(world, 4.0, Alive(ZERO, 99, 0.1, is_computing=True))
        assert world.started[0].num_kills == 1
        await until(lambda: world.deaths)
        assert "stands still" in world.deaths[0].reason
        assert world.deaths[0].blame.cause is Cause.INSIDE

    story(tell, monkeypatch)


def test_a_long_step_and_a_long_load_are_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(world: World) -> None:
        world.processes.ready(ZERO)
        beat(world, 290.0, Alive(ZERO, 1, 30.0, is_computing=True))
        beat(world, CONFIG.start_timeout_s - 2.0, Alive(ZERO, 2, 0.1, is_computing=False))
        assert not world.started[0].num_kills
        beat(world, 5.0, Alive(ZERO, 2, 0.1, is_computing=False))
        assert world.started[0].num_kills == 1
        await until(lambda: world.deaths)
        assert world.deaths[0].blame.cause is Cause.OUTSIDE, "no step was computed"

    story(tell, monkeypatch)


def test_a_pause_of_the_front_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(world: World) -> None:
        world.processes.ready(ZERO)
        world.outside_s += 3600.0
        world.processes.look()
        world.pass_time(CONFIG.heartbeat_timeout_s - 1.0)
        assert not world.started[0].num_kills and not world.started[1].num_kills
        # Whoever stays silent afterwards is noticed, and a start that hangs too.
        world.pass_time(CONFIG.start_timeout_s)
        assert world.started[0].num_kills == world.started[1].num_kills == 1

    story(tell, monkeypatch, num_instances=2)


def test_a_process_that_cannot_be_killed_is_given_up_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def tell(world: World) -> None:
        world.processes.ready(ZERO)
        world.is_killable = True
        world.pass_time(CONFIG.heartbeat_timeout_s + 1.0)
        world.pass_time(5.0)
        assert world.started[0].num_kills == 1
        await until(lambda: world.has_started(2))
        assert [death.instance_id for death in world.deaths] == [ZERO]
        world.processes.ready(ZERO)
        assert world.processes.num_missing == 0

    original = Process.kill

    def kill(self: Process) -> None:
        self._is_killable = self.pid != 100
        original(self)

    monkeypatch.setattr(Process, "kill", kill)
    with caplog.at_level(logging.ERROR):
        story(tell, monkeypatch)
    assert caplog.text.count("instance killed instance=0") == 1
    assert caplog.text.count("does not end instance=0") == 1


def test_who_kills_by_hand_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(world: World) -> None:
        world.started[0]._is_killable = False
        assert await world.processes.kill(ZERO)
        assert world.started[0].num_kills == 1
        assert not await world.processes.kill(ONE)
        world.started[0].end()

    story(tell, monkeypatch)


def test_a_change_of_capacity_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def tell(world: World) -> None:
        world.processes.ready(ZERO)
        world.processes.ready(ONE)
        world.processes.serve()
        first = next(p for p in world.started if p.instance_id == ONE)
        first.end()
        for number in range(3, 6):
            await until(lambda n=number: world.has_started(n))
            world.started[-1].end()
        await until(lambda: world.has_started(6))
        world.processes.ready(ONE)

    with caplog.at_level(logging.INFO):
        story(tell, monkeypatch, num_instances=2)
    assert caplog.text.count("capacity is missing instances_missing=1 of=2") == 1
    assert caplog.text.count("capacity is complete instances=2") == 1
    assert "instances_missing=2" not in caplog.text


def test_closing_asks_who_serves_and_kills_the_others_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        monkeypatch.setattr(processes_module, "LEAVE_S", 30.0)
        world = World(3)
        asked: list[InstanceId] = []
        world.processes.keep(dict.fromkeys(world.ids))
        await until(lambda: world.has_started(3))
        world.processes.ready(ZERO)
        world.processes.ready(ONE)

        def leave(instance_id: InstanceId) -> None:
            asked.append(instance_id)
            if asked == [ZERO, ONE]:  # only a close that asks all before it waits gets here
                for process in world.started[:2]:
                    process.end()

        async with asyncio.timeout(25.0):
            await world.processes.close(leave)
        assert asked == [ZERO, ONE]
        assert world.started[2].num_kills == 1
        await world.background.close()

    asyncio.run(main())
