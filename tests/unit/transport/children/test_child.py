"""Real children, small ones: how they are started, waited for and ended."""

import asyncio
import errno
import os
import signal
import subprocess

import pytest

from kunserve.transport.children import child as child_module
from kunserve.transport.children.child import Child, Pauses, ended, words_for

SLEEP = ("-c", "import time; time.sleep(100)")


def test_an_end_is_explained() -> None:
    assert words_for(3) == "exit code 3"
    assert words_for(-signal.SIGSEGV) == "exit code -11: ended by SIGSEGV"
    assert words_for(-40) == "exit code -40: ended by signal 40"
    assert "memory ran out" in words_for(-signal.SIGKILL)


def test_a_thread_waits_for_a_child_and_ends_it() -> None:
    child = Child(SLEEP)
    assert child.join(0.0) is None and child.exit_code is None
    assert os.getpgid(child.pid) == child.pid, "a terminal's signals are its parent's"
    assert os.getsid(child.pid) == os.getsid(0), "processors are shared between sessions first"
    assert child.end(0.0) == -signal.SIGKILL == child.exit_code
    child.kill()
    assert Child(("-c", "raise SystemExit(7)")).end(100.0) == 7


def test_a_child_has_the_descriptors_that_it_is_given() -> None:
    ours, theirs = os.pipe()
    child = Child(("-c", f"import os; os.write({theirs}, b'here')"), fds=(theirs,))
    os.close(theirs)
    assert os.read(ours, 10) == b"here" and child.join() == 0
    os.close(ours)


def test_a_loop_sees_the_end_of_a_child_that_many_wait_for() -> None:
    async def story() -> None:
        child = Child(SLEEP).watched()
        waiting = [asyncio.ensure_future(child.wait()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting.pop().cancel()  # who waits no more takes the end from nobody else
        assert await ended(child)
        assert await waiting[0] == words_for(-signal.SIGKILL) == await child.wait()

    asyncio.run(story())


def test_a_child_that_nobody_can_watch_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, "too many files")

    child = Child(SLEEP)
    monkeypatch.setattr(child_module.os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="too many files"):
        child.watched()
    assert child.exit_code == -signal.SIGKILL


class Stubborn:
    """Ends when it wants to."""

    def __init__(self, leaves: bool) -> None:
        self.num_kills = 0
        self._over = asyncio.Event()
        if leaves:
            self._over.set()

    async def wait(self) -> str:
        await self._over.wait()
        return "it ended"

    def kill(self) -> None:
        self.num_kills += 1


def test_nobody_waits_for_ever_for_a_killed_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        assert await ended(Stubborn(leaves=True), 100.0)
        process = Stubborn(leaves=False)
        assert not await ended(process, 0.01) and process.num_kills == 1

    monkeypatch.setattr(child_module, "END_S", 0.01)
    asyncio.run(story())


def test_pauses_double_until_a_child_has_served_for_long() -> None:
    pauses = Pauses()
    assert [pauses.after(0.0) for _ in range(4)] == [0.25, 0.5, 1.0, 2.0]
    assert max(pauses.after(child_module.SOON_S) for _ in range(30)) == child_module.MAX_PAUSE_S
    assert pauses.after(child_module.SOON_S + 1.0) == child_module.FIRST_PAUSE_S


def test_a_program_that_cannot_be_run_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="nowhere"):
        Child((), within=("/nowhere/at/all",), stdout=subprocess.DEVNULL)
