"""Rank 0's side of the other ranks: it starts them, tells them, and dies with them."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kunserve.core.errors import ConfigError
from kunserve.engine.memory.instance_memory import RemapFailed
from kunserve.engine.ranks.control import Answer, Join, Talk, talk_pair
from kunserve.engine.ranks.meeting import PATIENCE_S, Meeting, RankLost
from kunserve.transport.children.child import LEAVE_S, Child

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0
"""How long the thread that computes has to end by itself, and to say of which requests."""
_OUTSIDE = tuple(-n for n in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""Exit codes of a rank that somebody else has ended: the instance ends as if it had been meant."""


Start = Callable[[socket.socket], Child]


def spawn_member(end: socket.socket) -> Child:
    """A child that hears of the rest by this socket."""
    # Standard output is the instance's own: the front reads its last words there.
    program = ("-m", "kunserve.engine.ranks.member", str(end.fileno()))
    return Child(program, fds=(end.fileno(),), stdout=subprocess.DEVNULL)


class Members:
    """All ranks but this process. Words go to all of them."""

    def __init__(
        self,
        num_ranks: int,
        start: Start = spawn_member,
        on_death: Callable[[int, int], None] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Start their processes. ``on_death`` is told the rank and the exit code."""
        self.meeting = Meeting(0, num_ranks, patience_s=patience_s)
        self._patience_s = patience_s
        self._on_death = on_death or self._die_too
        self._is_closing = False
        self._lock = threading.Lock()
        """Held from a word to its answers."""
        self._talks: list[Talk] = []
        self._processes: list[Child] = []
        try:
            for _ in range(1, num_ranks):
                talk, theirs = talk_pair()
                with theirs:
                    self._talks.append(talk)
                    self._processes.append(start(theirs))
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot start {num_ranks - 1} more ranks: {error}") from error

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the other ranks."""
        return tuple(process.pid for process in self._processes)

    def join(self, orders: Sequence[Join], fds: Sequence[int]) -> Callable[[], None]:
        """Tell each rank what it is, with a file; what this gives returns when all have loaded.

        That raises the ConfigError of a rank that cannot.
        """
        self._lock.acquire()
        for talk, order, fd in zip(self._talks, orders, fds, strict=True):
            with contextlib.suppress(RankLost):  # it has ended: whoever awaits it sees how
                talk.say(order, (fd, self.meeting.fd))
        return self._await_start

    def _await_start(self) -> None:
        try:
            for rank, (talk, process) in enumerate(
                zip(self._talks, self._processes, strict=True), 1
            ):
                try:
                    answer, _ = talk.hear()
                except RankLost as error:
                    code = process.join()
                    raise ConfigError(
                        f"rank {rank} of the instance did not start: exit code {code}"
                    ) from error
                assert isinstance(answer, Answer), answer
                if answer.refusal is not None:
                    raise answer.refusal
        finally:
            self._lock.release()
        for rank, process in enumerate(self._processes, 1):
            watch = threading.Thread(
                target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True
            )
            watch.start()

    @contextlib.contextmanager
    def telling(self, word: object, fds: tuple[int, ...] = ()) -> Iterator[list[Any]]:
        """Within, all other ranks do something; behind it, they have, and the list has what they
        say. Raises RankLost.

        An error within waits for them too, so that the next word gets its own answers.
        """
        with self._lock:
            for talk in self._talks:
                talk.say(word, fds)
            said: list[Any] = []
            try:
                yield said
            except BaseException:
                with contextlib.suppress(RankLost):  # what went wrong here is what is told
                    said += self._answers()
                raise
            said += self._answers()

    def _answers(self) -> Iterator[Any]:
        for talk in self._talks:
            answer, _ = talk.hear(self._patience_s)
            assert isinstance(answer, Answer) and answer.refusal is None, answer
            yield answer.said

    def _watch(self, rank: int, process: Child) -> None:
        code = process.join()
        assert code is not None
        if self._is_closing:
            return
        logger.critical("rank is over, and the instance with it rank=%d exit_code=%d", rank, code)
        self.meeting.lose()
        self._on_death(rank, code)

    @staticmethod
    def _die_too(rank: int, code: int) -> None:
        """End this process as the rank has ended, so that whoever watches blames the right one."""
        if code in _OUTSIDE:
            os.kill(os.getpid(), signal.SIGKILL)
        if code == RemapFailed.EXIT_CODE:
            os._exit(code)
        time.sleep(_LAST_WORDS_S)
        os._exit(1)

    def close(self) -> None:
        """Have all ranks leave. What they hold is released when they have."""
        self._is_closing = True
        for talk in self._talks:
            talk.close()
        deadline_s = time.monotonic() + LEAVE_S
        for process in self._processes:
            process.end(max(0.0, deadline_s - time.monotonic()))
        self.meeting.close()
