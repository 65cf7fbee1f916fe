"""Who could have run nowhere for too long: the same as if each request was looked at."""

from hypothesis import given
from hypothesis import strategies as st

from kunserve.control.cluster.commands import Outbox
from kunserve.control.cluster.requests.backlog import Backlog
from kunserve.control.cluster.requests.live import Live
from kunserve.control.cluster.requests.quarantine import Blame, Cause, Quarantine
from kunserve.control.cluster.requests.unplaceable import Unplaceable
from kunserve.core.ids import RequestId
from kunserve.core.kv_blocks import KvBlocks
from kunserve.core.request import Request, SamplingParams
from kunserve.core.tokens import TokenIds
from tests.unit.control.cluster.test_placement import placed

LONGEST_S = 5.0


class Looked:
    """A backlog and the times of each request in it, kept one by one."""

    def __init__(self) -> None:
        self.placement = placed((0,))
        (self.group,) = self.placement.groups.values()
        self.backlog = Backlog(KvBlocks(1))
        self.quarantine = Quarantine(self.placement, Outbox())
        self.live: dict[RequestId, Live] = {}
        self.unplaceable = Unplaceable(self.placement, self.quarantine, self.backlog, self.live)
        self.fitted_s: dict[RequestId, float] = {}
        """When each was seen first, or was last seen with a group that is large enough."""
        self.untested_s: dict[RequestId, float] = {}
        """Since when each has been held, with no group kept for tests."""
        self.now_s = 0.0
        self.num_requests = 0

    def come(self, num_tokens: int, is_held: bool) -> None:
        self.num_requests += 1
        name = RequestId(str(self.num_requests))
        request = Request(name, TokenIds([1] * num_tokens), SamplingParams(4), 0.0)
        self.live[name] = Live(self.num_requests, request, print, [], 0.0)
        self.backlog.add(self.live[name])
        for _ in range(2 * is_held):
            self.quarantine.died([name], Blame(Cause.INSIDE))

    def go(self, which: int, comes_back: bool) -> None:
        if not self.live:
            return
        name = list(self.live)[which % len(self.live)]
        self.fitted_s.pop(name, None)
        self.backlog.remove(self.live[name])
        if comes_back:
            self.backlog.add(self.live[name])
        else:
            del self.live[name]
            self.untested_s.pop(name, None)
            self.quarantine.ended(name)

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        expected = set()
        for name, live in self.live.items():
            if live.num_tokens <= self.group.capacity_blocks or name not in self.fitted_s:
                self.fitted_s[name] = self.now_s
            since_s = self.fitted_s[name]
            if self.quarantine.holds(name) and self.placement.reserved is None:
                since_s = min(since_s, self.untested_s.setdefault(name, self.now_s))
            else:
                self.untested_s.pop(name, None)
            if self.now_s - since_s > LONGEST_S:
                expected.add(name)
        found = self.unplaceable.overdue(self.now_s, LONGEST_S)
        assert {live.request.request_id for live in found} == expected
        for name in expected:
            self.backlog.remove(self.live.pop(name))
            self.untested_s.pop(name, None)
            self.quarantine.ended(name)


_events = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 30)),
        st.tuples(st.just("held"), st.integers(1, 10)),
        st.tuples(st.just("go"), st.integers(0, 50)),
        st.tuples(st.just("return"), st.integers(0, 50)),
        st.tuples(st.just("room"), st.integers(0, 30)),
        st.tuples(st.just("keep"), st.integers(0, 1)),
        st.tuples(st.just("tick"), st.integers(1, 4)),
        st.tuples(st.just("tick"), st.integers(1, 4)),
    ),
    max_size=80,
)


@given(events=_events)
def test_the_same_are_overdue_as_if_each_was_looked_at(events: list[tuple[str, int]]) -> None:
    looked = Looked()
    for what, number in events:
        match what:
            case "come" | "held":
                looked.come(number, what == "held")
            case "go" | "return":
                looked.go(number, what == "return")
            case "room":
                looked.group.capacity_blocks = number
            case "keep":
                looked.placement.reserve(looked.group.layout.group_id if number else None)
            case "tick":
                looked.tick(float(number))
