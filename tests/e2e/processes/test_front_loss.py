"""The front dies by ``kill -9``, is stopped, or never comes back; instances are real processes."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from kunserve.cluster.processes.process_mark import mark_of
from tests.conftest import wait_until
from tests.running.front_process import Front

PATIENCE_S = 100.0

pytestmark = pytest.mark.timeout(300)  # a busy machine; the tests have deadlines of their own


class Place:
    """Where fronts come and go."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "run"
        self.faults = root / "faults"
        self.faults.mkdir()

    def front(self, num_instances: int = 2, **settings: object) -> Front:
        return Front(self.folder, num_instances, self.faults, settings)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def is_there(pid: int) -> bool:
    """Alive; one that has ended and was reaped by nobody yet is not."""
    return mark_of(pid) is not None


def wait_for(pids: list[int], *, gone: bool) -> None:
    wait_until(lambda: all(is_there(pid) is not gone for pid in pids), PATIENCE_S)


def whole(front: Front) -> dict[str, object]:
    """The front's state once all instances serve."""

    def state() -> dict[str, object] | None:
        found: dict[str, object] = front.ask("state")
        return None if found["missing"] else found

    return wait_until(state, PATIENCE_S)  # type: ignore[return-value]


def test_a_new_front_takes_the_instances_over(place: Place) -> None:
    with place.front(3) as first:
        first.ask("submit early 2000")
        before = whole(first)
        first.die()
    with place.front(3) as second:
        after = whole(second)
        assert after["pids"] == before["pids"]
        assert [group[0][1] for group in after["groups"]] == [[0, 8]] * 3
        assert min(after["ids"]) > max(before["ids"])  # instances rely on ids that grow
        wait_until(lambda: second.ask("state")["used_blocks"] == 0, PATIENCE_S)
        for i in range(5):
            second.ask(f"submit late-{i} 60")
        second.ask("finish")
        assert second.ask("state")["errors"] == 0
    wait_for(before["pids"], gone=True)
    assert not place.folder.exists()


def test_a_pipeline_stands_again_and_can_be_restored(place: Place) -> None:
    with place.front() as first:
        first.ask("submit early 2000")
        assert "groups=1+1->2" in first.ask("drop")
        before = first.ask("state")
        first.die()
    with place.front() as second:
        after = whole(second)
        assert after["pids"] == before["pids"]
        assert after["groups"] == before["groups"] and len(after["groups"]) == 1
        for i in range(5):
            second.ask(f"submit late-{i} 150")
        second.ask("restore")
        second.ask("finish")
        state = second.ask("state")
        assert len(state["groups"]) == 2 and state["errors"] == 0


def test_three_fronts_and_an_instance_that_dies_between_two(place: Place) -> None:
    with place.front() as first:
        first.ask("drop")
        pids = first.ask("state")["pids"]
        first.die()
    os.kill(pids[1], signal.SIGKILL)
    with place.front() as second:
        state = whole(second)
        assert state["pids"][0] == pids[0] and state["pids"][1] != pids[1]
        assert len(state["groups"]) == 2  # the pipeline cannot stand without one of its stages
        second.ask("submit a 60")
        second.ask("finish")
        pids = state["pids"]
        second.die()
    with place.front() as third:
        assert whole(third)["pids"] == pids
        third.ask("submit b 60")
        third.ask("finish")
        assert third.ask("state")["errors"] == 0


def test_an_instance_that_loads_while_fronts_change_serves_the_new_one(place: Place) -> None:
    with place.front() as first:
        (place.faults / "sleep-1").touch()
        first.ask("kill 1")
        wait_until(lambda: first.ask("state")["pids"][1] is None, PATIENCE_S)
        wait_until(lambda: first.ask("state")["pids"][1] is not None, PATIENCE_S)
        pids = first.ask("state")["pids"]
        # The next front waits for it as for any start, and for the other one as for a heartbeat.
        assert json.loads((place.folder / "state.json").read_text())["loaded"] == [0]
        first.die()
    with place.front() as second:
        (place.faults / "sleep-1").unlink()
        state = whole(second)
        assert state["pids"] == pids and len(state["groups"]) == 2
        second.ask("submit a 30")
        second.ask("finish")
        assert second.ask("state")["errors"] == 0


def test_other_settings_end_the_old_instances(place: Place) -> None:
    with place.front() as first:
        pids = first.ask("state")["pids"]
        first.die()
    with place.front(report_period_s=0.05) as second:
        wait_for(pids, gone=True)
        assert not set(pids) & set(whole(second)["pids"])
        second.ask("submit a 30")
        second.ask("finish")


def test_a_state_that_nobody_can_read(place: Place) -> None:
    with place.front() as first:
        pids = first.ask("state")["pids"]
        first.die()
    (place.folder / "state.json").write_text("{")
    with place.front() as second:
        assert not set(pids) & set(whole(second)["pids"])
        second.ask("submit a 30")
        second.ask("finish")
        wait_for(pids, gone=True)  # the new front's state does not name them


def test_a_second_front_is_refused_while_the_first_lives(place: Place) -> None:
    with place.front() as first:
        second = place.front()
        assert second.wait(PATIENCE_S) not in (None, 0)
        with pytest.raises(AssertionError, match="died"):
            second.hear()
        second.__exit__(None, None, None)
        first.ask("submit a 30")
        first.ask("finish")


def test_without_a_front_everything_ends(place: Place) -> None:
    """Also instances that hang, that are stopped, and that are still loading."""
    with place.front(4, front_grace_s=1.0) as first:
        (place.faults / "sleep-3").touch()
        first.ask("kill 3")
        wait_until(lambda: first.ask("state")["pids"][3] is None, PATIENCE_S)
        wait_until(lambda: first.ask("state")["pids"][3] is not None, PATIENCE_S)
        pids = first.ask("state")["pids"]
        for i in range(3):
            first.ask(f"submit r{i} 4000")
        (place.faults / "hang-0").touch()
        os.kill(pids[1], signal.SIGSTOP)
        first.die()
    wait_for(pids, gone=True)
    wait_until(lambda: not place.folder.exists(), PATIENCE_S)


def test_a_front_that_is_stopped_for_a_while_loses_nobody(place: Place) -> None:
    with place.front(3, heartbeat_timeout_s=5.0, front_grace_s=1.0) as front:
        front.ask("submit a 1500")
        pids = front.ask("state")["pids"]
        front.pause()
        until_s = time.monotonic() + 7.0
        wait_until(lambda: time.monotonic() > until_s, PATIENCE_S)
        front.go_on()
        front.ask("finish")
        assert front.ask("state")["pids"] == pids
        assert front.ask("state")["errors"] == 0


def test_the_folder_is_private(place: Place) -> None:
    with place.front() as front:
        assert place.folder.stat().st_mode & 0o777 == 0o700
        marks = json.loads((place.folder / "state.json").read_text())["marks"]
        assert [int(mark.split(":")[0]) for mark in marks.values()] == front.ask("state")["pids"]
    place.folder.mkdir(mode=0o755)
    place.folder.chmod(0o755)
    other = place.front()
    assert other.wait(PATIENCE_S) not in (None, 0)
    other.__exit__(None, None, None)
