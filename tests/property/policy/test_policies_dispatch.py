"""Dispatch under bursts: nothing that cannot fit, nothing uneven, nothing left to chance."""

from hypothesis import given
from hypothesis import strategies as st

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad, LoadReport
from kunserve.policy.dispatch.choice import choose_group


@st.composite
def views(draw: st.DrawFn, group: int) -> GroupLoad:
    running = draw(st.integers(0, 200))
    queue = draw(st.lists(st.integers(1, 30), max_size=5))
    report = LoadReport(
        GroupId(group),
        used_blocks=running,
        num_waiting=len(queue),
        head_of_line_blocks=sum(queue[:1]),
        waiting_blocks=sum(queue),
    )
    capacity_blocks = draw(st.integers(1, 200))
    return GroupLoad(report, capacity_blocks, unreported_blocks=draw(st.integers(0, 100)))


groups_of_views = st.integers(1, 6).flatmap(
    lambda n: st.tuples(*[views(group) for group in range(n)])
)


@given(groups_of_views, st.integers(1, 250), st.randoms(use_true_random=False))
def test_the_choice_fits_and_does_not_depend_on_order(groups, blocks, random):
    chosen = choose_group(groups, blocks)
    fitting = {g.group_id for g in groups if g.capacity_blocks >= blocks}
    assert chosen in fitting if fitting else chosen is None
    shuffled = list(groups)
    random.shuffle(shuffled)
    assert choose_group(shuffled, blocks) == chosen


@given(groups_of_views, st.integers(1, 250))
def test_a_group_that_starts_at_once_is_preferred_to_one_that_queues(groups, blocks):
    chosen = choose_group(groups, blocks)
    is_open = {
        g.group_id: g.demand_blocks + blocks <= g.capacity_blocks and g.report.num_waiting <= 1
        for g in groups
    }
    if any(is_open.values()):
        assert chosen is not None
        assert is_open[chosen]


@given(
    st.integers(1, 8),
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.integers(0, 90),
    st.integers(60, 400),
)
def test_a_burst_between_two_reports_spreads_within_one_request(num_groups, burst, used, capacity):
    """All groups report the same and stay silent for the whole burst."""
    sent = [0] * num_groups
    for blocks in burst:
        groups = [
            GroupLoad(LoadReport(GroupId(g), used_blocks=used), capacity, unreported_blocks=sent[g])
            for g in range(num_groups)
        ]
        chosen = choose_group(groups, blocks)
        assert chosen is not None
        sent[chosen] += blocks
    assert max(sent) - min(sent) <= max(burst)
