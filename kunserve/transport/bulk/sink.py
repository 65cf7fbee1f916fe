"""The taking side of bulk: what to ask for next, and where it goes. Sans-I/O, one lock above.

Pulls are served in the order they were asked for, with few chunks in flight over all of them.
A source that does not answer holds up its own pulls only.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.layout import LayerRange
from kunserve.core.transfer import KvPull, LayerPull
from kunserve.transport.bulk.movable_memory import Content, InFile, Mapped, MovableMemory
from kunserve.transport.bulk.pacing import BulkPacing
from kunserve.transport.bulk.wire import (
    Answer,
    Chunk,
    Int32Array,
    KvChunk,
    LayerChunk,
    unit_runs,
)

RETRY_S = 0.005
"""Pause before asking a source again that had not heard of a request."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The end of one pull. ``what`` is the very object that was asked for."""

    what: KvPull | LayerPull
    refusal: str | None
    """Why nothing came, or not all of it; None when all is in place."""

    @property
    def ok(self) -> bool:
        """Whether all is in place."""
        return self.refusal is None


class _Target(Protocol):
    """Where a pull's bytes go, as a sequence of items (KV units, or bytes of weights)."""

    num_items: int

    def chunk_at(self, first: int, limit: int, chunk_bytes: int, ticket: int) -> tuple[Chunk, int]:
        """The request for a chunk from ``first`` on (below ``limit``), and its items."""
        ...

    def write(self, first: int, num: int, data: Content) -> bool:
        """Put items in place; False when there are not as many bytes as there should be."""
        ...


