"""The giving side of bulk: which memory peers may read. Sans-I/O; the mover holds the lock."""

from collections import OrderedDict

import numpy as np

from kunserve.core.ids import RequestId
from kunserve.core.layout import LayerRange
from kunserve.transport.bulk.movable_memory import MovableMemory, Places
from kunserve.transport.bulk.shared_files import Counts
from kunserve.transport.bulk.wire import (
    Answer,
    Bytes,
    Chunk,
    Int32Array,
    KvChunk,
    LayerChunk,
    Located,
    SharedFile,
    SharedGranules,
    unit_runs,
)

MAX_WITHDRAWN = 8192
"""Withdrawn requests that are remembered."""

_NO_TRANSITION = -1


class BulkSource:
    """Exported requests and offered layers."""

    def __init__(
        self,
        memory: MovableMemory,
        counts: Counts | None = None,
        granules: SharedGranules | None = None,
    ) -> None:
        """``counts`` tell takers when a place is void; without them they get bytes only.

        ``granules`` are where takers can map the memory, if it is a device's.
        """
        self._memory = memory
        self._counts = counts
        self._granules = granules
        self._exports: dict[RequestId, Int32Array] = {}
        self._withdrawn: OrderedDict[RequestId, int] = OrderedDict()
        self._latest_transition = _NO_TRANSITION
        self._offered: LayerRange | None = None

    @property
    def offered(self) -> LayerRange | None:
        """Layers that peers may read; all that have memory and content."""
        return self._offered

    def offer(self, layers: LayerRange | None) -> None:
        """Let peers read these layers from now on."""
        self._offered = layers
        self._void_places(None)

    def export(self, request_id: RequestId, entries: Int32Array) -> None:
        """Serve the request's blocks from now on."""
        if request_id in self._exports:
            self._void_places(request_id)
        self._exports[request_id] = np.array(entries, dtype=np.int32)
        self._withdrawn.pop(request_id, None)

    def withdraw(self, request_id: RequestId) -> None:
        """Refuse the request from now on, in every transition seen so far."""
        if self._exports.pop(request_id, None) is None:
            return
        self._void_places(request_id)
        self._withdrawn[request_id] = self._latest_transition
        if len(self._withdrawn) > MAX_WITHDRAWN:
            self._withdrawn.popitem(last=False)

    def withdraw_all(self) -> None:
        """Serve no request's blocks."""
        for request_id in tuple(self._exports):
            self.withdraw(request_id)

    def saw_transition(self, transition_id: int) -> None:
        """A transition is under way here or at a peer.

        A request that moved away in an earlier transition may be exported again in a later one;
        until it is, a peer that is ahead of us is told to wait, not refused.
        """
        self._latest_transition = max(self._latest_transition, transition_id)

    def serve(self, chunk: Chunk) -> tuple[Answer, Bytes | Located | None]:
        """The chunk's bytes, copied; or where they lie; or why there are none."""
        if isinstance(chunk, KvChunk):
            return self._serve_kv(chunk)
        return self._serve_layer(chunk) if isinstance(chunk, LayerChunk) else self._say_where()

    def _say_where(self) -> tuple[Answer, Located | None]:
        shared = self._shared(None)
        return (
            (Answer.REFUSED, None) if shared is None else (Answer.LOCATED, Located(*shared[1], ()))
        )

    def _serve_layer(self, chunk: LayerChunk) -> tuple[Answer, Bytes | Located | None]:
        if self.offered is None or not self.offered.first <= chunk.layer < self.offered.end:
            return Answer.REFUSED, None
        left = self._memory.layer_bytes - chunk.offset
        if not (chunk.offset >= 0 and 0 < chunk.num_bytes <= left):
            return Answer.REFUSED, None
        if chunk.may_read and (shared := self._shared(None)) is not None:
            places, at = shared
            where = places.locate_layer(chunk.layer, chunk.offset, chunk.num_bytes)
            return Answer.LOCATED, Located(*at, tuple(where))
        data = np.empty(chunk.num_bytes, dtype=np.uint8)
        self._memory.read_layer(chunk.layer, chunk.offset, data)
        return Answer.DATA, data

    def _void_places(self, request_id: RequestId | None) -> None:
        """What takers were told of a request, or of layers, may hold something else from now on."""
        if self._counts is not None:
            self._counts.add(request_id)

    def _shared(
        self, request_id: RequestId | None
    ) -> tuple[Places, tuple[SharedFile | SharedGranules, SharedFile, tuple[int, int]]] | None:
        """What tells places, and the memory with the count of what lies there; None where takers
        cannot read it.
        """
        places = self._memory.places
        if places is None or self._counts is None:
            return None
        fd = places.shared_fd
        memory = self._granules if fd is None else SharedFile.of(fd)
        if memory is None:
            return None
        return places, (memory, self._counts.file, self._counts.of(request_id))

    def _serve_kv(self, chunk: KvChunk) -> tuple[Answer, Bytes | Located | None]:
        self.saw_transition(chunk.transition_id)
        request_id = RequestId(chunk.request_id)
        entries = self._exports.get(request_id)
        if entries is None:
            gone_in = self._withdrawn.get(request_id)
            is_gone = gone_in is not None and chunk.transition_id <= gone_in
            return (Answer.REFUSED if is_gone else Answer.NOT_YET), None
        layers = LayerRange(*chunk.layers)
        first, end = chunk.blocks
        num_units = (end - first) * layers.num_layers
        if not (
            0 <= first < end <= len(entries)
            and chunk.first_unit >= 0
            and 0 < chunk.num_units <= num_units - chunk.first_unit
        ):
            return Answer.REFUSED, None
        runs = list(unit_runs(entries[first:end], layers, chunk.first_unit, chunk.num_units))
        if chunk.may_read and (shared := self._shared(request_id)) is not None:
            places, at = shared
            return Answer.LOCATED, Located(*at, tuple(places.locate_units(runs)))
        data = np.empty(chunk.num_units * self._memory.unit_bytes, dtype=np.uint8)
        self._memory.read_units(runs, data)
        return Answer.DATA, data
