"""Counters add up and tell what was added, each of them: a new one needs no other line."""

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from kunserve.control.group.load import SchedulerTotals
from kunserve.core.load import LeaderTotals

NAMES = [field.name for field in fields(LeaderTotals)]
IN_CLASSES = {name for name in NAMES if getattr(LeaderTotals(), name) == ()}
classes = st.just(()) | st.lists(st.integers(0, 9), min_size=3, max_size=3).map(tuple)
totals = st.builds(
    LeaderTotals,
    **{name: classes if name in IN_CLASSES else st.integers(0, 99) for name in NAMES},
)


@given(totals, totals)
def test_what_was_added_is_told(before: LeaderTotals, more: LeaderTotals) -> None:
    after = before + more
    grown = after.since(before)
    for name in NAMES:
        added = getattr(more, name)
        is_none = isinstance(added, tuple) and not any(added)
        assert getattr(grown, name) == (() if is_none else added), name
    assert after.since(after) == LeaderTotals(), "nothing was"
    assert before.since(after) == LeaderTotals(), "nothing is taken away"


def test_a_scheduler_tells_a_copy_of_every_counter() -> None:
    counting = SchedulerTotals(*[(1, 2) if name in IN_CLASSES else 5 for name in NAMES])
    told = counting.so_far()
    assert told == LeaderTotals(*[getattr(counting, name) for name in NAMES])
    counting.note_step(3, 1)
    counting.note_preemption(7)
    assert told.prompt_tokens == 5, "it does not change any more"
    since = counting.so_far().since(told)
    assert (since.num_preemptions, since.lost_tokens, since.prompt_tokens) == (1, 7, 3)
    assert sum(since.steps) == since.generation_tokens == 1
