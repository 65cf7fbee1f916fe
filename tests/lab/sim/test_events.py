"""The heap: time order, ties by order of scheduling, no past."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kunserve_lab.sim.events import EventHeap


@given(st.lists(st.integers(0, 5), max_size=30))
def test_time_order_then_order_of_scheduling(moments: list[int]) -> None:
    heap, seen = EventHeap(), []
    for number, moment in enumerate(moments):
        heap.at(float(moment), lambda n, m: seen.append((m, n)), number, moment)
    while heap.step():
        pass
    assert seen == sorted((moment, number) for number, moment in enumerate(moments))


def test_an_event_may_schedule_another_at_the_same_moment() -> None:
    heap, seen = EventHeap(), []
    heap.at(1.0, lambda: heap.after(0.0, seen.append, "later"))
    heap.at(1.0, seen.append, "first")
    while heap.step():
        pass
    assert seen == ["first", "later"]
    assert heap.now_s() == 1.0 and heap.num_done == 3


def test_the_past_is_a_bug() -> None:
    heap = EventHeap()
    heap.at(2.0, lambda: None)
    heap.step()
    with pytest.raises(AssertionError):
        heap.at(1.0, lambda: None)
