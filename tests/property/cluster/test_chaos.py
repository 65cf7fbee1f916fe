"""Chaos in virtual time: a cluster under load while everything that can go wrong does.

Deaths (in steps, exchanges and loads too), instances that hang, poison requests that kill whoever
runs them, aborts, forced drops and restores, in any interleaving. Afterwards every accepted
request has ended exactly once, with its own tokens, and no block of any is left. A schedule is a
list of plain values, so that Hypothesis prints and shrinks what fails. ``make chaos-sim`` runs
10,000 of them. Two schedules are two minutes long, with a fault about every two seconds and fronts
that die: what ``make chaos`` does in real time, compressed.
"""

import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos_cluster import ChaosCluster, play
from tests.chaos_events import Happening, Harm, Load, Run, Setting, Wait
from tests.chaos_schedules import loads, runs

NUM_SCHEDULES = int(os.environ.get("CHAOS_SCHEDULES", "40"))
LONG_S = 120.0
"""Virtual time of a long schedule."""
BETWEEN_HARMS_S = 2.0
"""On average, in a long one."""
MAX_OPEN = 10
"""Requests under way there."""

_harms = [
    *("drop", "drop", "restore", "restore", "kill", "hang", "start", "cancel", "lose", "double"),
    *("resize", "resize"),
]
_waits = st.builds(Wait, st.sampled_from([0.1, 0.6, 3.0]))
_harm = st.builds(Harm, st.sampled_from(_harms), st.integers(0, 7))
schedules = st.lists(
    st.one_of(loads, loads, runs, runs, runs, _waits, _harm, _harm), min_size=12, max_size=40
)


@pytest.mark.timeout(600 + NUM_SCHEDULES)  # a failure takes minutes to shrink
@settings(max_examples=NUM_SCHEDULES)
@given(num_instances=st.integers(1, 4), schedule=schedules, runs_ahead=st.booleans())
def test_chaos_leaves_every_request_ended_once_with_its_tokens(
    num_instances: int, schedule: list[Happening], runs_ahead: bool
) -> None:
    cluster = ChaosCluster(Setting(num_instances))
    cluster.runs_ahead = runs_ahead
    play(cluster, schedule)
    cluster.heal()
    cluster.finish()


def two_minutes(cluster: ChaosCluster, draw: random.Random) -> Iterator[Happening]:
    """Faults all the time, under load; most dead instances are started again soon."""
    next_harm_s = 0.0
    kinds = [*_harms, "start", "start", "start", "front"]
    while cluster.now_s < LONG_S:
        if len(cluster.unfinished) < MAX_OPEN:
            is_poison = draw.random() < 0.02
            yield Load(draw.randint(1, 3), draw.randint(1, 14), draw.randint(1, 10), is_poison)
        yield Run(draw.randint(1, 60), draw.randrange(2**16))
        if cluster.now_s >= next_harm_s:
            next_harm_s = cluster.now_s + draw.expovariate(1.0 / BETWEEN_HARMS_S)
            yield Harm(draw.choice(kinds), draw.randrange(8))
        yield Wait(draw.choice([0.1, 0.6, 1.0]))


@pytest.mark.parametrize(("seed", "runs_ahead"), [(1, False), (2, False), (3, True)])
def test_two_minutes_of_chaos(seed: int, runs_ahead: bool) -> None:
    draw = random.Random(seed)
    cluster = ChaosCluster(Setting(4), max_deaths=100, max_poison=20)
    cluster.runs_ahead = runs_ahead
    play(cluster, two_minutes(cluster, draw))
    cluster.heal()
    cluster.finish()
    assert cluster.num_fronts and cluster.num_deaths and len(cluster.accounts) > 100


def test_of_several_that_kill_each_is_found() -> None:
    """A test that fails lets the other suspects go, and one of them kills again and is held again:
    it must not come between the failed test and the halves of it.
    """
    schedule: list[Happening] = [
        *(
            Load(1, 1, 1, False),
            Load(2, 1, 1, False),
            Load(1, 6, 10, False),
            Load(3, 9, 7, False),
            Load(1, 1, 1, False),
            Wait(0.1),
        ),
        *(Load(1, 1, 3, False), Wait(0.1), Wait(0.1), Load(5, 1, 4, True), Load(2, 1, 3, False)),
        *(
            Run(45, 16985),
            Load(6, 1, 1, False),
            Run(82, 381),
            Load(4, 4, 1, False),
            Load(1, 9, 8, False),
        ),
        *(Load(6, 6, 1, False), Run(26, 260), Load(1, 9, 10, False), *[Run(1, 0)] * 5),
        *(Load(1, 13, 10, False), Harm("resize", 1)),
    ]
    cluster = ChaosCluster(Setting(3))
    play(cluster, schedule)
    cluster.heal()
    cluster.finish()
    assert len(cluster.poison) > 1


def test_a_group_kept_for_a_suspect_that_leaves_is_as_any_other() -> None:
    schedule: list[Happening] = [
        *(Wait(0.1), Run(37, 18593), Harm("kill", 1), Load(4, 7, 3, False), Harm("resize", 2)),
        *(Wait(0.6), Run(68, 78), Load(1, 6, 9, True), Run(124, 251), Run(14, 102)),
        *(Harm("cancel", 4), Run(124, 251), Load(5, 13, 4, False), Harm("resize", 6), Wait(0.6)),
        *(Load(5, 13, 9, False), Load(4, 13, 10, False, 6), Wait(3.0), Load(4, 7, 3, False)),
    ]
    cluster = ChaosCluster(Setting(4))
    play(cluster, schedule)
    cluster.heal()
    cluster.finish()
