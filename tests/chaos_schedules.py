"""What random machines draw lives of a ``ChaosCluster`` from. Each says which harms there are."""

from collections.abc import Iterable

from hypothesis import strategies as st

from kunserve.core.config import ClusterConfig, OverloadConfig
from kunserve.core.plan import SwapPlan
from tests.chaos_cluster import MAX_INSTANCES
from tests.chaos_events import Endure, Happening, Harm, Load, Run, Setting, Wait

BY_HAND = ("drop", "drop", "restore", "call off", "park", "reset cache")
DEATHS = ("kill", "blame", "gone", "hang", "start", "start")
CLIENTS = ("cancel",)
FRONTS = ("front", "late front")
LINKS = ("lose", "double", "part", "part", "meet")
DISKS = ("bad disk", "disk error", "stick", "slow")
SIZE = ("resize",)
LATER_POOLS = st.sampled_from([(), (), (24, 30), (6, 24)])
SWAPS = (None, None, SwapPlan(1e7), SwapPlan(1e7, 500), SwapPlan(1e7, max_park_s=0.5))

_rarely = st.sampled_from([False] * 11 + [True])
loads = st.builds(
    Load,
    st.integers(1, 6),
    st.integers(1, 14),
    st.integers(1, 10),
    _rarely,
    st.sampled_from([0, 0, 6, 12]),
)
runs = st.builds(Run, st.integers(1, 150), st.integers(0, 2**16))
waits = st.builds(Wait, st.sampled_from([0.1, 0.6, 3.0, 150.0]))
endures = st.builds(
    Endure, st.sampled_from([1.0, 5.0, 40.0, 250.0]), st.sampled_from([0, 0, 0, 2, 5])
)


def lives(
    harms: Iterable[str], *, least: int = 12, most: int = 40
) -> st.SearchStrategy[list[Happening]]:
    """Load, and these harms, whose effect often shows in fair time only."""
    harm = st.builds(Harm, st.sampled_from(list(harms)), st.integers(0, 7))
    one = st.one_of(loads, loads, runs, runs, runs, waits, endures, harm, harm, harm)
    return st.lists(one, min_size=least, max_size=most)


@st.composite
def by_hand(draw: st.DrawFn) -> Setting:
    """Groups change by order, among parking, guesses, rings, and instances of two kinds."""
    num_instances = draw(st.integers(1, 4))
    return Setting(
        num_instances,
        swap=draw(st.sampled_from(SWAPS)),
        guesses=draw(st.sampled_from([False, False, True])),
        ranks=_ranks(draw, num_instances),
        later_pools=draw(LATER_POOLS),
        windows=draw(st.sampled_from([None, None, (3, 2)])),
    )


@st.composite
def by_monitor(draw: st.DrawFn) -> Setting:
    """A cluster whose monitor decides; it may park behind the drop, and grow by itself."""
    num_instances = draw(st.integers(2, 4))
    parks = draw(st.booleans())
    grows = draw(st.sampled_from([False, False, True]))
    return Setting(
        num_instances,
        pool=draw(st.sampled_from([12, 20])),
        swap=SwapPlan(1e7, 500, max_park_s=1.0, is_second_line=True) if parks else None,
        guesses=draw(st.sampled_from([False, False, True])),
        overload=OverloadConfig(
            "drop",
            dwell_s=draw(st.sampled_from([0.0, 0.3, 2.0])),
            restore_hold_s=draw(st.sampled_from([0.1, 1.0, 3.0])),
            park_behind_drop=parks,
        ),
        size=ClusterConfig(
            num_instances=num_instances,
            min_instances=1 if grows else None,
            max_instances=MAX_INSTANCES if grows else None,
        ),
        ranks=_ranks(draw, num_instances),
        max_num_seqs=16,
        later_pools=draw(LATER_POOLS),
        windows=draw(st.sampled_from([None, None, (3, 2)])),
    )


def _ranks(draw: st.DrawFn, num_instances: int) -> tuple[int, ...]:
    if draw(st.sampled_from([True, True, False])):
        return ()
    return tuple(draw(st.sampled_from([1, 1, 2])) for _ in range(num_instances))
