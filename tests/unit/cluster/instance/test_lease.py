"""A lease of one machine: whatever keeps it from looking, it goes on, or ends the process."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kunserve.cluster.instance import lease as lease_module
from kunserve.cluster.instance.lease import LOOK_S, Lease, LeaseTerms
from kunserve.cluster.processes.run_folder import FrontLock

GRACE_S = 30.0


class Died(BaseException):
    pass


class World:
    """A lease whose thread is the test, over a clock that only its sleeps move."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.at_each_look: Callable[[], None] = lambda: None
        time = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep)
        monkeypatch.setattr(lease_module, "time", time)
        monkeypatch.setattr(lease_module, "_die", self._die)
        monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
        self.front = FrontLock(folder)
        assert self.front.try_to_take()
        self.lease = Lease(LeaseTerms(str(folder), "front", GRACE_S))

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.at_each_look()

    def _die(self, reason: str) -> None:
        raise Died(reason)

    def ends(self) -> str:
        with pytest.raises(Died) as died:
            self.lease._watch()
        return str(died.value)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE])
def test_a_look_that_fails_for_a_while_ends_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, the thread ended: the instance never saw its front's end, nor the next front."""
    world = World(tmp_path, monkeypatch)

    def at_each_look() -> None:
        fails = 5.0 < world.now_s < 20.0
        monkeypatch.setattr(lease_module, "read_state", refuse if fails else lambda folder: None)
        if world.now_s > 100.0:
            world.front.release()

    def refuse(folder: Path) -> None:
        raise OSError(number, "not now")

    world.at_each_look = at_each_look
    assert world.ends() == f"no front for {GRACE_S:g} s"
    assert world.now_s == pytest.approx(100.0 + GRACE_S, abs=3 * LOOK_S)
    assert "cannot tell whether there is a front count=1" in caplog.text


def test_a_look_that_fails_for_good_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    monkeypatch.setattr(FrontLock, "is_free", lambda lock: [][1])
    assert world.ends().startswith(f"no front was seen for {GRACE_S:g} s: ")
    assert world.now_s == pytest.approx(GRACE_S, abs=3 * LOOK_S)
