"""What a prefix cache has come to have and has lost, for routers that follow it from outside."""

from typing import NamedTuple, TypeAlias

from kunserve.control.group.sequence import Sequence
from kunserve.core.prefix import PrefixHash


class Stored(NamedTuple):
    """A block can be found."""

    name: PrefixHash
    parent: PrefixHash | None
    """The block before it; None of a beginning."""
    token_ids: tuple[int, ...]


class Removed(NamedTuple):
    """These can be found no more."""

    names: tuple[PrefixHash, ...]


class Cleared(NamedTuple):
    """None can be found."""


CacheEvent: TypeAlias = Stored | Removed | Cleared
MAX_EVENTS = 20_000
"""That nobody has taken. Who has fallen so far behind is told to forget everything."""


class CacheJournal:
    """Events in order, until somebody takes them."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def note(self, event: CacheEvent) -> None:
        """Something has happened."""
        if len(self._events) >= MAX_EVENTS:
            self._events = [Cleared()]
        self._events.append(event)

    def stored(self, seq: Sequence, block: int, block_size: int) -> None:
        """The sequence's block with this number can be found. One that came in an exchange is not
        told of, because the cache does not know its tokens; nor one with a salt, which is nobody
        else's business.
        """
        if not seq.request.cache_salt:
            names, first = seq.beginning.names, block * block_size
            tokens = seq.known_tokens(first, first + block_size)
            parent = names[block - 1] if block else None
            self.note(Stored(names[block], parent, tuple(tokens)))

    def removed(self, names: list[PrefixHash]) -> None:
        """These blocks can be found no more."""
        if names:
            self.note(Removed(tuple(names)))

    def take(self) -> list[CacheEvent]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events
