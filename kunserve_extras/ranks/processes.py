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
from kunserve.core.faults import EXIT_MACHINE_FAILED, Fault, fault_of_exit
from kunserve.transport.children.child import LEAVE_S, Child
from kunserve_extras.ranks.control import Answer, Join, Said, Talk, talk_pair
from kunserve_extras.ranks.meeting import EXIT_ANOTHER_LOST, PATIENCE_S, Meeting, RankLost

logger = logging.getLogger(__name__)

_END_S = 5.0
"""How long after a rank was lost its process may take to end: its exit code tells why."""
_LAST_WORDS_S = 2.0
"""How long the thread that computes has to end by itself, and to say of which requests."""


Start = Callable[[socket.socket], Child]


def spawn_member(end: socket.socket) -> Child:
    """A child that hears of the rest by this socket."""
    # Standard output is the instance's own: the front reads its last words there.
    program = ("-m", "kunserve_extras.ranks.member", str(end.fileno()))
    return Child(program, fds=(end.fileno(),), stdout=subprocess.DEVNULL)


class Members:
    """All ranks but this process. Words go to all of them."""

    def __init__(
        self,
        num_ranks: int,
        start: Start = spawn_member,
        on_death: Callable[[int, int], None] | None = None,
        patience_s: float = PATIENCE_S,
        more_words: tuple[type[Any], ...] = (),
    ) -> None:
        """Start their processes. ``on_death`` is told the rank and the exit code.

        ``more_words``: what they are told beside ``control.WORDS``.
        """
        self.meeting = Meeting(0, num_ranks, patience_s=patience_s)
        self.meeting.why = self.why_lost
        self._end: Fault | None = None
        """Of the first rank that was over."""
        self._is_over = threading.Event()
        self._patience_s = patience_s
        self._on_death = on_death or self._die_too
        self._is_closing = False
        self._lock = threading.Lock()
        """Held from a word to its answers."""
        self._talks: list[Talk] = []
        self._processes: list[Child] = []
        try:
            for _ in range(1, num_ranks):
                talk, theirs = talk_pair(more_words)
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

    def join(self, orders: Sequence[Join], fds: Sequence[Sequence[int]]) -> Callable[[], None]:
        """Tell each rank what it is, with its files; what this gives returns when all have loaded.

        That raises the ConfigError of a rank that cannot.
        """
        self._lock.acquire()
        for talk, order, (own, *more) in zip(self._talks, orders, fds, strict=True):
            with contextlib.suppress(RankLost):  # it has ended: whoever awaits it sees how
                talk.say(order, (own, self.meeting.fd, *more))
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
                if answer.failure is not None:
                    raise answer.failure.to_error()
        finally:
            self._lock.release()
        for rank, process in enumerate(self._processes, 1):
            watch = threading.Thread(
                target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True
            )
            watch.start()

    @contextlib.contextmanager
    def telling(self, word: object, fds: tuple[int, ...] = ()) -> Iterator[list[Said]]:
        """Within, all other ranks do something; behind it, they have, and the list has what they
        say. Raises RankLost.

        An error within waits for them too, so that the next word gets its own answers.
        """
        with self._lock:
            for talk in self._talks:
                talk.say(word, fds, self.why_lost)
            said: list[Said] = []
            try:
                yield said
            except BaseException:
                with contextlib.suppress(RankLost):  # what went wrong here is what is told
                    said += self._answers()
                raise
            said += self._answers()

    def _answers(self) -> Iterator[Said]:
        for talk in self._talks:
            answer, _ = talk.hear(self._patience_s, self.why_lost)
            assert isinstance(answer, Answer) and answer.failure is None, answer
            yield answer.said

    def _watch(self, rank: int, process: Child) -> None:
        code = process.join()
        assert code is not None
        if self._is_closing:
            return
        logger.critical("rank is over, and the instance with it rank=%d exit_code=%d", rank, code)
        if code != EXIT_ANOTHER_LOST:
            self._end = self._end or fault_of_exit(code)
            self._is_over.set()
        self.meeting.lose()
        self._on_death(rank, code)

    def why_lost(self) -> Fault:
        """Whose doing it is that a rank is lost: the machine's, unless it has ended by itself."""
        self._is_over.wait(_END_S)
        return self._end or Fault.MACHINE

    def _die_too(self, rank: int, code: int) -> None:
        """End this process as the rank has ended, so that whoever watches blames the right one."""
        fault = self.why_lost()
        if fault is Fault.UNKNOWN:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault is Fault.MACHINE:
            os._exit(code if fault_of_exit(code) is fault else EXIT_MACHINE_FAILED)
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