class _KvTarget:
    def __init__(self, memory: MovableMemory, piece: KvPull, entries: Int32Array) -> None:
        num_blocks = piece.end_block - piece.first_block
        assert len(entries) == num_blocks > 0, (piece, len(entries))
        self._memory = memory
        self._piece = piece
        self._entries = np.array(entries, dtype=np.int32)
        self._unit_bytes = memory.unit_bytes
        self.num_items = num_blocks * piece.layers.num_layers

    def chunk_at(self, first: int, limit: int, chunk_bytes: int, ticket: int) -> tuple[Chunk, int]:
        piece = self._piece
        num = min(limit - first, max(1, chunk_bytes // self._unit_bytes))
        chunk = KvChunk(
            ticket=ticket,
            transition_id=piece.transition_id,
            request_id=piece.request_id,
            layers=(piece.layers.first, piece.layers.end),
            blocks=(piece.first_block, piece.end_block),
            first_unit=first,
            num_units=num,
        )
        return chunk, num

    def write(self, first: int, num: int, data: Content) -> bool:
        if data.nbytes != num * self._unit_bytes:
            return False
        runs = unit_runs(self._entries, self._piece.layers, first, num)
        self._memory.write_units(list(runs), data)
        return True


class _LayersTarget:
    def __init__(self, memory: MovableMemory, layers: LayerRange) -> None:
        assert layers.num_layers > 0, layers
        self._memory = memory
        self._first_layer = layers.first
        self._layer_bytes = memory.layer_bytes
        self.num_items = layers.num_layers * self._layer_bytes

    def chunk_at(self, first: int, limit: int, chunk_bytes: int, ticket: int) -> tuple[Chunk, int]:
        layer, offset = divmod(first, self._layer_bytes)
        num = min(chunk_bytes, limit - first, self._layer_bytes - offset)
        return LayerChunk(ticket, self._first_layer + layer, offset, num), num

    def write(self, first: int, num: int, data: Content) -> bool:
        if data.nbytes != num:
            return False
        layer, offset = divmod(first, self._layer_bytes)
        self._memory.write_layer(self._first_layer + layer, offset, data)
        return True


@dataclass(slots=True)
class _Pull:
    what: KvPull | LayerPull
    target: _Target
    next_item: int = 0
    num_placed: int = 0
    again: list[tuple[int, int]] = field(default_factory=list)
    """Item ranges to ask for once more."""
    not_before_s: float = 0.0
    unknown_since_s: float | None = None

    @property
    def wants_more(self) -> bool:
        """Whether something is left to ask for."""
        return bool(self.again) or self.next_item < self.target.num_items


@dataclass(slots=True)
class _InFlight:
    pull: _Pull
    first: int
    num: int
    sent_s: float


Ask: TypeAlias = tuple[InstanceId, Chunk]


class BulkSink:
    """Pulls waiting and under way."""

    def __init__(
        self,
        memory: MovableMemory,
        pacing: BulkPacing,
        has_mapped: Callable[[InstanceId], bool] = lambda _: False,
        has_read: Callable[[InstanceId], bool] = lambda _: False,
    ) -> None:
        """``has_mapped``: whether a source's bytes are copied here from where they are mapped.

        ``has_read``: whether they are read here in the source's file.
        """
        self._has_read = has_read
        self._memory = memory
        self._pacing = pacing
        self._has_mapped = has_mapped
        self._pulls: deque[_Pull] = deque()
        self._in_flight: dict[int, _InFlight] = {}
        self._next_ticket = 0
        self._done: list[Pulled] = []
        self.num_bytes = 0
        """Put in place so far."""

    @property
    def num_pulls(self) -> int:
        """Pulls not yet ended."""
        return len(self._pulls)

    @property
    def has_news(self) -> bool:
        """Whether ``drain`` has something."""
        return bool(self._done)

    def pull_kv(self, piece: KvPull, entries: Int32Array) -> None:
        """Ask for a run of blocks, after everything asked for before."""
        self._pulls.append(_Pull(piece, _KvTarget(self._memory, piece, entries)))

    def pull_layers(self, what: LayerPull) -> None:
        """Ask for weights, after everything asked for before."""
        self._pulls.append(_Pull(what, _LayersTarget(self._memory, what.layers)))

    def next_ask(self, now_s: float) -> Ask | None:
        """The next chunk to request, and of whom; it counts as in flight from now on."""
        stalled = self._stalled(now_s)
        num_counted = sum(e.pull.what.src not in stalled for e in self._in_flight.values())
        for pull in self._pulls:
            if not pull.wants_more or pull.not_before_s > now_s or pull.what.src in stalled:
                continue
            if num_counted >= self._most_in_flight(pull.what.src):
                continue
            first, limit = pull.again.pop() if pull.again else (pull.next_item, None)
            ticket = self._next_ticket
            self._next_ticket += 1
            end = pull.target.num_items if limit is None else limit
            chunk_bytes = self._pacing.chunk_bytes
            if self._has_mapped(pull.what.src):
                chunk_bytes = self._pacing.mapped_chunk_bytes
            elif self._has_read(pull.what.src):
                chunk_bytes = self._pacing.read_chunk_bytes
            chunk, num = pull.target.chunk_at(first, end, chunk_bytes, ticket)
            if limit is None:
                pull.next_item = first + num
            elif first + num < limit:
                pull.again.append((first + num, limit))
            self._in_flight[ticket] = _InFlight(pull, first, num, now_s)
            return pull.what.src, chunk
        return None

    def on_reply(self, ticket: int, answer: Answer, data: Content | None, now_s: float) -> None:
        """A source answered. Answers to chunks no longer wanted touch nothing."""
        entry = self._in_flight.pop(ticket, None)
        if entry is None:
            return
        pull = entry.pull
        match answer:
            case Answer.DATA:
                is_put = data is not None and pull.target.write(entry.first, entry.num, data)
                self._placed(entry, data if is_put else None)
            case Answer.REFUSED:
                self._end(pull, "the source has withdrawn it")
            case Answer.LOCATED:
                self._end(pull, "the source did not say where it lies")
            case Answer.NOT_YET:
                pull.again.append((entry.first, entry.first + entry.num))
                pull.not_before_s = now_s + RETRY_S
                if pull.unknown_since_s is None:
                    pull.unknown_since_s = now_s
                elif now_s - pull.unknown_since_s > self._pacing.unknown_grace_s:
                    self._end(pull, "the source never heard of it")

    def on_mapped(self, found: Sequence[tuple[int, Mapped]]) -> None:
        """Sources told where chunks lie, by their tickets: all are copied at once."""
        places = self._memory.places
        assert places is not None, found
        put: list[tuple[_InFlight, Mapped | None]] = []
        with places.at_once():
            for ticket, data in found:
                if (entry := self._in_flight.pop(ticket, None)) is not None:
                    is_put = entry.pull.target.write(entry.first, entry.num, data)
                    put.append((entry, data if is_put else None))
        for entry, placed in put:
            if any(entry.pull is pull for pull in self._pulls):  # else a chunk before has ended it
                self._placed(entry, placed)

    def _placed(self, entry: _InFlight, data: Content | None) -> None:
        """A chunk's bytes are where they belong; None: they were not as many as they should be."""
        pull = entry.pull
        if data is None:
            self._end(pull, "the source sent a chunk of another size")
        elif isinstance(data, Mapped | InFile) and not data.holds():
            # Void bytes do no harm: nobody reads there before the pull has ended.
            pull.again.append((entry.first, entry.first + entry.num))
        else:
            pull.unknown_since_s = None
            pull.num_placed += entry.num
            self.num_bytes += data.nbytes
            if pull.num_placed == pull.target.num_items:
                self._end(pull, None)

    def ask_again(self, ticket: int) -> None:
        """What the source answered was of no use: its chunk is to be asked for once more."""
        entry = self._in_flight.pop(ticket, None)
        if entry is not None:
            entry.pull.again.append((entry.first, entry.first + entry.num))

    def expire(self, now_s: float) -> None:
        """End every pull from a source that has gone silent."""
        limit_s = self._pacing.chunk_timeout_s
        late = self._in_flight.values()
        for src in {e.pull.what.src for e in late if now_s - e.sent_s > limit_s}:
            self._end_all(src, f"the source was silent for {limit_s:g} s")

    def lose(self, src: InstanceId) -> None:
        """End every pull from a peer that is gone."""
        self._end_all(src, "the source is gone")

    def cancel(self, request_id: RequestId | None) -> None:
        """Forget the pulls of a request, or of weights, without a word, ended ones included."""
        for pull in [one for one in self._pulls if _request_of(one.what) == request_id]:
            self._remove(pull)
        self._done = [done for done in self._done if _request_of(done.what) != request_id]

    def clear(self) -> None:
        """Forget every pull without a word, ended ones included."""
        self._pulls.clear()
        self._in_flight.clear()
        self._done.clear()

    def drain(self) -> list[Pulled]:
        """Pulls that ended since the last call, in order of their end."""
        done, self._done = self._done, []
        return done

    def wait_s(self, now_s: float) -> float | None:
        """How long nothing needs doing unless an answer comes; None is for ever."""
        waits: list[float] = []
        if self._in_flight:
            waits.append(self._pacing.chunk_timeout_s / 10)
        stalled = self._stalled(now_s)
        in_time = [e for e in self._in_flight.values() if e.pull.what.src not in stalled]
        wanting = [p for p in self._pulls if p.wants_more and p.what.src not in stalled]
        may_ask = [p for p in wanting if len(in_time) < self._most_in_flight(p.what.src)]
        waits.extend(p.not_before_s - now_s for p in may_ask)
        if len(may_ask) < len(wanting):
            # A source may stall, and then its slot is another's.
            waits.append(min(e.sent_s for e in in_time) + self._pacing.stall_s - now_s)
        return max(0.0, min(waits)) if waits else None

    def check(self) -> None:
        """Assert that every item of every pull is placed, in flight, or still to ask for."""
        sources = [e.pull.what.src for e in self._in_flight.values()]
        for src in set(sources):
            most = max(self._pacing.max_in_flight, self._pacing.max_read_in_flight)
            assert sources.count(src) <= most, (src, self._in_flight)
        for pull in self._pulls:
            flying = sum(e.num for e in self._in_flight.values() if e.pull is pull)
            waiting = sum(end - first for first, end in pull.again)
            waiting += pull.target.num_items - pull.next_item
            total = pull.num_placed + flying + waiting
            assert total == pull.target.num_items, (pull, flying, waiting)
        assert all(any(e.pull is p for p in self._pulls) for e in self._in_flight.values())

    def _most_in_flight(self, src: InstanceId) -> int:
        """Chunks in flight, over all sources, with which another one may be asked of this one."""
        is_told = self._has_read(src) or self._has_mapped(src)
        return self._pacing.max_read_in_flight if is_told else self._pacing.max_in_flight

    def _stalled(self, now_s: float) -> set[InstanceId]:
        """Sources that owe a chunk for too long."""
        limit_s = self._pacing.stall_s
        return {e.pull.what.src for e in self._in_flight.values() if now_s - e.sent_s >= limit_s}

    def _end_all(self, src: InstanceId, refusal: str) -> None:
        for pull in [p for p in self._pulls if p.what.src == src]:
            self._end(pull, refusal)

    def _end(self, pull: _Pull, refusal: str | None) -> None:
        self._remove(pull)
        self._done.append(Pulled(pull.what, refusal))

    def _remove(self, pull: _Pull) -> None:
        self._pulls = deque(p for p in self._pulls if p is not pull)
        self._in_flight = {t: e for t, e in self._in_flight.items() if e.pull is not pull}


def _request_of(what: KvPull | LayerPull) -> RequestId | None:
    """Whose KV it is; None of weights."""
    return None if isinstance(what, LayerPull) else what.request_id
