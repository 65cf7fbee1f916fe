"""Whom to preempt, and whether its KV is thrown away or swapped."""

from dataclasses import replace

import pytest

from kunserve.policy.batch.relief import (
    HostLink,
    Preemptible,
    Relief,
    VictimView,
    choose_relief,
    choose_victim,
    group_host_link,
    hidden_blocks,
)

LINK = HostLink(blocks_per_s=100.0, capacity_blocks=None)
VICTIM = VictimView(num_blocks=10, other_blocks=90, recompute_s=0.02)
"""0.2 s out and back for 10 blocks; 0.02 s of compute for 100."""


def test_the_latest_goes_and_the_latest_waits() -> None:
    places = [(1.0, 0), (3.0, 1), (3.0, 2), (2.0, 3)]
    running = [Preemptible(0, *place) for place in places]
    assert choose_victim(running, 0) == 2
    assert choose_victim(running, 2) is None


def test_the_least_urgent_goes_whenever_it_came() -> None:
    running = [Preemptible(0, 9.0, 0), Preemptible(7, 1.0, 1), Preemptible(-3, 5.0, 2)]
    assert choose_victim(running, 0) == 1 and choose_victim(running, 2) == 1
    assert choose_victim(running, 1) is None


def test_what_wastes_less_memory_times_time() -> None:
    assert choose_relief(VICTIM, LINK, 0) is Relief.SWAP, "2 * 0.1 s * 10 = 0.02 s * 100"
    assert choose_relief(replace(VICTIM, recompute_s=0.019), LINK, 0) is Relief.RECOMPUTE
    assert choose_relief(replace(VICTIM, other_blocks=89), LINK, 0) is Relief.RECOMPUTE
    assert choose_relief(VICTIM, replace(LINK, blocks_per_s=99.0), 0) is Relief.RECOMPUTE


@pytest.mark.parametrize(("used", "relief"), [(5, Relief.SWAP), (6, Relief.RECOMPUTE)])
def test_host_memory_must_hold_all_of_it(used: int, relief: Relief) -> None:
    assert choose_relief(VICTIM, replace(LINK, capacity_blocks=15), used) is relief


def test_a_step_hides_what_the_link_moves_in_it() -> None:
    assert hidden_blocks(LINK, 0.055) == 5
    assert hidden_blocks(LINK, 0.0001) == 1, "a slow link moves at last"


def test_stages_share_the_work_and_the_time() -> None:
    alone = group_host_link(1000.0, 600, [50])
    assert (alone.blocks_per_s, alone.capacity_blocks) == (20.0, 12)
    pair = group_host_link(1000.0, 600, [30, 20])
    assert pair.blocks_per_s == 20.0, "half the bytes each, in half the time"
    assert pair.capacity_blocks == 20, "the larger share is full first"
    assert group_host_link(1000.0, None, [30, 20]).capacity_blocks is None
