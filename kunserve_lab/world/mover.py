"""Bulk pulls of a world: under way until its order lets them land."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kunserve.control.arrays import Int32Array
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.snapshots import InstanceSpec
from kunserve.core.transfer import KvPull, LayerLoad, LayerPull

Pulled: TypeAlias = KvPull | LayerPull | LayerLoad


def num_bytes_of(what: Pulled, spec: InstanceSpec) -> int:
    """Of KV or weights."""
    if isinstance(what, KvPull):
        num_blocks = what.end_block - what.first_block
        return num_blocks * what.layers.num_layers * spec.unit_bytes
    return what.layers.num_layers * spec.layer_bytes


@dataclass(slots=True, eq=False)
class Pull:
    """A bulk transfer under way."""

    what: Pulled
    entries: Int32Array | None = None
    """Where blocks of KV go."""
    is_wanted: bool = True
    """It was not called off."""
    began_s: float | None = None
    """When its first byte was sent, where that is known."""
    asked_s: float = 0.0
    """When it set out, in a world whose order writes that down."""


class WorldMover:
    """Implements ``control.instance.body.Mover``: a pull lands when somebody lets it."""

    def __init__(
        self,
        begin: Callable[[Pull], None] = lambda pull: None,
        coming_bytes: Callable[[list[Pull]], int] = lambda pulls: 0,
    ) -> None:
        """``begin`` is told of every pull that sets out.

        ``coming_bytes``: of pulls under way, those that have come.
        """
        self.exports: dict[RequestId, Int32Array] = {}
        self.offered: LayerRange | None = None
        self.pulls: list[Pull] = []
        """Under way, in the order in which they set out."""
        self._begin = begin
        self.landed_bytes = 0
        self._coming_bytes = coming_bytes

    @property
    def num_bytes_taken(self) -> int:
        """Of KV and weights that have come so far."""
        return self.landed_bytes + self._coming_bytes(self.pulls)

    @property
    def is_quiet(self) -> bool:
        """Nothing is exported and nothing under way."""
        return not self.exports and not self.pulls

    def export_kv(self, request_id: RequestId, entries: Int32Array) -> None:
        """Let peers read the request's blocks."""
        self.exports[request_id] = entries

    def withdraw_kv(self, request_id: RequestId) -> None:
        """Stop serving the request's blocks."""
        self.exports.pop(request_id, None)

    def pull_kv(self, piece: KvPull, entries: Int32Array) -> None:
        """Start filling blocks."""
        assert len(entries) == piece.end_block - piece.first_block, (piece, entries)
        self._pull(Pull(piece, entries))

    def pull_layers(self, layers: LayerRange, src: InstanceId | None) -> None:
        """Start filling weights."""
        self._pull(Pull(LayerLoad(layers) if src is None else LayerPull(layers, src)))

    def _pull(self, pull: Pull) -> None:
        self.pulls.append(pull)
        self._begin(pull)

    def offer_layers(self, layers: LayerRange | None) -> None:
        """Let peers pull these layers and no others."""
        self.offered = layers

    def cancel(self, request_id: RequestId) -> None:
        """Forget the pulls of a request."""
        self._forget(
            [
                pull
                for pull in self.pulls
                if isinstance(pull.what, KvPull) and pull.what.request_id == request_id
            ]
        )

    def cancel_layers(self) -> None:
        """Forget the pulls and loads of weights."""
        self._forget([pull for pull in self.pulls if not isinstance(pull.what, KvPull)])

    def reset(self) -> None:
        """Forget every export and every pull."""
        self.exports.clear()
        self._forget(self.pulls)

    def _forget(self, pulls: list[Pull]) -> None:
        for pull in pulls:
            pull.is_wanted = False
        self.pulls = [pull for pull in self.pulls if pull.is_wanted]

    def can_give(self, what: Pulled) -> bool:
        """Asked by a peer: whether the KV or the layers are here to be read."""
        if isinstance(what, KvPull):
            return what.request_id in self.exports
        return self.offered is not None and self.offered.covers(what.layers)

    def given(self, piece: KvPull) -> Int32Array:
        """Where the blocks are that a peer pulls."""
        return self.exports[piece.request_id][piece.first_block : piece.end_block]
