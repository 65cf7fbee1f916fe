"""Bulk pulls over simulated links."""

from collections.abc import Callable, Mapping

from kunserve.control.arrays import Int32Array
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.snapshots import InstanceSpec
from kunserve.core.transfer import KvPull, LayerLoad, LayerPull
from kunserve_lab.sim.events import EventHeap
from kunserve_lab.sim.network import Network

Landed = Callable[[KvPull | LayerPull | LayerLoad, bool], None]


class SimMover:
    """Implements ``control.instance.body.Mover``: asks the source, then waits for the bytes."""

    def __init__(
        self,
        spec: InstanceSpec,
        heap: EventHeap,
        network: Network,
        peers: Mapping[InstanceId, "SimMover"],
        latency_s: float,
        host_bytes_per_s: float,
        landed: Landed,
    ) -> None:
        """``landed`` is called for every pull that was not cancelled."""
        self._spec = spec
        self._heap = heap
        self._network = network
        self._peers = peers
        self._latency_s = latency_s
        self._host_bytes_per_s = host_bytes_per_s
        self._landed = landed
        self._exports: dict[RequestId, Int32Array] = {}
        self._offered: LayerRange | None = None
        self._pulls: dict[int, KvPull | LayerPull | LayerLoad] = {}
        self._num_pulls = 0

    @property
    def is_quiet(self) -> bool:
        """Nothing is exported and nothing under way."""
        return not self._exports and not self._pulls

    def export_kv(self, request_id: RequestId, entries: Int32Array) -> None:
        """Let peers read the request's blocks."""
        self._exports[request_id] = entries

    def withdraw_kv(self, request_id: RequestId) -> None:
        """Stop serving the request's blocks."""
        self._exports.pop(request_id, None)

    def pull_kv(self, piece: KvPull, entries: Int32Array) -> None:
        """Fill blocks."""
        assert len(entries) == piece.end_block - piece.first_block, (piece, entries)
        num_bytes = len(entries) * piece.layers.num_layers * self._spec.unit_bytes
        self._pull(piece, piece.src, num_bytes)

    def pull_layers(self, layers: LayerRange, src: InstanceId | None) -> None:
        """Fill weights."""
        num_bytes = layers.num_layers * self._spec.layer_bytes
        if src is None:
            number = self._add(LayerLoad(layers))
            self._heap.after(num_bytes / self._host_bytes_per_s, self._land, number, True)
        else:
            self._pull(LayerPull(layers, src), src, num_bytes)

    def offer_layers(self, layers: LayerRange | None) -> None:
        """Let peers pull these layers and no others."""
        self._offered = layers

    def cancel(self, request_id: RequestId) -> None:
        """The request's pulls never complete."""
        self._pulls = {
            number: pull
            for number, pull in self._pulls.items()
            if not isinstance(pull, KvPull) or pull.request_id != request_id
        }

    def reset(self) -> None:
        """Forget every export and every pull."""
        self._exports.clear()
        self._pulls.clear()

    def can_give(self, what: KvPull | LayerPull | LayerLoad) -> bool:
        """Asked by a peer, when it begins and when it ends."""
        if isinstance(what, KvPull):
            return what.request_id in self._exports
        return self._offered is not None and self._offered.covers(what.layers)

    def _add(self, what: KvPull | LayerPull | LayerLoad) -> int:
        number = self._num_pulls
        self._num_pulls += 1
        self._pulls[number] = what
        return number

    def _pull(self, what: KvPull | LayerPull | LayerLoad, src: InstanceId, num_bytes: int) -> None:
        number = self._add(what)

        def is_there() -> bool:
            source = self._peers.get(src)
            return number in self._pulls and source is not None and source.can_give(what)

        def begin() -> None:
            me = self._spec.instance_id
            self._network.send_bulk(
                src, me, num_bytes, lambda: self._land(number, is_there()), is_there
            )

        self._heap.after(self._latency_s, begin)

    def _land(self, number: int, ok: bool) -> None:
        what = self._pulls.pop(number, None)
        if what is not None:
            self._landed(what, ok)
