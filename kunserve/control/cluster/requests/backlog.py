"""Requests that no group has, and how many are sent ahead of a group's work.

Leaders are sent what they compute in the next few steps. All others wait here, for whichever group
comes to them first. So a change of groups has little to give back however many wait, and the
tokens of those that wait here are held once.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kunserve.control.cluster.requests.live import Live
from kunserve.core.ids import InstanceId
from kunserve.core.kv_blocks import KvBlocks

STEPS_AHEAD = 4
"""Steps of prompts that a leader is sent ahead, per stage: the next ones come before they end."""
REQUESTS_AHEAD = 2
"""However long they are: while one is computed, another one waits there."""
MOST_REQUESTS_AHEAD = 256
"""Per stage, however little is to be computed of them: the prefix cache may have nearly all."""


class Waiting(NamedTuple):
    """A request in the backlog, as it was when it came."""

    live: Live
    num_tokens: int
    num_blocks: int


class Backlog:
    """Owner of the requests that no group has, in order of arrival: so they are sent."""

    def __init__(self, blocks: KvBlocks) -> None:
        self._blocks = blocks
        self._entries: list[Waiting] = []
        self.num_tokens = 0
        self.num_blocks = 0
        """KV blocks that all of them need."""
        self.largest_blocks = 0
        """No request here needs more."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Waiting]:
        """In order. The one that was given last may be taken out meanwhile."""
        entries = self._entries
        index = 0
        while index < len(entries):
            entry = entries[index]
            yield entry
            if index < len(entries) and entries[index] is entry:
                index += 1

    def add(self, live: Live) -> None:
        """No group has the request."""
        num_tokens = live.num_tokens
        entry = Waiting(live, num_tokens, self._blocks.holding(num_tokens))
        insort(self._entries, entry, key=_number_of)
        self.num_tokens += entry.num_tokens
        self.num_blocks += entry.num_blocks
        self.largest_blocks = max(self.largest_blocks, entry.num_blocks)

    def remove(self, live: Live) -> None:
        """A group has the request, or it has ended."""
        index = bisect_left(self._entries, live.number, key=_number_of)
        entry = self._entries.pop(index)
        assert entry.live is live, (entry, live)
        self.num_tokens -= entry.num_tokens
        self.num_blocks -= entry.num_blocks
        if not self._entries:
            self.largest_blocks = 0

    def check(self) -> None:
        """Assert order and totals."""
        numbers = [entry.live.number for entry in self._entries]
        assert numbers == sorted(set(numbers)), numbers
        assert self.num_tokens == sum(entry.num_tokens for entry in self._entries)
        assert self.num_blocks == sum(entry.num_blocks for entry in self._entries)
        assert all(entry.live.leader is None for entry in self._entries), self._entries


@dataclass(slots=True)
class _Ahead:
    num_requests: int = 0
    num_tokens: int = 0


class SentAhead:
    """What each leader was sent and has made no token of yet."""

    def __init__(self, step_tokens: int) -> None:
        """``step_tokens`` are computed in one step."""
        self._step_tokens = step_tokens
        self._ahead: defaultdict[InstanceId, _Ahead] = defaultdict(_Ahead)
        self.roomier: set[InstanceId] = set()
        """Leaders that have less ahead than when this was last emptied."""

    def has_room(self, leader: InstanceId, num_stages: int) -> bool:
        """Whether the leader of so many stages may be sent one more request."""
        ahead = self._ahead[leader]
        if ahead.num_requests < REQUESTS_AHEAD:
            return True
        if ahead.num_requests >= MOST_REQUESTS_AHEAD * num_stages:
            return False
        return ahead.num_tokens < self.most_tokens(num_stages)

    def tokens(self, leader: InstanceId) -> int:
        """What the leader is to compute before anything that it is sent now."""
        return self._ahead[leader].num_tokens

    def most_tokens(self, num_stages: int) -> int:
        """With so many tokens ahead the leader of so many stages has enough."""
        return STEPS_AHEAD * self._step_tokens * num_stages

    def add(self, live: Live) -> None:
        """The request's leader has it, and its tokens are to be computed there."""
        assert live.leader is not None and live.tokens_ahead == 0, live
        live.tokens_ahead = max(1, live.num_tokens - live.saved_tokens)
        ahead = self._ahead[live.leader]
        ahead.num_requests += 1
        ahead.num_tokens += live.tokens_ahead

    def remove(self, live: Live) -> None:
        """The request's leader has made a token of it, or has it no more."""
        assert live.leader is not None and live.tokens_ahead > 0, live
        ahead = self._ahead[live.leader]
        ahead.num_requests -= 1
        ahead.num_tokens -= live.tokens_ahead
        live.tokens_ahead = 0
        self.roomier.add(live.leader)

    def check(self, leader: InstanceId, led: list[Live]) -> None:
        """Assert the account of a leader that has these requests."""
        tokens = [live.tokens_ahead for live in led if live.tokens_ahead]
        ahead = self._ahead[leader]
        assert ahead == _Ahead(len(tokens), sum(tokens)), (leader, ahead, tokens)


def _number_of(entry: Waiting) -> int:
    return entry.live.number
