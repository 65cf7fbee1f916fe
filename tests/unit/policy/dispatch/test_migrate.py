import random

from kunserve.core.ids import GroupId, RequestId
from kunserve.core.load import GroupLoad, LoadReport
from kunserve.policy.dispatch.migrate import (
    HIGH_STEPS,
    LOW_STEPS,
    REFUGE_HEADROOM,
    Movable,
    Refuge,
    choose_refuge,
    choose_request,
    plan_migrations,
)

BLOCK_SIZE = 16


def group(
    number: int, used: int, head: int = 0, running: int = 10, unreported_blocks: int = 0
) -> GroupLoad:
    report = LoadReport(
        GroupId(number),
        used_blocks=used,
        head_of_line_blocks=head,
        num_running=running,
        num_waiting=int(head > 0),
    )
    return GroupLoad(report, 100, unreported_blocks=unreported_blocks)


def spare_blocks(group: GroupLoad) -> int:
    return 100 - group.report.used_blocks - group.report.head_of_line_blocks


def test_the_least_free_gives_to_the_freest() -> None:
    full, idle, half = group(0, 98), group(1, 10, running=1), group(2, 50)
    (pair,) = plan_migrations([full, idle, half], BLOCK_SIZE)
    assert (pair.source, pair.target) == (0, 1)
    assert pair.max_blocks == (90 - 2) // 2


def test_several_pairs_at_once_and_nobody_in_two() -> None:
    groups = [group(0, 99), group(1, 97), group(2, 20), group(3, 30)]
    pairs = plan_migrations(groups, BLOCK_SIZE)
    assert [(pair.source, pair.target) for pair in pairs] == [(0, 2), (1, 3)]


def test_a_queue_that_does_not_fit_makes_a_source_of_a_half_empty_group() -> None:
    """Fragmentation: 40 blocks are free, and the head of the queue wants 60."""
    (pair,) = plan_migrations([group(0, 60, head=60), group(1, 20)], BLOCK_SIZE)
    assert (pair.source, pair.target) == (0, 1) and pair.max_blocks == (80 + 20) // 2


def test_where_all_are_full_nothing_moves() -> None:
    assert plan_migrations([group(i, 97 + i % 3) for i in range(8)], BLOCK_SIZE) == ()


def test_nobody_gives_to_a_group_that_is_just_less_full() -> None:
    low = int(LOW_STEPS * 10 / BLOCK_SIZE)
    between = int((LOW_STEPS + HIGH_STEPS) / 2 * 10 / BLOCK_SIZE)
    assert plan_migrations([group(0, 100 - low + 1), group(1, 100 - between)], BLOCK_SIZE) == ()


def test_a_group_with_a_queue_takes_nothing_and_an_idle_one_has_nothing_to_give() -> None:
    queued = group(1, 10, head=1)
    assert plan_migrations([group(0, 99), queued], BLOCK_SIZE) == ()
    assert plan_migrations([group(0, 0, head=101, running=0), group(1, 0)], BLOCK_SIZE) == ()


def test_what_was_sent_and_not_reported_counts() -> None:
    assert plan_migrations([group(0, 99), group(1, 10, unreported_blocks=85)], BLOCK_SIZE) == ()


def test_the_target_does_not_become_a_source() -> None:
    """After the largest move that the plan allows it can still make enough steps itself."""
    draw = random.Random(1)
    num_pairs = 0
    for _ in range(500):
        views = [
            group(i, draw.randint(0, 100), draw.choice([0, 0, 30]), draw.randint(1, 40))
            for i in range(4)
        ]
        by_id = {view.group_id: view for view in views}
        for source, target, size in plan_migrations(views, BLOCK_SIZE):
            num_pairs += 1
            before, after = by_id[source], by_id[target]
            left = spare_blocks(after) - size
            assert left * BLOCK_SIZE / (after.report.num_running + 1) >= LOW_STEPS
            assert left >= spare_blocks(before) + size
    assert num_pairs > 100


def test_moves_come_to_an_end() -> None:
    """Whatever the policy moves, moved at once: the loads even out, and nothing goes on moving."""
    draw = random.Random(2)
    num_moves = 0
    for _ in range(200):
        homes: dict[RequestId, tuple[int, int]] = {}
        for number in range(60):
            home, size = draw.randrange(5), draw.randint(1, 20)
            if size + sum(s for h, s in homes.values() if h == home) <= 100:
                homes[RequestId(f"r{number}")] = home, size
        for _ in range(30):
            moves = next_moves(homes)
            for request_id, target in moves:
                homes[request_id] = target, homes[request_id][1]
            num_moves += len(moves)
        assert not next_moves(homes)
    assert num_moves > 50


def next_moves(homes: dict[RequestId, tuple[int, int]]) -> list[tuple[RequestId, int]]:
    """Requests that the policy would move, and where to."""
    sizes = [[size for home, size in homes.values() if home == i] for i in range(5)]
    views = [group(i, sum(mine), running=len(mine)) for i, mine in enumerate(sizes)]
    found = []
    for source, target, most in plan_migrations(views, BLOCK_SIZE):
        mine = [Movable(r, size) for r, (home, size) in homes.items() if home == source]
        chosen = choose_request(mine, 0, most)
        if chosen is not None:
            found.append((chosen, int(target)))
    return found


def movable(*sizes: int) -> list[Movable]:
    return [Movable(RequestId(f"r{i}"), size) for i, size in enumerate(sizes)]


def test_the_smallest_request_that_lets_the_head_of_the_queue_in() -> None:
    assert choose_request(movable(3, 9, 7, 20), missing_blocks=6, max_blocks=15) == "r2"


def test_the_largest_where_none_is_enough_or_nobody_waits() -> None:
    assert choose_request(movable(3, 9, 7, 20), missing_blocks=12, max_blocks=10) == "r1"
    assert choose_request(movable(3, 9, 7, 20), missing_blocks=0, max_blocks=10) == "r1"


def test_none_where_all_are_too_large() -> None:
    assert choose_request(movable(3, 9), missing_blocks=1, max_blocks=2) is None
    assert choose_request([], missing_blocks=1, max_blocks=2) is None


# A group leaves


def test_who_leaves_gives_to_whom_has_most_room() -> None:
    refuge = choose_refuge([group(1, 60), group(2, 20), group(3, 20)], BLOCK_SIZE, 64)
    kept = int(LOW_STEPS) * 11 // BLOCK_SIZE
    assert kept > REFUGE_HEADROOM * 100
    assert refuge == Refuge(GroupId(2), 80 - kept)


def test_room_is_none_where_it_is_kept_where_somebody_waits_or_all_places_are_taken() -> None:
    no_room = [group(1, 90), group(2, 20, head=60), group(3, 20, running=64)]
    assert choose_refuge(no_room, BLOCK_SIZE, 64) is None
    assert choose_refuge([group(1, 20, unreported_blocks=75)], BLOCK_SIZE, 64) is None
    assert choose_refuge([], BLOCK_SIZE, 64) is None
