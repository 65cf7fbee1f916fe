"""What rank 0 says to another rank beside steps: by a pair of sockets, a word and an answer.

Ranks with a device each have more words.
"""

import contextlib
import pickle
import select
import socket
from dataclasses import dataclass
from typing import Any, NamedTuple

from kunserve.core.config import InstanceConfig
from kunserve.core.errors import KunServeError
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.cpu.decoder import StepLimits
from kunserve.engine.ranks.meeting import RankLost
from kunserve.engine.ranks.region import Room
from kunserve.model.source import ModelSource
from kunserve.model.spec import ModelSpec

_MOST_BYTES = 1 << 16
_MOST_FILES = 4


@dataclass(frozen=True, slots=True)
class Join:
    """The first word: what a rank is. With it come its arena's file and the meeting's.

    On a device not the arena's, but that for bytes between the ranks.
    """

    instance_id: InstanceId
    rank: int
    num_ranks: int
    parent_pid: int
    spec: ModelSpec
    """The whole model's."""
    source: ModelSource
    seed: int
    config: InstanceConfig
    """The rank's own."""
    patience_s: float
    cpus: frozenset[int] | None = None
    """Where it stays; None: anywhere."""
    card: str | None = None
    """The device that it computes on (``engine.cuda.opening``); None: CPUs."""
    beside_bytes: int = 0
    """What it takes of that device beside weights and KV."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Hold no other layers than these."""

    keep: LayerRange


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Have memory for these layers, too."""

    layers: LayerRange


@dataclass(frozen=True, slots=True)
class OpenRegion:
    """Steps lie in this memory from now on. With it comes its file."""

    room: Room
    limits: StepLimits | None = None
    """What to take memory for at once."""


class Answer(NamedTuple):
    """A word was carried out, or was not."""

    refusal: KunServeError | None = None
    """The caller's mistake that forbids it."""
    said: Any = None
    """What was asked for."""


class Talk:
    """One end of the pair."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def say(self, word: Any, fds: tuple[int, ...] = ()) -> None:
        """Send; raises RankLost when nobody is there."""
        # Both ends are one program, and nobody else has a descriptor: what comes may be unpickled.
        data = pickle.dumps(word)
        assert len(data) <= _MOST_BYTES, (type(word), len(data))
        try:
            socket.send_fds(self._end, [data], list(fds))
        except OSError as error:
            raise RankLost(f"nobody listens any more: {error.strerror}") from error

    def hear(self, seconds: float | None = None) -> tuple[Any, list[int]]:
        """The next word and its files. Raises RankLost when none comes."""
        self._end.settimeout(seconds)
        try:
            data, fds, _, _ = socket.recv_fds(self._end, _MOST_BYTES, _MOST_FILES)
        except OSError as error:
            raise RankLost(f"no word in {seconds} s: {error}") from error
        if not data:
            raise RankLost("the other end is closed")
        return pickle.loads(data), fds

    def has_word(self, seconds: float) -> bool:
        """Whether one comes within so long, or the other end closes."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        """The other end hears of it."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def talk_pair() -> tuple[Talk, socket.socket]:
    """Rank 0's end, and the other rank's as a socket to be handed on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Talk(ours), theirs
