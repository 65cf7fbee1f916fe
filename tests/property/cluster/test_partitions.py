"""A network is cut, in any direction, at any moment of a transition: nothing is lost or doubled.

The real controller and agents. A cut between two instances lets their words wait, as a connection
does; then each side says that it cannot reach the other. One between the front and an instance has
the front give it up, while its process lives on and speaks to its peers until they are told.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.ids import InstanceId
from kunserve_lab.world.world import Address
from tests.cut_cluster import CutCluster

ZERO, ONE = InstanceId(0), InstanceId(1)
CUTS: list[tuple[Address, Address]] = [(ZERO, ONE), (ONE, ZERO), (ZERO, None), (None, ONE)]


@settings(max_examples=10)
@given(
    is_restore=st.booleans(),
    before=st.integers(0, 90),
    cut=st.sampled_from(CUTS),
    unseen=st.integers(0, 40),
    loses=st.booleans(),
)
def test_a_cut_at_any_moment_of_a_transition(
    is_restore: bool, before: int, cut: tuple[Address, Address], unseen: int, loses: bool
) -> None:
    cluster = CutCluster(pools=(12, 12, 12))
    for number in range(6):
        cluster.request(4 + number, 14)
    cluster.some(40)
    cluster.drop((0, 0, 2), (1, 2, 4))
    if is_restore:
        cluster.run_until(lambda: bool(cluster.records))
        merged = [group for group in cluster.groups() if len(group.stages) > 1]
        for group in merged:
            cluster.restore(group)
    cluster.some(before)
    cluster.cuts.add(cut)
    cluster.some(unseen)
    cluster.notice(loses)
    cluster.run_until_idle()  # while the cut lasts
    cluster.prove_tokens()
    cluster.heal()
    for _ in range(3):
        cluster.request(5, 9)
    cluster.finish()
