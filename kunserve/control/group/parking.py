"""Who of a group's sequences is parked and who comes back: `policy/parking` on what is there.

Where nobody is parked, ``NoParking`` says who of the swapped comes back.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from kunserve.control.group.ledger import BlockCounts
from kunserve.control.group.prefix_cache import PrefixCache
from kunserve.control.group.queue import WaitingQueue
from kunserve.control.group.sequence import Progress, QueueKey, Sequence
from kunserve.control.group.swap import SwapSpace
from kunserve.core.kv_blocks import KvBlocks
from kunserve.policy.batch.parking import (
    Away,
    Decoding,
    choose_in_place,
    choose_parked,
    num_due,
    room_for,
)
from kunserve.policy.batch.relief import HostLink

STEPS_AHEAD = 2
"""Steps until what a parked sequence frees is there: one copies it out, the next may use it."""
BEFORE_ALL: QueueKey = (-math.inf, 0.0, 0)
"""A place in the queue that nobody is before."""


class Return(NamedTuple):
    """Who of those in host memory comes back, and who makes way for them."""

    num_kept: int
    """Places among the running that are kept for them."""
    first_away: QueueKey | None
    """The place of the first that must stay away: nobody behind it may be admitted."""
    victims: list[Sequence]
    """To be parked in the place of those who are due."""


class NoParking:
    """Sequences leave only because another lacked a block, and nobody makes way."""

    def __init__(self, waiting: WaitingQueue, swap: SwapSpace) -> None:
        self._waiting = waiting
        self._swap = swap

    def for_head(
        self, _running: Iterable[Sequence], _missing_blocks: int, _now_s: float
    ) -> list[Sequence]:
        """Nobody."""
        return []

    def for_grower(
        self, _running: Iterable[Sequence], _grower: Sequence, _num_blocks: int, _now_s: float
    ) -> list[Sequence]:
        """Nobody."""
        return []

    def bring_back(self, _running: Iterable[Sequence], room: int, _now_s: float) -> Return:
        """Who arrived first comes first, the queue's head included."""
        head = self._waiting.head
        num_kept = self._swap.swap_in(None if head is None else head.key, room)
        return Return(num_kept, self._swap.first_away, [])


class Parking:
    """Looks at the sequences that run, at `SwapSpace` and at memory. It remembers nothing."""

    def __init__(
        self,
        max_park_s: float,
        step_s: float,
        link: HostLink,
        blocks: KvBlocks,
        ledger: BlockCounts,
        waiting: WaitingQueue,
        swap: SwapSpace,
        cache: PrefixCache,
    ) -> None:
        """``step_s`` is the time of a full step."""
        self._cache = cache
        self.max_park_s = max_park_s
        self._step_s = step_s
        self._link = link
        self._blocks = blocks
        self._ledger = ledger
        self._waiting = waiting
        self._swap = swap

    def for_head(
        self, running: Iterable[Sequence], missing_blocks: int, now_s: float
    ) -> list[Sequence]:
        """Whom to park so that the queue's head, which lacks so much, is admitted soon."""
        head = self._waiting.head
        assert head is not None, missing_blocks
        missing = missing_blocks - self._swap.leaving_blocks
        return self._choose(running, missing, head.request.priority, now_s)

    def for_grower(
        self, running: Iterable[Sequence], grower: Sequence, num_blocks: int, now_s: float
    ) -> list[Sequence]:
        """Whom to park so that the grower has ``num_blocks``."""
        ledger = self._ledger
        missing = num_blocks - ledger.blocks_of(grower.request_id) - ledger.free_blocks
        others = [seq for seq in running if seq is not grower]
        missing -= self._swap.leaving_blocks
        return self._choose(others, missing, grower.request.priority, now_s)

    def bring_back(self, running: Iterable[Sequence], room: int, now_s: float) -> Return:
        """Let up to ``room`` come back: who is due goes first."""
        runs = any(seq.state is Progress.RUNNING for seq in running)
        is_idle = not runs and self._swap.leaving_blocks == 0
        due = self._bring_back(room, now_s, is_idle=is_idle)
        num_kept = len(self._swap.returning)
        if not due or self._swap.is_copying:
            return Return(num_kept, BEFORE_ALL if due else None, [])
        return Return(num_kept, BEFORE_ALL, self._in_place(running, due, room, now_s))

    def _bring_back(self, room: int, now_s: float, *, is_idle: bool) -> list[Sequence]:
        """Those that are due, and lack memory or a place.

        Others take only what nobody waits for, unless the group is idle.
        """
        swap, rate = self._swap, self._link.blocks_per_s
        away = swap.away
        views = [
            Away(now_s - since_s if seq.num_output else self.max_park_s, num_blocks / rate)
            for seq, since_s, num_blocks in away
        ]
        due = num_due(views, self._step_s, self.max_park_s)
        room -= len(swap.returning)
        kept_blocks = 0
        for index, (seq, _, _) in enumerate(away):
            if index == due and not is_idle:
                kept_blocks = self._waiting.num_blocks
            is_kept = swap.is_copying or room <= 0
            if is_kept or swap.missing_blocks(seq) + kept_blocks > 0:
                return [seq for seq, _, _ in away[index:due]]
            swap.bring_back(seq)
            room -= 1
        return []

    def _in_place(
        self, running: Iterable[Sequence], due: list[Sequence], room: int, now_s: float
    ) -> list[Sequence]:
        """Whom to park in the place of those who are due: of as many of them as can be.

        ``room``: places among the running.
        """
        decodes, views = self._views(running, now_s)
        swap, free = self._swap, self._ledger.free_blocks
        missing = -swap.leaving_blocks
        chosen: list[int] = []
        for number, seq in enumerate(due):
            missing += swap.missing_blocks(seq) + (free if number else 0)
            if missing <= 0 and room > len(swap.returning):
                continue
            found = choose_in_place(views, max(missing, 1), self.max_park_s)
            if not found:
                break
            chosen = found
        return [decodes[i] for i in chosen]

    def _choose(
        self, running: Iterable[Sequence], missing_blocks: int, priority: int, now_s: float
    ) -> list[Sequence]:
        if missing_blocks <= 0:
            return []
        decodes, views = self._views(running, now_s)
        missing_blocks += -(-STEPS_AHEAD * len(decodes) // self._blocks.block_size)
        room = room_for(
            self._ledger.capacity_blocks,
            self._swap.host_blocks,
            self._link.capacity_blocks,
            self._link.blocks_per_s,
            self.max_park_s,
        )
        chosen = choose_parked(views, missing_blocks, room, self.max_park_s, priority)
        return [decodes[i] for i in chosen]

    def _views(
        self, running: Iterable[Sequence], now_s: float
    ) -> tuple[list[Sequence], list[Decoding]]:
        decodes = [seq for seq in running if _streams(seq)]
        return decodes, [
            Decoding(
                self._freed_blocks(seq),
                seq.num_output,
                seq.num_parked,
                now_s - seq.streams_since_s,
                seq.request.priority,
            )
            for seq in decodes
            if seq.streams_since_s is not None
        ]

    def _freed_blocks(self, seq: Sequence) -> int:
        """What parking the sequence alone frees: not what others share with it."""
        return self._ledger.blocks_of(seq.request_id) - self._cache.shared_blocks(seq)


def _streams(seq: Sequence) -> bool:
    """Whether the sequence makes tokens, and has made one since it came here or back."""
    return seq.streams_since_s is not None and seq.state is Progress.RUNNING and seq.num_left <= 1
