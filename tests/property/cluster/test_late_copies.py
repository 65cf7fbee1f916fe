"""Copies to host memory and back that last longer than steps: a device makes them beside those.

Bodies make them as late as they say that they do, over whatever lies there then.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.control.group.sequence import Sequence
from kunserve.control.group.swap import SwapSpace
from kunserve.control.instance import localize
from kunserve.control.instance.block_table import NOTHING
from kunserve.control.instance.body import HostCopy
from kunserve.control.instance.membership import Membership
from kunserve.control.instance.state import InstanceState
from kunserve.core.plan import SwapPlan
from kunserve.core.step import StepPlan
from kunserve_lab.world.fake_body import FakeBody
from tests.examples import examples
from tests.fake_cluster import FakeCluster
from tests.property.cluster.test_shared_prefixes import act

Copies = tuple[HostCopy, ...]
LATE = st.sampled_from([1, 2, 5])
SWAPS = st.sampled_from(
    [SwapPlan(1e7), SwapPlan(1e4), SwapPlan(1e7, 500), SwapPlan(1e7, max_park_s=0.5)]
)


def crowd(
    swap: SwapPlan, num_late_steps: int, seed: int, *, runs_ahead: bool = False
) -> FakeCluster:
    """One instance with far too little memory; some give up meanwhile."""
    draw = random.Random(seed)
    cluster = FakeCluster(3, [14], 2, max_num_seqs=6, swap=swap, num_late_steps=num_late_steps)
    cluster.runs_ahead = runs_ahead
    for _ in range(12):
        longest = cluster.max_model_len - 1
        cluster.request(
            draw.randrange(1, 9),
            min(longest - 9, draw.randrange(4, 16)),
            num_common=draw.choice([0, 4]),
        )
        act(cluster, draw, draw.randrange(30), 0.0)
        if cluster.unfinished and draw.random() < 0.2:
            cluster.cancel(draw.choice(cluster.unfinished))
    return cluster


@settings(max_examples=examples(30))
@given(swap=SWAPS, num_late_steps=LATE, seed=st.integers(0, 2**32), runs_ahead=st.booleans())
def test_whoever_swaps_has_its_own_tokens(
    swap: SwapPlan, num_late_steps: int, seed: int, runs_ahead: bool
) -> None:
    crowd(swap, num_late_steps, seed, runs_ahead=runs_ahead).finish()


def test_steps_go_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    execute = FakeBody.execute

    def watched(body: FakeBody, work: object, *given: object) -> object:
        seen.append(body.is_copying and body.host.num_waiting < body.num_late_steps)
        return execute(body, work, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeBody, "execute", watched)
    crowd(SwapPlan(1e7), 3, 0).finish()
    assert any(seen), "no copy has outlasted a step"


def test_it_is_seen_if_a_request_goes_on_before_its_kv_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finish, swap_units = SwapSpace.finish_copies, FakeBody.swap_units

    def finish_at_once(
        swap: SwapSpace, now_s: float, *, is_copying: bool = False
    ) -> list[Sequence]:
        return finish(swap, now_s)

    def over_the_last(body: FakeBody, out: Copies, back: Copies, *, beside_step: bool) -> None:
        body.end_copies()
        swap_units(body, out, back, beside_step=beside_step)

    monkeypatch.setattr(SwapSpace, "finish_copies", finish_at_once)
    monkeypatch.setattr(FakeBody, "swap_units", over_the_last)
    with pytest.raises(AssertionError):
        for seed in range(20):
            crowd(SwapPlan(1e7), 3, seed).finish()


def test_it_is_seen_if_units_are_used_before_they_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def free_at_once(state: InstanceState, membership: Membership, plan: StepPlan) -> None:
        for request_id, first_block, end_block in membership.swapped_out:
            state.table.release_layers(request_id, first_block, end_block, NOTHING)
        membership.swapped_out = ()

    finish = SwapSpace.finish_copies

    def free_in_books(swap: SwapSpace, now_s: float, *, is_copying: bool = False) -> list[Sequence]:
        for entry in swap._entries if is_copying else ():
            if entry.num_leaving:
                entry.num_leaving = 0
                swap._shrink(entry.seq, entry.num_resident)
        return finish(swap, now_s, is_copying=is_copying)

    monkeypatch.setattr(localize, "_free_swapped_out", free_at_once)
    monkeypatch.setattr(SwapSpace, "finish_copies", free_in_books)
    with pytest.raises(AssertionError):
        for seed in range(20):
            crowd(SwapPlan(1e7), 3, seed).finish()
