"""Bulk pulls that wait until a test completes them, for ``in_process``."""

from typing import NamedTuple

from kunserve.control.arrays import Int32Array
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import KvPull, LayerLoad, LayerPull
from kunserve_lab.world.fake_body import FakeBody


class Pull(NamedTuple):
    """A bulk transfer under way."""

    what: KvPull | LayerPull | LayerLoad
    entries: Int32Array | None


class InProcessMover:
    """Implements ``control.instance.body.Mover``: a pull copies when somebody completes it."""

    def __init__(self) -> None:
        self.exports: dict[RequestId, Int32Array] = {}
        self.offered: LayerRange | None = None
        self.pulls: list[Pull] = []

    def export_kv(self, request_id: RequestId, entries: Int32Array) -> None:
        """Let peers read the request's blocks."""
        self.exports[request_id] = entries

    def withdraw_kv(self, request_id: RequestId) -> None:
        """Stop serving the request's blocks."""
        self.exports.pop(request_id, None)

    def pull_kv(self, piece: KvPull, entries: Int32Array) -> None:
        """Start filling blocks."""
        self.pulls.append(Pull(piece, entries))

    def pull_layers(self, layers: LayerRange, src: InstanceId | None) -> None:
        """Start filling weights."""
        what = LayerLoad(layers) if src is None else LayerPull(layers, src)
        self.pulls.append(Pull(what, None))

    def offer_layers(self, layers: LayerRange | None) -> None:
        """Let peers pull these layers and no others."""
        self.offered = layers

    def cancel(self, request_id: RequestId) -> None:
        """Forget the pulls of a request."""
        self.pulls = [
            pull
            for pull in self.pulls
            if not isinstance(pull.what, KvPull) or pull.what.request_id != request_id
        ]

    def reset(self) -> None:
        """Forget every export and every pull."""
        self.exports.clear()
        self.pulls.clear()

    # As a source

    def copy_layers(self, what: LayerPull, mine: FakeBody, theirs: FakeBody) -> bool:
        """Give what a peer pulls; False if it is not offered."""
        if self.offered is None or not self.offered.covers(what.layers):
            return False
        for layer in range(*what.layers):
            theirs.layer_view(layer)[:] = mine.layer_view(layer)
        return True

    def copy_kv(self, piece: KvPull, mine: FakeBody, theirs: FakeBody, entries: Int32Array) -> bool:
        """The same for a request's KV, into the puller's ``entries``."""
        exported = self.exports.get(piece.request_id)
        if exported is None:
            return False
        given = exported[piece.first_block : piece.end_block].tolist()
        first, num_layers = piece.layers.first, piece.layers.num_layers
        for src, dst in zip(given, entries.tolist(), strict=True):
            view = theirs.unit_view(dst + first, num_layers)
            view[:] = mine.unit_view(src + first, num_layers)
        return True
