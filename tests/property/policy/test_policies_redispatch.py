"""Waiting requests that change groups: they come to rest, each where it can run."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad, LoadReport
from kunserve.policy.dispatch.choice import choose_group
from kunserve.policy.dispatch.redispatch import plan_recalls
from kunserve.policy.drop.monitor import free_blocks


@dataclass
class Group:
    """Admits in order while there is room; nothing ends and nothing grows."""

    number: int
    capacity: int
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def load(self) -> GroupLoad:
        while self.waiting and self.waiting[0] <= free_blocks(self.report()):
            self.running.append(self.waiting.pop(0))
        return GroupLoad(self.report(), self.capacity)

    def report(self) -> LoadReport:
        return LoadReport(
            GroupId(self.number),
            sequence_number=1,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            used_blocks=sum(self.running),
            capacity_blocks=self.capacity,
            head_of_line_blocks=self.waiting[0] if self.waiting else 0,
            waiting_blocks=sum(self.waiting),
        )


groups = st.lists(
    st.tuples(st.integers(20, 120), st.lists(st.integers(1, 20), max_size=25)),
    min_size=2,
    max_size=6,
)


@given(groups)
def test_moves_come_to_an_end_and_nothing_gets_lost(drawn: list[tuple[int, list[int]]]) -> None:
    cluster = [
        Group(number, capacity, waiting=list(queue))
        for number, (capacity, queue) in enumerate(drawn)
    ]
    everything = sorted(blocks for group in cluster for blocks in group.waiting)
    num_waiting = sum(len(group.waiting) for group in cluster)
    num_moved = 0
    for _ in range(60):
        loads = [group.load() for group in cluster]
        recalls = plan_recalls(loads, loads, step_tokens=1000)
        if not recalls:
            break
        for recall in recalls:
            source = cluster[recall.group_id]
            taken = source.waiting[: recall.num_requests]
            del source.waiting[: recall.num_requests]
            for blocks in taken:
                chosen = choose_group([group.load() for group in cluster], blocks)
                assert chosen is not None
                cluster[chosen].waiting.append(blocks)
                num_moved += 1
    else:
        raise AssertionError("requests move for ever")
    found = sorted(b for group in cluster for b in (*group.running, *group.waiting))
    assert found == everything
    assert num_moved <= 2 * num_waiting


@given(groups)
def test_what_could_start_elsewhere_does(drawn: list[tuple[int, list[int]]]) -> None:
    """At rest no head of a queue fits into a group where nobody waits, but for its headroom."""
    cluster = [
        Group(number, capacity, waiting=list(queue))
        for number, (capacity, queue) in enumerate(drawn)
    ]
    for _ in range(60):
        loads = [group.load() for group in cluster]
        recalls = plan_recalls(loads, loads, step_tokens=1000)
        if not recalls:
            break
        for recall in recalls:
            source = cluster[recall.group_id]
            taken = source.waiting[: recall.num_requests]
            del source.waiting[: recall.num_requests]
            for blocks in taken:
                chosen = choose_group([group.load() for group in cluster], blocks)
                assert chosen is not None
                cluster[chosen].waiting.append(blocks)
    for source in cluster:
        if not source.waiting:
            continue
        mean = -(-sum(source.waiting) // len(source.waiting))
        for target in cluster:
            if not target.waiting:
                spare = target.capacity - sum(target.running) - int(0.05 * target.capacity)
                assert mean > spare, (source, target)
