"""A network is cut, in any direction, at any moment of a transition: nothing is lost or doubled.

The real controller and agents. A cut between two instances lets their words wait, as a connection
does; then each side says that it cannot reach the other. One between the front and an instance has
the front give it up, while its process lives on and speaks to its peers until they are told.
"""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kunserve.core.ids import InstanceId
from kunserve.core.messages import LinkBroken, Message
from kunserve_lab.world.actions import Letter
from kunserve_lab.world.in_process import Action, Address, CompletePull, Delivery
from tests.fake_cluster import FakeCluster

ZERO, ONE, TWO = (InstanceId(i) for i in range(3))
CUTS: list[tuple[Address, Address]] = [(ZERO, ONE), (ONE, ZERO), (ZERO, None), (None, ONE)]


class CutCluster(FakeCluster):
    """An in-process cluster whose links can be cut."""

    def __init__(self) -> None:
        self.cuts: set[tuple[Address, Address]] = set()
        self.outcasts: set[InstanceId] = set()
        """Given up by the front, and alive."""
        super().__init__(pools=(12, 12, 12))

    def actions(self) -> list[Action]:
        """Nothing comes over a cut link; a pull needs both directions."""
        return [action for action in super().actions() if not self._is_cut(action)]

    def _is_cut(self, action: Action) -> bool:
        match action:
            case Delivery(src, dst):
                return (src, dst) in self.cuts
            case CompletePull(taker, index):
                src = self.members[taker].mover.pulls[index].what.src
                return bool(self.cuts & {(src, taker), (taker, src)})
        return False

    def post(self, src: Address, dst: Address, message: Message, hidden: Any = None) -> None:
        """The front tells nothing to whom it has given up."""
        if not (src is None and dst in self.outcasts):
            super().post(src, dst, message, hidden)

    def _deliver(self, src: Address, dst: Address, letter: Letter) -> None:
        if not (dst is None and src in self.outcasts):
            super()._deliver(src, dst, letter)

    def notice(self, loses: bool) -> None:
        """Everybody finds out whom it cannot reach: no connection stands in one direction only.

        Words that were on their way are lost, or come when the connection stands again.
        """
        for pair in sorted(self.cuts, key=str):
            if loses:
                self.links.pop(pair, None)
            if None in pair:
                self.give_up(*[end for end in pair if end is not None])
                continue
            for me, peer in (pair, pair[::-1]):
                assert me is not None and peer is not None
                if me in self.members and me not in self.outcasts:
                    self.post(me, None, LinkBroken(me, peer, "cut", is_down=True))

    def give_up(self, instance_id: InstanceId) -> None:
        self.outcasts.add(instance_id)
        self.links.pop((None, instance_id), None)
        self.controller.lost(instance_id, "cut off", self.now_s)
        self.carry_out()

    def heal(self) -> None:
        """Whoever was given up is told so, and ends; another process takes its place."""
        self.cuts.clear()
        for instance_id in sorted(self.outcasts):
            del self.members[instance_id]
            for link in [link for link in self.links if instance_id in link]:
                del self.links[link]
        self.outcasts.clear()
        for instance_id in list(self.dead):
            self.start_instance(instance_id)

    def some(self, num_actions: int) -> None:
        stop = self.num_actions + num_actions
        self.run_except(lambda action: False, lambda: self.num_actions >= stop)


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
    cluster = CutCluster()
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
