"""What a group may do wherever it stands: the table, and what the page about it says."""

import itertools
from pathlib import Path

import pytest

from kunserve.control.cluster.standing import Act, Standing, allowed
from kunserve.core.ids import GroupId, InstanceId
from tests.unit.control.cluster.test_placement import placed

PAGE = Path(__file__).parents[4] / "docs" / "architecture.md"
S = Standing
BARRED_IN = {
    Act.TAKE: {S.FORMING, S.CLOSING, S.TESTING, S.LEAVING, S.DEPARTING},
    Act.RETURN: {S.FORMING, S.CLOSING, S.TESTING},
    Act.CHANGE: set(Standing),
    Act.LEND: {S.FORMING, S.CLOSING, S.TESTING, S.CHANGING},
    Act.MOVE: set(Standing),
    Act.GIVE: set(Standing) - {S.LEAVING, S.DEPARTING},
    Act.LEAVE: set(Standing) - {S.MIGRATING, S.DEPARTING},
    Act.TEST: set(Standing) - {S.TESTING},
    Act.END: set(Standing) - {S.LEAVING, S.DEPARTING},
}
ONLY_WHO_IS_EMPTIED = {Act.GIVE, Act.END}


@pytest.mark.parametrize("act", Act)
def test_a_group_may_do_what_all_that_is_true_of_it_allows(act: Act) -> None:
    for count in range(len(Standing) + 1):
        for standing in map(frozenset, itertools.combinations(Standing, count)):
            may = not standing & BARRED_IN[act]
            if act in ONLY_WHO_IS_EMPTIED:
                may = may and bool(standing & {S.LEAVING, S.DEPARTING})
            assert (act in allowed(standing)) == may, (standing, act)


def test_the_page_shows_the_table() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line[:1] == "|"]
    shown = {cells[0].strip(): {word.strip() for word in cells[1].split(",")} for cells in rows}
    table = {"serving": allowed(frozenset())}
    table |= {one.value: allowed(frozenset({one})) for one in Standing}
    for name, acts in table.items():
        assert shown[name] == ({act.value for act in acts} or {"nothing"}), name


@pytest.mark.parametrize("standing", Standing)
def test_whoever_asks_for_groups_by_leader_is_given_the_same(standing: Standing) -> None:
    placement = placed((0,), (1,))
    assert [group.layout.leader for group in placement.candidates()] == [0, 1]
    if standing is Standing.FORMING:
        placement.begin_forming(GroupId(0))
    else:
        placement.mark(GroupId(0), standing)
    found = placement.candidates_led_by({InstanceId(0), InstanceId(1)})
    assert found == placement.candidates() == placement.that_may(Act.TAKE)
    assert (len(found) == 2) == (Act.TAKE in allowed(frozenset({standing})))
