from dataclasses import replace

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad, LoadReport
from kunserve.policy.dispatch.redispatch import (
    MAX_RECALLED,
    Recall,
    may_leave,
    plan_recalls,
    spare_blocks,
)

STEP_TOKENS = 512


def group(
    number: int, used: int = 0, queue: tuple[int, ...] = (), capacity: int = 100, **known: int
) -> GroupLoad:
    report = LoadReport(
        GroupId(number),
        sequence_number=1,
        num_running=int(used > 0),
        used_blocks=used,
        capacity_blocks=capacity,
        num_waiting=len(queue),
        head_of_line_blocks=queue[0] if queue else 0,
        waiting_blocks=sum(queue),
    )
    return GroupLoad(report, capacity, **known)


def plan(*groups: GroupLoad) -> tuple[Recall, ...]:
    return plan_recalls(groups, groups, STEP_TOKENS)


def test_one_that_waits_for_memory_moves_to_an_idle_group() -> None:
    assert plan(group(1, 95, (20,)), group(2), group(3)) == (Recall(GroupId(1), 1, 20),)


def test_as_many_move_as_others_can_start_at_once() -> None:
    (recall,) = plan(group(1, 95, (20,) * 50), group(2, 30), group(3, 80))
    assert recall.num_requests == (100 - 5 - 30) // 20  # the third has room for none


def test_a_group_takes_no_more_than_it_computes_until_its_next_report() -> None:
    waiting = replace(group(1, 95, (2,) * 40).report, waiting_tokens=40 * 100)
    (recall,) = plan(GroupLoad(waiting, 100), group(2), group(3))
    assert recall.num_requests == 2 * (2 * STEP_TOKENS // 100)


def test_where_compute_is_what_they_wait_for_half_stay() -> None:
    (recall,) = plan(group(1, 10, (2,) * 8), group(2))
    assert recall.num_requests == 4


def test_the_next_in_line_where_there_is_room_stays() -> None:
    assert plan(group(1, 10, (2,)), group(2)) == ()


def test_nobody_moves_to_where_somebody_waits_or_is_on_the_way() -> None:
    full = group(1, 95, (20,))
    assert plan(full, group(2, 10, (1,))) == ()
    assert plan(full, group(2, 10, num_unreported=1)) == ()
    unheard = GroupLoad(LoadReport(GroupId(2), capacity_blocks=100), 100)
    assert plan(full, unheard) == ()


def test_what_is_on_its_way_back_is_not_recalled_twice() -> None:
    full = group(1, 95, (20, 20, 20), num_returning=3, returning_blocks=60)
    assert plan(full, group(2)) == ()


def test_room_is_given_away_once() -> None:
    recalls = plan(group(1, 95, (40,)), group(2, 95, (50,)), group(3), group(4))
    assert [recall.group_id for recall in recalls] == [2, 1]
    recalls = plan(group(1, 95, (40,)), group(2, 95, (50,)), group(3))
    assert [recall.group_id for recall in recalls] == [2]


def test_the_longest_queue_goes_first_and_a_look_is_bounded() -> None:
    groups = [group(n, 999, (1,) * (100 + n), 1000) for n in range(5)]
    groups += [group(9 + n, 0, (), 10_000) for n in range(9)]
    recalls = plan(*groups)
    assert recalls[0].group_id == 4
    assert sum(recall.num_requests for recall in recalls) == MAX_RECALLED


def test_spare_memory_is_counted_in_requests_that_start_there() -> None:
    groups = [group(1), group(2, 60), group(3, 99), group(4, 0, (5,))]
    assert spare_blocks(groups, 30) == 90 + 30, "95 and 35 blocks; nobody waits there"
    assert spare_blocks(groups, 0) == 95 + 35
    assert spare_blocks(groups, 200) == 0


def test_who_is_saved_no_more_than_waits_may_leave() -> None:
    busy = replace(group(1, 10, (2, 2)).report, waiting_tokens=100)
    assert may_leave(GroupLoad(busy, 100), 100) and not may_leave(GroupLoad(busy, 100), 101)
    full = replace(group(1, 95, (20,)).report, waiting_tokens=100)
    assert may_leave(GroupLoad(full, 100), 101), "memory is what it waits for"
