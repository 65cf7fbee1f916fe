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
    stay: int
    """Counts stays: a request may come back, and waits anew then."""


class Backlog:
    """Owner of the requests that no group has, by priority and arrival: so they are sent."""

    def __init__(self, blocks: KvBlocks) -> None:
        self._blocks = blocks
        self._entries: list[Waiting] = []
        self.num_tokens = 0
        self.num_blocks = 0
        """KV blocks that all of them need."""
        self._num_stays = 0
        self._fresh: list[Waiting] = []

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

    @property
    def first_priority(self) -> int:
        """Of who is next. Called when somebody is."""
        return self._entries[0].live.request.priority

    def add(self, live: Live) -> None:
        """No group has the request."""
        num_tokens = live.num_tokens
        self._num_stays += 1
        entry = Waiting(live, num_tokens, self._blocks.holding(num_tokens), self._num_stays)
        self._fresh.append(entry)
        insort(self._entries, entry, key=_place_of)
        self.num_tokens += entry.num_tokens
        self.num_blocks += entry.num_blocks

    def remove(self, live: Live) -> None:
        """A group has the request, or it has ended."""
        index = bisect_left(self._entries, live.place, key=_place_of)
        entry = self._entries.pop(index)
        assert entry.live is live, (entry, live)
        self.num_tokens -= entry.num_tokens
        self.num_blocks -= entry.num_blocks

    def find(self, place: tuple[int, int], stay: int) -> Live | None:
        """The request of that place, if it has been here ever since that stay began."""
        index = bisect_left(self._entries, place, key=_place_of)
        for live, *_, found in self._entries[index : index + 1]:
            return live if (live.place, found) == (place, stay) else None
        return None

    def take_fresh(self) -> list[Waiting]:
        """Those that have come since the last call and are still here."""
        fresh, self._fresh = self._fresh, []
        return [entry for entry in fresh if self.find(entry.live.place, entry.stay)]

    def check(self) -> None:
        """Assert order and totals."""
        places = [entry.live.place for entry in self._entries]
        assert places == sorted(set(places)), places
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
        self._ahead: defaultdict[InstanceId, dict[int, _Ahead]] = defaultdict(dict)
        """By leader and priority."""
        self.roomier: set[InstanceId] = set()
        """Leaders that have less ahead than when this was last emptied."""

    def has_room(self, leader: InstanceId, num_stages: int, priority: int) -> bool:
        """Whether the leader of so many stages may be sent one more request of this priority.

        It passes those there that are less urgent. All that are there are bounded too.
        """
        # A loop and no sums, because every group is asked for every request.
        num_requests = num_before = tokens_before = 0
        for its, ahead in self._ahead[leader].items():
            num_requests += ahead.num_requests
            if its <= priority:
                num_before += ahead.num_requests
                tokens_before += ahead.num_tokens
        if num_requests >= MOST_REQUESTS_AHEAD * num_stages:
            return False
        return num_before < REQUESTS_AHEAD or tokens_before < self.most_tokens(num_stages)

    def tokens(self, leader: InstanceId, priority: int) -> int:
        """What the leader is to compute before a request of this priority that it is sent now."""
        ahead = self._ahead[leader].items()
        return sum(one.num_tokens for its, one in ahead if its <= priority)

    def most_tokens(self, num_stages: int) -> int:
        """With so many tokens ahead the leader of so many stages has enough."""
        return STEPS_AHEAD * self._step_tokens * num_stages

    def add(self, live: Live) -> None:
        """The request's leader has it, and its tokens are to be computed there."""
        assert live.leader is not None and live.tokens_ahead == 0, live
        live.tokens_ahead = max(1, live.num_tokens - live.saved_tokens)
        ahead = self._ahead[live.leader].setdefault(live.request.priority, _Ahead())
        ahead.num_requests += 1
        ahead.num_tokens += live.tokens_ahead

    def remove(self, live: Live) -> None:
        """The request's leader has made a token of it, or has it no more."""
        assert live.leader is not None and live.tokens_ahead > 0, live
        ahead = self._ahead[live.leader][live.request.priority]
        ahead.num_requests -= 1
        ahead.num_tokens -= live.tokens_ahead
        if not ahead.num_requests:
            del self._ahead[live.leader][live.request.priority]
        live.tokens_ahead = 0
        self.roomier.add(live.leader)

    def check(self, leader: InstanceId, led: list[Live]) -> None:
        """Assert the account of a leader that has these requests."""
        told: defaultdict[int, _Ahead] = defaultdict(_Ahead)
        for live in led:
            if live.tokens_ahead:
                told[live.request.priority].num_requests += 1
                told[live.request.priority].num_tokens += live.tokens_ahead
        assert self._ahead[leader] == told, (leader, self._ahead[leader], told)


def _place_of(entry: Waiting) -> tuple[int, int]:
    return entry.live.place
