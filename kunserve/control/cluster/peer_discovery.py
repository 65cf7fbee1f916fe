"""Which instances know each other: they are introduced before a command that needs it.

Where they map each other's memory they are introduced at once: until a drop it is mapped.

Addresses and keys go out as differences, and only to those who need them. A full mesh would be a
million connections between a thousand instances, and each start would be told to all of them.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from kunserve.control.cluster.commands import Outbox, Send
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Connect, LayerSource
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
        slow_s: Callable[[InstanceId], float] = lambda _: 0.0,
    ) -> None:
        """``partners``: with whom an instance stands in a group, a transition or a migration.

        ``slow_s``: how long it may take to read what it is told.
        """
        self._slow_s = slow_s
        self._outbox = outbox
        self._partners = partners
        self._most = most
        self._addresses: dict[InstanceId, PeerAddress] = {}
        self._known: dict[InstanceId, dict[InstanceId, None]] = {}
        """Whom each knows, those introduced last at the end."""
        self._pulls: dict[InstanceId, Counter[InstanceId]] = {}
        """Layers that each is to pull from others, until it has them."""
        self.given: Counter[InstanceId] = Counter()
        """Layers that each gives to others now."""

    def arrived(self, instance_id: InstanceId, address: PeerAddress) -> None:
        """An instance lives, and knows nobody but those whose memory it is to map."""
        self.left(instance_id)
        near = [
            peer
            for peer, at in self._addresses.items()
            if at.maps and address.maps and at.machine == address.machine
        ]
        self._addresses[instance_id] = address
        self._known[instance_id] = {}
        for peer in near[: self._most]:
            self.introduce((instance_id, peer))

    def left(self, instance_id: InstanceId) -> None:
        """It does not live any more: whoever knows it is told."""
        self._addresses.pop(instance_id, None)
        self.has_pulled(instance_id)
        self.given.pop(instance_id, None)
        for layers in self._pulls.values():
            layers.pop(instance_id, None)
        for peer in self._known.pop(instance_id, {}):
            del self._known[peer][instance_id]
            self._outbox.append(Send(peer, Connect((), (instance_id,))))

    def introduce(self, instances: Iterable[InstanceId]) -> None:
        """All of them will speak to each other."""
        everyone = sorted(set(instances))
        for one in everyone:
            self._lead(one, [peer for peer in everyone if peer != one])
        self._part_surplus(everyone)

    def introduce_to(self, taker: InstanceId, sources: Iterable[LayerSource]) -> None:
        """One pulls these layers now, and no others; who has died meanwhile gives none.

        Until ``has_pulled`` none of these links is parted.
        """
        self.has_pulled(taker)
        layers: Counter[InstanceId] = Counter()
        for run, source in ((one.layers, one.instance_id) for one in sources):
            if source is not None and source in self._addresses and source != taker:
                layers[source] += run.num_layers
        self._pulls[taker] = layers
        self.given.update(layers)
        peers = sorted(layers)
        for source in peers:
            self._lead(source, [taker])
        self._lead(taker, peers)
        self._part_surplus([taker, *peers])

    def has_pulled(self, taker: InstanceId) -> None:
        """All layers that it was to pull are there, or are wanted no more."""
        self.given -= self._pulls.pop(taker, Counter())

    def _lead(self, one: InstanceId, peers: list[InstanceId]) -> None:
        """Tell it of those that it does not know yet."""
        known = self._known[one]
        fresh = tuple((peer, self._addresses[peer]) for peer in peers if peer not in known)
        for peer in peers:
            known.pop(peer, None)
            known[peer] = None
        if fresh:
            slow_s = max(self._slow_s(peer) for peer, _ in fresh)
            self._outbox.append(Send(one, Connect(fresh, slow_s=slow_s)))

    def _part_surplus(self, instances: list[InstanceId]) -> None:
        """Whoever knows too many forgets those that it has not needed for longest."""
        for one in instances:
            known = self._known[one]
            if len(known) <= self._most:
                continue
            takers = (taker for taker, layers in self._pulls.items() if one in layers)
            needed = self._partners(one).union(instances, self._pulls.get(one, ()), takers)
            surplus = [peer for peer in known if peer not in needed]
            for peer in surplus[: len(known) - self._most]:
                if one not in self._partners(peer):
                    self._part(one, peer)

    def _part(self, one: InstanceId, other: InstanceId) -> None:
        for here, there in ((one, other), (other, one)):
            del self._known[here][there]
            self._outbox.append(Send(here, Connect((), (there,))))

    def check(self) -> None:
        """Assert that knowing is mutual, that everybody known lives, and who pulls knows whom."""
        assert self.given == sum(self._pulls.values(), Counter()), (self.given, self._pulls)
        assert all(self._known[i].keys() >= layers.keys() for i, layers in self._pulls.items())
        for one, known in self._known.items():
            assert one in self._addresses and one not in known, one
            assert all(one in self._known[peer] for peer in known), (one, known)
