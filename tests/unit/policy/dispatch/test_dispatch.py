from collections import Counter

import pytest

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad, LoadReport
from kunserve.policy.dispatch.choice import Shed, choose_group, should_shed


def view(
    group: int,
    demand: int = 0,
    queue: tuple[int, ...] = (),
    capacity_blocks: int = 100,
    unreported_blocks: int = 0,
) -> GroupLoad:
    report = LoadReport(
        GroupId(group),
        used_blocks=demand,
        num_waiting=len(queue),
        head_of_line_blocks=queue[0] if queue else 0,
        waiting_blocks=sum(queue),
    )
    return GroupLoad(report, capacity_blocks, unreported_blocks=unreported_blocks)


def test_the_least_loaded_group_wins_relative_to_its_capacity():
    assert choose_group([view(1, 50), view(2, 40)], 10) == 2
    assert choose_group([view(1, 50, capacity_blocks=1000), view(2, 40)], 10) == 1


def test_ties_go_to_the_lower_id_in_any_order():
    assert choose_group([view(2, 40), view(1, 40)], 10) == 1


def test_a_group_that_can_never_hold_the_request_is_left_out():
    groups = [view(1, 0), view(2, 99, capacity_blocks=300)]
    assert choose_group(groups, 101) == 2
    assert choose_group(groups, 301) is None
    assert choose_group([], 1) is None


def test_the_head_of_the_queue_counts_as_load():
    assert choose_group([view(1, 40, queue=(30,)), view(2, 60)], 10) == 2


def test_a_group_where_two_wait_is_not_open():
    assert choose_group([view(1, 10, queue=(5,)), view(2, 80)], 10) == 1
    assert choose_group([view(1, 10, queue=(5, 5)), view(2, 80)], 10) == 2


def test_a_burst_inside_one_report_period_spreads():
    """The reports stay as they are; only what was sent is known."""
    sent = Counter[GroupId]()
    for _ in range(40):
        groups = [view(g, unreported_blocks=5 * sent[GroupId(g)]) for g in range(4)]
        chosen = choose_group(groups, 5)
        assert chosen is not None
        sent[chosen] += 1
    assert set(sent.values()) == {10}


def test_a_burst_beyond_all_memory_spreads_by_the_whole_queue():
    """Both are full; by the head alone the second would be chosen every time."""
    groups = [view(1, 95, queue=(20,)), view(2, 95, queue=(10, 20, 20))]
    assert choose_group(groups, 30) == 1
    groups = [view(1, 95, queue=(20, 20, 20)), view(2, 95, queue=(30, 20))]
    assert choose_group(groups, 30) == 2


def test_where_requests_wait_for_compute_none_is_sent_while_another_group_is_open():
    groups = [view(1, 20, queue=(2, 2, 2)), view(2, 60)]
    assert choose_group(groups, 10) == 2


def test_where_all_queue_what_a_group_saves_is_taken_from_its_need():
    groups = [view(1, 90, queue=(30, 30)), view(2, 90, queue=(30, 36))]
    assert choose_group(groups, 20) == 1
    assert choose_group(groups, 20, {GroupId(2): 12}) == 2
    assert choose_group(groups, 20, {GroupId(2): 4}) == 1


def shed(num_reqs: int, num_tokens: int, request_tokens: int = 50, **known: object) -> Shed | None:
    """Of two groups: one that has reported, and one that has just been sent two requests."""
    num_unreported = min(2, num_reqs)
    rate = float(known.get("rate", 0.0))  # type: ignore[arg-type]
    report = LoadReport(
        GroupId(0), num_waiting=num_reqs - num_unreported, waiting_tokens=num_tokens
    )
    groups = [
        GroupLoad(report, 100, prompt_tokens_per_s=rate),
        GroupLoad(LoadReport(GroupId(1)), 100, num_unreported=num_unreported),
    ]
    return should_shed(
        groups,
        request_tokens,
        drop_may_help=bool(known.get("drop_may_help")),
        max_num_queued_reqs=known.get("reqs"),  # type: ignore[arg-type]
        max_num_queued_tokens=known.get("tokens"),  # type: ignore[arg-type]
    )


class TestShedding:
    def test_without_limits_nothing_is_shed(self):
        assert shed(10**6, 10**9) is None

    def test_the_request_limit(self):
        assert shed(7, 0, reqs=8) is None
        assert shed(8, 0, reqs=8) == Shed(
            "8 requests are waiting, the limit is 8", 1, "max_num_queued_reqs"
        )

    def test_the_token_limit_counts_the_request(self):
        assert shed(3, 950, tokens=1000) is None
        refused = shed(3, 951, tokens=1000)
        assert refused is not None and refused.limit == "max_num_queued_tokens"

    def test_an_empty_queue_admits_anything(self):
        assert shed(0, 0, request_tokens=5000, tokens=1000, reqs=0) is None

    def test_a_drop_is_tried_first(self):
        assert shed(50, 10**6, reqs=8, tokens=1000, drop_may_help=True) is None

    @pytest.mark.parametrize(("rate", "seconds"), [(0.0, 1), (1e9, 1), (1000.0, 12), (1.0, 60)])
    def test_retry_after_is_the_time_to_work_the_queue_off(self, rate, seconds):
        refusal = shed(9, 12_000, reqs=8, rate=rate)
        assert refusal is not None
        assert refusal.retry_after_s == seconds
