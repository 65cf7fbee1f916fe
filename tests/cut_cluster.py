"""A cluster of fake instances whose links a test cuts, in one direction or both."""

from typing import Any

from kunserve.core.ids import InstanceId
from kunserve.core.messages import LinkBroken, Message
from kunserve_lab.world.actions import Action, CompletePull, Delivery, Letter
from kunserve_lab.world.world import Address
from tests.fake_cluster import FakeCluster


class CutCluster(FakeCluster):
    """An in-process cluster whose links can be cut."""

    def __init__(self, **settings: Any) -> None:
        """As ``FakeCluster``."""
        self.cuts: set[tuple[Address, Address]] = set()
        self.outcasts: set[InstanceId] = set()
        """Given up by the front, and alive."""
        super().__init__(**settings)

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
        """The front cannot reach it any more."""
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
        """Let so many actions happen, if there are as many."""
        stop = self.num_actions + num_actions
        self.run_except(lambda action: False, lambda: self.num_actions >= stop)
