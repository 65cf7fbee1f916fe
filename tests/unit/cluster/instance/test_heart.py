"""A process whose heart does not beat says where its threads stand, before it is killed."""

import faulthandler
import os
import tempfile
import time
from collections.abc import Iterator

import pytest

from kunserve.cluster.instance.heart import Heart
from kunserve.core.ids import InstanceId

PATIENCE_S = 30.0


@pytest.fixture
def stderr() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        yield file.fileno()
        faulthandler.cancel_dump_traceback_later()


def said(stderr: int) -> bytes:
    """Read aside, because the watchdog writes where the file's position is."""
    return os.pread(stderr, 1 << 20, 0)


def test_after_a_silence_every_threads_stack_is_written(stderr: int) -> None:
    Heart(InstanceId(0), 0.01, stderr).alive()
    until_s = time.monotonic() + PATIENCE_S
    while b"test_after_a_silence" not in said(stderr) and time.monotonic() < until_s:
        time.sleep(0.001)
    assert b"test_after_a_silence" in said(stderr)


def test_a_heartbeat_tells_what_the_loop_does() -> None:
    heart = Heart(InstanceId(3), PATIENCE_S)
    heart.turn(is_computing=True)
    heart.turn(is_computing=False, step_s=2.0)
    heart.turn(is_computing=False, step_s=1.0)
    heart.leave()
    alive = heart.alive()
    faulthandler.cancel_dump_traceback_later()
    assert (alive.instance_id, alive.num_turns, alive.longest_step_s) == (3, 3, 2.0)
    assert not alive.is_computing
    assert alive.wants_to_leave
