"""Bulk pulls that wait until a test completes them, for ``in_process``."""

from typing import NamedTuple

from kunserve.control.arrays import Int32Array
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import KvPull, LayerLoad, LayerPull


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
