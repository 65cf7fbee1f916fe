"""Whom an instance knows: the front tells what is new, and the wires are told all of it."""

from kunserve.core.ids import InstanceId
from kunserve.core.messages import Connect
from kunserve.core.transfer import PeerAddress
from kunserve.transport.bulk.mover import BulkMover
from kunserve.transport.peers.links import PeerLinks


class PeerBook:
    """The peers of one instance. Belongs to its loop's thread."""

    def __init__(self, peers: PeerLinks, mover: BulkMover, machine: str) -> None:
        """``machine``: whoever has the same one shares memory files with this process."""
        self._peers = peers
        self._mover = mover
        self._machine = machine
        self._known: dict[InstanceId, PeerAddress] = {}

    def take(self, message: Connect) -> None:
        """Open and close what the message says."""
        for peer in message.gone:
            self._known.pop(peer, None)
        self._known.update(message.peers)
        self._apply({peer: message.slow_s for peer, _ in message.peers})

    def forget_all(self) -> None:
        """A new front is there, and it does not know whom this instance knows."""
        self._known.clear()
        self._apply({})

    def _apply(self, slow_s: dict[InstanceId, float]) -> None:
        known = self._known.items()
        keys = {peer: at.public_key for peer, at in known if at.public_key}
        near = {peer for peer, at in known if at.machine == self._machine}
        self._peers.connect({peer: at.links for peer, at in known}, keys, slow_s)
        self._mover.connect({peer: at.bulk for peer, at in known}, keys, near)
