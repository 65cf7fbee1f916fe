"""What rank 0 says to another rank beside steps: by a pair of sockets, a word and an answer.

Ranks with a device each have more words.
"""

import contextlib
import select
import socket
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from kunserve.core.config import InstanceConfig
from kunserve.core.errors import StartupFailure
from kunserve.core.ids import InstanceId
from kunserve.core.layout import LayerRange
from kunserve.engine.cpu.decoder import StepLimits
from kunserve.model.source import ModelSource
from kunserve.model.spec import ModelSpec
from kunserve.transport.wire.codec import Codec
from kunserve_extras.ranks.meeting import RankLost, Why
from kunserve_extras.ranks.region import Room

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
    shared_weights: dict[str, str] | None = None
    """The fingerprint of weights that it shares, whose file comes last. None: they are its own."""


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


class Held(NamedTuple):
    """What must be the same on all ranks of an instance."""

    layers: LayerRange
    granules: tuple[bytes, bytes]
    """Where weights and KV lie."""


Said: TypeAlias = str | Held | None
"""A refusal, what is held, or nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A word was carried out, or was not."""

    failure: StartupFailure | None = None
    """The caller's mistake that forbids it."""
    said: Said = None
    """What was asked for."""


WORDS: tuple[type[Any], ...] = (Join, Answer, Drop, Reclaim, OpenRegion)
"""What is said between ranks of any kind."""


class Talk:
    """One end of the pair."""

    def __init__(self, end: socket.socket, more_words: tuple[type[Any], ...] = ()) -> None:
        """``more_words``: beside ``WORDS``, those of ranks of one kind."""
        self._end = end
        self._codec: Codec[Any] = Codec((*WORDS, *more_words))

    def learn(self, more_words: tuple[type[Any], ...]) -> None:
        """A rank knows only now of what kind it is."""
        self._codec = Codec((*WORDS, *more_words))

    def say(self, word: Any, fds: tuple[int, ...] = (), why: Why | None = None) -> None:
        """Send; raises RankLost when nobody is there. ``why``: see there."""
        data = self._codec.encode(word)
        assert len(data) <= _MOST_BYTES, (type(word), len(data))
        try:
            socket.send_fds(self._end, [data], list(fds))
        except OSError as error:
            raise RankLost(f"nobody listens any more: {error.strerror}", why) from error

    def hear(self, seconds: float | None = None, why: Why | None = None) -> tuple[Any, list[int]]:
        """The next word and its files. Raises RankLost when none comes; ``why``: see there."""
        self._end.settimeout(seconds)
        try:
            data, fds, _, _ = socket.recv_fds(self._end, _MOST_BYTES, _MOST_FILES)
        except OSError as error:
            raise RankLost(f"no word in {seconds} s: {error}", why) from error
        if not data:
            raise RankLost("the other end is closed", why)
        return self._codec.decode(data), fds

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


def talk_pair(more_words: tuple[type[Any], ...] = ()) -> tuple[Talk, socket.socket]:
    """Rank 0's end, and the other rank's as a socket to be handed on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Talk(ours, more_words), theirs
