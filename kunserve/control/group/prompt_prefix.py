"""What a sequence shares with others: its first blocks, by name, and whose they are.

A *prefix* is a stretch of full KV blocks that have names. The blocks of a sequence that runs are
its own; they become the cache's the moment another sequence wants them, and when it leaves.
"""

import sys
from dataclasses import dataclass, field

from kunserve.core.ids import PrefixId, RequestId
from kunserve.core.messages import PrefixPart
from kunserve.core.prefix import PrefixHash


@dataclass(slots=True, eq=False)
class Prefix:
    """Blocks [first, end) of a beginning, one name each."""

    first: int
    owner: "PromptPrefix | None"
    """Whose own blocks they are; None once they are the cache's."""
    prefix_id: PrefixId | None = None
    """By which the stages know the blocks, once they are the cache's."""
    names: list[PrefixHash] = field(default_factory=list)
    users: dict[int, int] = field(default_factory=dict)
    """Sequences that share it up to a block, by that block."""
    used_end: int = 0
    """Blocks [first, used_end) are shared by a sequence; the others may be evicted."""
    made_s: float | None = None
    """When its first block was filled."""
    used_s: float = 0.0
    """When a sequence last began or ceased to use it."""

    def __post_init__(self) -> None:
        """Nobody shares it yet."""
        self.used_end = max(self.used_end, self.first)

    @property
    def end(self) -> int:
        """The block behind its last."""
        return self.first + len(self.names)

    @property
    def num_unused(self) -> int:
        """Blocks that no sequence shares."""
        return self.end - self.used_end

    def use(self, end: int) -> int:
        """One more sequence shares it up to ``end``; how many blocks were not shared before."""
        assert self.first < end <= self.end, (self, end)
        self.users[end] = self.users.get(end, 0) + 1
        more = max(0, end - self.used_end)
        self.used_end += more
        return more

    def leave(self, end: int) -> int:
        """One that shared it up to ``end`` does no more; how many blocks nobody shares now."""
        if self.users[end] > 1:
            self.users[end] -= 1
            return 0
        del self.users[end]
        before, self.used_end = self.used_end, max(self.users, default=self.first)
        return before - self.used_end

    def used_end_without(self, end: int) -> int:
        """``used_end`` if one that shares it up to ``end`` were not there."""
        others = (at for at, num_users in self.users.items() if at != end or num_users > 1)
        return max(others, default=self.first)


@dataclass(slots=True, eq=False)
class PromptPrefix:
    """Of one sequence."""

    request_id: RequestId
    own: Prefix = field(init=False)
    """Its own blocks that have names, behind those that it shares."""
    names: list[PrefixHash] = field(default_factory=list)
    """Of its first full blocks, as far as they were needed so far."""
    shared: list[tuple[Prefix, int]] = field(default_factory=list)
    """Prefixes of the cache that it begins with, in order, each up to a block."""
    num_found: int = 0
    """Blocks that the cache had for it when it was last looked for, while it waits."""
    found_tokens: int = 0
    """Tokens in those."""
    names_at: int = sys.maxsize
    """Computed tokens at which a block of it is full and wants a name."""

    def __post_init__(self) -> None:
        """Nothing is shared yet."""
        self.own = Prefix(0, self)

    @property
    def is_looked_up(self) -> bool:
        """Whether its blocks get names once it runs, so that they are looked for before."""
        return self.names_at < sys.maxsize

    @property
    def parts(self) -> tuple[PrefixPart, ...]:
        """What is shared, for another leader."""
        return tuple(PrefixPart(p.prefix_id, end) for p, end in self.shared if p.prefix_id)

    @property
    def shared_end(self) -> int:
        """Blocks [0, shared_end) are shared."""
        return self.shared[-1][1] if self.shared else 0
