"""The process of a rank other than 0: ``python -m kunserve.engine.ranks.member FD``."""

import contextlib
import ctypes
import functools
import gc
import logging
import os
import signal
import socket
import sys
import threading

import torch

from kunserve.core.errors import KunServeError
from kunserve.core.layout import LayerRange
from kunserve.core.sharding import spec_of_rank
from kunserve.engine.backend import weights_in
from kunserve.engine.memory import InstanceMemory, RemapFailed
from kunserve.engine.ranks.control import Answer, Drop, Join, OpenRegion, Reclaim, Talk, Word
from kunserve.engine.ranks.meeting import Meeting, RankLost
from kunserve.engine.ranks.memory import LentPages
from kunserve.engine.ranks.nodes import stay_on
from kunserve.engine.ranks.region import Command, Region
from kunserve.engine.ranks.shard_decoder import ShardDecoder
from kunserve.engine.ranks.shards import ShardReader
from kunserve.engine.weights.loader import WeightLoader
from kunserve.engine.weights.readers import open_reader

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0
"""How long a rank waits for a command before it looks whether it still may."""
EXIT_REFUSED = 3
EXIT_ORPHANED = 4


class Member:
    """One rank's memory and compute. Steps are one thread's, changes of memory another's."""

    def __init__(self, order: Join, arena_fd: int, meeting_fd: int) -> None:
        """Raises KunServeError for files that cannot be read."""
        torch.set_num_threads(1)
        stay_on(order.cpus)
        spec, rank, num_ranks = order.spec, order.rank, order.num_ranks
        shard = spec_of_rank(spec, num_ranks)
        self._spec = spec
        self._meeting = Meeting(rank, num_ranks, meeting_fd, order.patience_s)
        reader = ShardReader(open_reader(order.source, spec, order.seed), spec, rank, num_ranks)
        self._memory = InstanceMemory(
            order.instance_id, shard, order.config, 0, functools.partial(LentPages, arena_fd)
        )
        weights = weights_in(self._memory, shard, torch.device("cpu"))
        loader = WeightLoader(reader, self._memory.layout, shard, weights)
        loader.check()
        loader.load_ends()
        loader.load_layers(LayerRange(0, shard.num_layers))
        self._decoder = ShardDecoder(spec, weights, self._memory, order.config, self._meeting)

    def compute(self) -> None:
        """Carry out one command after the other. Raises RankLost."""
        seen = 0
        while True:
            number = self._meeting.wait(seen, _LOOK_S)
            if number == seen:
                continue
            seen = number
            region = self._decoder.region
            match region.command:
                case Command.STAGE:
                    self._decoder.run_stage(region.read_stage())
                case Command.LOGITS:
                    self._decoder.run_logits(region.read_logits())

    def obey(self, word: Word, fds: list[int]) -> None:
        """Change memory. May be called while ``compute`` waits in the middle of a step."""
        match word:
            case Drop(keep):
                self._memory.drop(keep)
            case Reclaim(layers):
                self._memory.reclaim(layers)
            case OpenRegion(room, limits):
                (fd,) = fds
                if limits is not None:
                    self._decoder.reserve(limits)
                region = Region(self._spec, self._meeting.num_ranks, room, fd)
                region.close_file()
                self._decoder.open(region)
            case _:
                raise AssertionError(word)

    def lose(self) -> None:
        """Have nobody wait for this rank any more."""
        self._meeting.lose()


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
        member = Member(order, *fds)
    except KunServeError as error:
        talk.say(Answer(error))
        return EXIT_REFUSED
    gc.collect()
    gc.freeze()
    talk.say(Answer())
    threading.Thread(target=_obey_all, args=(member, talk), daemon=True).start()
    try:
        member.compute()
    except RankLost:
        pass
    except BaseException:
        member.lose()
        raise
    return 1


def _obey_all(member: Member, talk: Talk) -> None:
    """In a thread: what it raises would end nothing, so it ends the process."""
    code = 1
    try:
        while True:
            try:
                word, fds = talk.hear()
            except RankLost:
                code = 0  # rank 0 has left
                return
            member.obey(word, fds)
            talk.say(Answer())
    except RemapFailed as failure:
        code = int(str(failure.code))
    except BaseException:
        logger.exception("a rank could not do what it was told")
    finally:
        if code:
            member.lose()
        os._exit(code)


def main() -> int:
    """The process's entry."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    return run_member(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
