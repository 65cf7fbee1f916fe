"""The process of a rank other than 0: ``python -m kunserve_extras.ranks.member FD``."""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from kunserve.core.errors import KunServeError, StartupFailure
from kunserve.core.extras import find_extra
from kunserve.core.faults import EXIT_MACHINE_FAILED
from kunserve.engine.memory.instance_memory import RemapFailed
from kunserve_extras.ranks.control import Answer, Join, Talk
from kunserve_extras.ranks.meeting import EXIT_ANOTHER_LOST, RankLost
from kunserve_extras.ranks.rank import HostRank, Rank

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_TIDY_GAP_S = 0.02
"""Between pieces of what can wait, in which a word is heard."""
EXIT_REFUSED = 3
EXIT_ORPHANED = 4


def run_member(end: socket.socket) -> int:
    """Join, load, compute until rank 0 leaves; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    talk = Talk(end)
    try:
        order, fds = talk.hear()
    except RankLost:
        return EXIT_ORPHANED
    assert isinstance(order, Join), order
    if os.getppid() != order.parent_pid:
        return EXIT_ORPHANED  # it died before the line above: its death gives no signal
    try:
        rank = _rank_of(order, fds)
    except KunServeError as error:
        talk.say(Answer(StartupFailure.of(error)))
        return EXIT_REFUSED
    talk.learn(rank.more_words)
    gc.collect()
    gc.freeze()
    talk.say(Answer())
    threading.Thread(target=_obey_all, args=(rank, talk), daemon=True).start()
    try:
        rank.compute()
    except RankLost:
        return EXIT_ANOTHER_LOST
    except BaseException:
        rank.lose()
        raise
    return 1


def _rank_of(order: Join, fds: Sequence[int]) -> Rank:
    """Raises KunServeError for files that cannot be read, and for a device that will not do."""
    if order.card is None:
        return HostRank(order, *fds)
    of_device: Rank = find_extra("ranks", "devices", "--device cuda").rank(order, *fds)
    return of_device


def _obey_all(rank: Rank, talk: Talk) -> None:
    """In a thread: what it raises would end nothing, so it ends the process."""
    code = EXIT_MACHINE_FAILED  # no step is computed here
    try:
        rank.enter()
        while True:
            if rank.is_untidy and not talk.has_word(_TIDY_GAP_S):
                rank.tidy()
                continue
            try:
                word, fds = talk.hear()
            except RankLost:
                code = 0  # rank 0 has left
                return
            talk.say(Answer(said=rank.obey(word, fds)))
    except RemapFailed as failure:
        code = int(str(failure.code))
    except BaseException:
        logger.exception("a rank could not do what it was told")
    finally:
        if code:
            rank.lose()
        os._exit(code)


def main() -> int:
    """The process's entry."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    return run_member(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
