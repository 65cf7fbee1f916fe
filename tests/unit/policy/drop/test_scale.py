from dataclasses import dataclass

import pytest

from kunserve.core.ids import GroupId
from kunserve.core.load import GroupLoad, LoadReport
from kunserve.policy.drop.scale import (
    ScaleView,
    choose_leaver,
    instances_to_order,
    is_oversized,
)

VIEW = ScaleView(num_instances=4, num_ordered=0, fewest=4, most=8, instance_blocks=100)


@dataclass
class Case:
    missing: int
    ordered: int
    wanted: int


@pytest.mark.parametrize(
    "case",
    [
        Case(missing=1, ordered=0, wanted=1),
        Case(missing=100, ordered=0, wanted=1),
        Case(missing=101, ordered=0, wanted=2),
        Case(missing=150, ordered=1, wanted=1),
        Case(missing=150, ordered=3, wanted=0),
        Case(missing=9999, ordered=0, wanted=4),
        Case(missing=9999, ordered=3, wanted=1),
        Case(missing=9999, ordered=4, wanted=0),
    ],
)
def test_what_was_ordered_counts_and_the_limit_holds(case: Case) -> None:
    view = VIEW._replace(num_ordered=case.ordered)
    assert instances_to_order(view, case.missing) == case.wanted


def test_one_fewer_must_hold_twice_the_demand() -> None:
    grown = VIEW._replace(num_instances=6)
    assert is_oversized(grown, need_blocks=249, num_waiting=0)
    assert not is_oversized(grown, need_blocks=250, num_waiting=0)
    assert not is_oversized(grown, need_blocks=0, num_waiting=1)
    assert not is_oversized(grown._replace(num_ordered=1), need_blocks=0, num_waiting=0)


def test_the_cluster_never_gets_smaller_than_it_was_set_up() -> None:
    assert not is_oversized(VIEW, need_blocks=0, num_waiting=0)


def test_the_least_loaded_leaves_and_of_equals_the_youngest() -> None:
    groups = [
        GroupLoad(LoadReport(GroupId(number), used_blocks=used), 100)
        for used, number in ((5, 1), (3, 2), (3, 7), (9, 8))
    ]
    assert choose_leaver(groups) == 7
    assert choose_leaver([]) is None
