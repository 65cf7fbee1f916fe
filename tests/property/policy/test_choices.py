"""Choices by what is saved, one after the other, and shares of what waits."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad, LoadReport
from kunserve.policy.dispatch.affinity import num_requests
from kunserve.policy.dispatch.choice import choose_group, share_out


@st.composite
def loads(draw: st.DrawFn, group: int) -> GroupLoad:
    queue = draw(st.lists(st.integers(1, 30), max_size=3))
    report = LoadReport(
        GroupId(group),
        used_blocks=draw(st.integers(0, 60)),
        growth_blocks=draw(st.integers(0, 9)),
        num_waiting=len(queue),
        head_of_line_blocks=sum(queue[:1]),
        waiting_blocks=sum(queue),
    )
    return GroupLoad(
        report,
        capacity_blocks=draw(st.sampled_from((40, 60, 60, 90))),
        unreported_blocks=draw(st.integers(0, 20)),
        num_returning=draw(st.integers(0, 2)),
        returning_blocks=draw(st.integers(0, 40)),
    )


groups_of_loads = st.integers(1, 6).flatmap(
    lambda n: st.tuples(*[loads(group) for group in range(n)])
)
savings = st.lists(
    st.dictionaries(st.integers(0, 6).map(GroupId), st.integers(1, 60), max_size=3),
    min_size=25,
    max_size=25,
)


@given(groups_of_loads, st.integers(1, 100), savings)
def test_saving_moves_a_request_only_to_a_group_that_saves_and_is_near(groups, blocks, saved_each):
    without = choose_group(groups, blocks)
    loads_by_id = {load.group_id: load for load in groups}
    assert choose_group(groups, blocks, {}) == without
    assert choose_group(groups, blocks, {GroupId(99): 7}) == without
    for saved in saved_each:
        chosen = choose_group(groups, blocks, saved)
        if chosen == without:
            continue
        assert saved[chosen] > 0
        here, there = num_requests(loads_by_id[chosen]), num_requests(loads_by_id[without])
        assert here <= 2 * there + 2


@given(st.integers(2, 8), st.integers(1, 40), st.integers(20, 300))
def test_a_beginning_that_all_have_spreads(num_groups, blocks, num_sent):
    """Whoever was sent one request of them has the beginning from then on."""
    groups = [GroupLoad(LoadReport(GroupId(i)), 100_000) for i in range(num_groups)]
    num_at, saved = [0] * num_groups, {}
    for _ in range(num_sent):
        group_id = choose_group(groups, blocks, saved)
        load = groups[group_id]
        groups[group_id] = replace(
            load,
            num_unreported=load.num_unreported + 1,
            unreported_blocks=load.unreported_blocks + blocks,
        )
        saved[group_id] = blocks - 1
        num_at[group_id] += 1
    assert max(num_at) <= max(3, 2 * min(num_at) + 3), num_at


@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**4), min_size=1, max_size=30))
def test_shares_are_whole_and_by_capacity(num_blocks, capacities):
    shares = share_out(num_blocks, capacities)
    assert len(shares) == len(capacities)
    total = sum(capacities)
    assert sum(shares) == (num_blocks if total else 0)
    for share, capacity in zip(shares, capacities, strict=True):
        assert abs(share - num_blocks * capacity / max(1, total)) < 1
