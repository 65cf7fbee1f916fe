"""Which instances know each other: they are introduced before a command that needs it.

Addresses and keys go out as differences, and only to those who need them. A full mesh would be a
million connections between a thousand instances, and each start would be told to all of them.
"""

from collections.abc import Callable, Iterable

from kunserve.control.cluster.commands import Outbox
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Connect
from kunserve.core.transfer import PeerAddress

MOST_KNOWN = 64
"""Peers that an instance keeps connections to, beside those that it stands with now."""


class PeerDiscovery:
    """Owner of who knows whom. Knowing is mutual."""

    def __init__(
        self,
        outbox: Outbox,
        partners: Callable[[InstanceId], set[InstanceId]],
        most: int = MOST_KNOWN,
    ) -> None:
        """``partners``: with whom an instance stands in a group, a transition or a migration."""
        self._outbox = outbox
        self._partners = partners
        self._most = most
        self._addresses: dict[InstanceId, PeerAddress] = {}
        self._known: dict[InstanceId, dict[InstanceId, None]] = {}
        """Whom each knows, those introduced last at the end."""

    def arrived(self, instance_id: InstanceId, address: PeerAddress) -> None:
        """An instance lives, and knows nobody."""
        self.left(instance_id)
        self._addresses[instance_id] = address
        self._known[instance_id] = {}

    def left(self, instance_id: InstanceId) -> None:
        """It does not live any more: whoever knows it is told."""
        self._addresses.pop(instance_id, None)
        for peer in self._known.pop(instance_id, {}):
            del self._known[peer][instance_id]
            self._outbox.send(peer, Connect((), (instance_id,)))

    def introduce(self, instances: Iterable[InstanceId]) -> None:
        """All of them will speak to each other."""
        everyone = sorted(set(instances))
        for one in everyone:
            self._lead(one, [peer for peer in everyone if peer != one])
        self._part_surplus(everyone)

    def introduce_to(self, taker: InstanceId, sources: Iterable[InstanceId | None]) -> None:
        """One will pull from the others; those that have died meanwhile are left out."""
        living = {s for s in sources if s is not None and s in self._addresses}
        peers = sorted(living - {taker})
        for source in peers:
            self._lead(source, [taker])
        self._lead(taker, peers)
        self._part_surplus([taker, *peers])

    def _lead(self, one: InstanceId, peers: list[InstanceId]) -> None:
        """Tell it of those that it does not know yet."""
        known = self._known[one]
        fresh = tuple((peer, self._addresses[peer]) for peer in peers if peer not in known)
        for peer in peers:
            known.pop(peer, None)
            known[peer] = None
        if fresh:
            self._outbox.send(one, Connect(fresh))

    def _part_surplus(self, instances: list[InstanceId]) -> None:
        """Whoever knows too many forgets those that it has not needed for longest."""
        for one in instances:
            known = self._known[one]
            if len(known) <= self._most:
                continue
            needed = self._partners(one).union(instances)
            surplus = [peer for peer in known if peer not in needed]
            for peer in surplus[: len(known) - self._most]:
                if one not in self._partners(peer):
                    self._part(one, peer)

    def _part(self, one: InstanceId, other: InstanceId) -> None:
        for here, there in ((one, other), (other, one)):
            del self._known[here][there]
            self._outbox.send(here, Connect((), (there,)))

    def check(self) -> None:
        """Assert that knowing is mutual, and that everybody known lives."""
        for one, known in self._known.items():
            assert one in self._addresses and one not in known, one
            assert all(one in self._known[peer] for peer in known), (one, known)
