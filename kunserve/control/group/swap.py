"""Sequences whose KV is in host memory, or on its way there or back (pipelined swapping).

A sequence's KV has one edge: the blocks before it are in KV memory, those behind it in host
memory. Leaving moves the edge down and coming back moves it up, a run of blocks with every plan,
no more than the plan's step hides; a sequence may turn round half-way.

Sequences leave because another lacked a block (relief), or to make way (`parking.Parking`).
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from kunserve.control.group.ledger import Ledger
from kunserve.control.group.load import SchedulerTotals
from kunserve.control.group.prefix_cache import PrefixCache
from kunserve.control.group.queue import watermark_blocks
from kunserve.control.group.sequence import QueueKey, Sequence
from kunserve.core.cost import CostCoefficients
from kunserve.core.kv_blocks import KvBlocks
from kunserve.core.step import BlockRun
from kunserve.policy.batch.cost import batch_cost
from kunserve.policy.batch.relief import (
    NO_HOST,
    HostLink,
    Relief,
    VictimView,
    choose_relief,
    hidden_blocks,
)

IDLE_STEP_S = 0.05
"""A step in which nobody computes copies what this time holds: others may come meanwhile."""


@dataclass(slots=True, eq=False)
class _Swapped:
    """One sequence and the edge of its KV."""

    seq: Sequence
    since_s: float
    """When it left."""
    num_blocks: int
    """Of its KV."""
    num_resident: int
    """The edge: blocks [0, num_resident) are in KV memory once the plans in flight have run."""
    num_leaving: int = 0
    """Blocks behind the edge that the last plan copies out: in KV memory until the next."""
    is_returning: bool = False
    """Coming back: the group's memory is reserved for all its known tokens."""


class SwapSpace:
    """Owner of the swapped sequences, in order, and of the host memory they use.

    Whoever left comes back before anybody who arrived later is admitted.
    """

    def __init__(
        self,
        link: HostLink,
        cost: CostCoefficients | None,
        blocks: KvBlocks,
        ledger: Ledger,
        totals: SchedulerTotals,
        cache: PrefixCache,
        *,
        parks: bool = False,
    ) -> None:
        """``link`` may be ``NO_HOST``. Otherwise ``cost`` tells how long steps take.

        With ``parks`` a victim is swapped whenever host memory has room, however slow the link.
        """
        assert link is NO_HOST or cost is not None, "swapping is paced by the time of steps"
        self._link = link
        self._cost = cost
        self._blocks = blocks
        self._ledger = ledger
        self._totals = totals
        self._cache = cache
        self._parks = parks
        self._now_s = 0.0
        """Of the schedule under way."""
        self._entries: list[_Swapped] = []
        self.is_copying = False
        """What the last plan moves is not there yet: nobody turns round, and nothing more moves."""
        self._promised_blocks = 0
        """Of those on their way out, what growers wait for already."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry.seq for entry in self._entries)

    @property
    def returning(self) -> list[Sequence]:
        """Those that hold memory to come back to."""
        return [entry.seq for entry in self._entries if entry.is_returning]

    @property
    def first_away(self) -> QueueKey | None:
        """The place of the first that is not coming back yet: nobody behind it is admitted."""
        return next((e.seq.key for e in self._entries if not e.is_returning), None)

    @property
    def may_copy(self) -> bool:
        """Whether a plan could move anything, or let one that is back run."""
        return not self.is_copying and any(
            entry.is_returning or entry.num_resident for entry in self._entries
        )

    @property
    def host_blocks(self) -> int:
        """Host memory in use: all blocks of everybody here, for as long as they are."""
        return sum(entry.num_blocks for entry in self._entries)

    def swap_out(self, seq: Sequence) -> bool:
        """Preempt a running or returning sequence by swapping; False if it shall be recomputed.

        Blocks that hold no KV yet are free at once.
        """
        entry = self._find(seq)
        if entry is None:
            if not self._takes(seq):
                return False
            num_blocks = self._blocks_for(seq.num_computed)
            entry = _Swapped(seq, self._now_s, num_blocks, num_blocks)
            insort(self._entries, entry, key=_key_of)
            self._cache.depart(seq)
        entry.is_returning = False
        self._shrink(seq, entry.num_resident)
        return True

    def makes_room(self, grower: Sequence, num_blocks: int) -> bool:
        """Whether enough is on its way out for the grower to have ``num_blocks``: it shall wait.

        What it waits for is nobody else's until the next plan.
        """
        ledger = self._ledger
        missing = num_blocks - ledger.blocks_of(grower.request_id) - ledger.free_blocks
        if self.leaving_blocks < missing:
            return False
        self._promised_blocks += missing
        return True

    @property
    def leaving_blocks(self) -> int:
        """Blocks on their way out that no grower waits for."""
        leaving = sum(e.num_resident + e.num_leaving for e in self._entries if not e.is_returning)
        return leaving - self._promised_blocks

    def finish_copies(self, now_s: float, *, is_copying: bool = False) -> list[Sequence]:
        """The last plan is on its way: free what it copied out; those that may run again.

        None while its copies go on beside further steps.
        """
        self._now_s, self.is_copying = now_s, is_copying
        self._promised_blocks = 0
        if is_copying:
            return []
        back: list[Sequence] = []
        for entry in self._entries:
            if entry.num_leaving:
                entry.num_leaving = 0
                self._shrink(entry.seq, entry.num_resident)
            elif entry.is_returning and entry.num_resident == entry.num_blocks:
                back.append(entry.seq)
                self._totals.note_pause(now_s - entry.since_s)
        for seq in back:
            self.remove(seq)
            self._cache.arrive(seq)
        return back

    def swap_in(self, first_waiting: QueueKey | None, room: int) -> int:
        """Let up to ``room`` come back, first come first served, as memory allows.

        The number that have a place kept now.

        ``first_waiting`` is the place of the first without KV, who goes before those behind it.
        """
        num_returning = len(self.returning)
        for entry in self._entries:
            seq = entry.seq
            if entry.is_returning:
                continue
            if self.is_copying or num_returning >= room:
                break
            if first_waiting is not None and first_waiting < seq.key:
                break
            if self.missing_blocks(seq) > 0:
                break
            self.bring_back(seq)
            num_returning += 1
        return num_returning

    @property
    def away(self) -> list[tuple[Sequence, float, int]]:
        """(sequence, when it left, blocks of its KV) of those not coming back yet, oldest first.

        Who has no token yet comes before all others.
        """
        entries = [entry for entry in self._entries if not entry.is_returning]
        entries.sort(key=lambda entry: (entry.seq.num_output > 0, entry.since_s, entry.seq.key))
        return [(entry.seq, entry.since_s, entry.num_blocks) for entry in entries]

    def missing_blocks(self, seq: Sequence) -> int:
        """What a swapped sequence lacks to come back now; not above 0 if it may."""
        ledger = self._ledger
        held = ledger.blocks_of(seq.request_id)
        margin = watermark_blocks(ledger, held)
        return self._blocks_for(seq.num_tokens) - held + margin - ledger.free_blocks

    def bring_back(self, seq: Sequence) -> None:
        """Reserve memory for all known tokens of a swapped sequence. It lacks none."""
        entry = self._find(seq)
        assert entry is not None and not entry.is_returning, seq.request_id
        fits = self._ledger.grow(seq.request_id, self._blocks_for(seq.num_tokens))
        assert fits, (seq.request_id, self._ledger.free_blocks)
        entry.is_returning = True

    def plan_copies(
        self, chosen: list[tuple[Sequence, int]]
    ) -> tuple[tuple[BlockRun, ...], tuple[BlockRun, ...]]:
        """What the plan of these chunks copies out and back: as much as its step hides."""
        if self.is_copying or not self._entries:
            return (), ()
        budget = hidden_blocks(self._link, self._step_s(chosen))
        out, back = self._plan_out(budget), self._plan_back(budget)
        self._totals.swapped_out_blocks += sum(end - first for _, first, end in out)
        self._totals.swapped_back_blocks += sum(end - first for _, first, end in back)
        return out, back

    def remove(self, seq: Sequence) -> None:
        """The sequence is back, or gone (the caller releases what it holds)."""
        entry = self._find(seq)
        assert entry is not None, seq.request_id
        self._entries.remove(entry)

    def clear(self) -> list[Sequence]:
        """Give everybody up, and be empty: their KV is lost."""
        lost = [entry.seq for entry in self._entries]
        self._entries.clear()
        return lost

    def check(self) -> None:
        """Assert that edges, reservations and host memory agree."""
        keys = [entry.seq.key for entry in self._entries]
        assert keys == sorted(set(keys)), keys
        for entry in self._entries:
            seq = entry.seq
            assert entry.num_blocks == self._blocks_for(seq.num_computed) > 0, entry
            assert 0 <= entry.num_resident <= entry.num_blocks - entry.num_leaving, entry
            held = self._ledger.blocks_of(seq.request_id)
            if entry.is_returning:
                assert held >= entry.num_blocks and entry.num_leaving == 0, (entry, held)
            else:
                assert held == entry.num_resident + entry.num_leaving, (entry, held)
        assert self._link.has_room(self.host_blocks), self.host_blocks

    def has_room_for(self, seq: Sequence) -> bool:
        """Whether host memory has room for the sequence's KV."""
        num_blocks = self.host_blocks + self._blocks_for(seq.num_computed)
        return self._link.has_room(num_blocks)

    def _shrink(self, seq: Sequence, num_blocks: int) -> None:
        """Only the sequence's first blocks are in KV memory from now on, shared ones or not."""
        self._ledger.shrink(seq.request_id, num_blocks)
        self._cache.shrink(seq, num_blocks)

    def _takes(self, seq: Sequence) -> bool:
        if self._parks or not self.has_room_for(seq):
            return self.has_room_for(seq)
        assert self._cost is not None
        own = self._ledger.blocks_of(seq.request_id)
        victim = VictimView(
            num_blocks=self._blocks_for(seq.num_computed),
            other_blocks=self._ledger.used_blocks - own,
            recompute_s=batch_cost(self._cost, [0], [seq.num_computed]),
        )
        return choose_relief(victim, self._link, self.host_blocks) is Relief.SWAP

    def _step_s(self, chosen: list[tuple[Sequence, int]]) -> float:
        """Predicted time of a step over the whole model: of every stage's layers, its share."""
        if not chosen:
            return IDLE_STEP_S
        assert self._cost is not None
        return batch_cost(
            self._cost,
            [seq.num_computed for seq, _ in chosen],
            [count for _, count in chosen],
            [seq.num_computed + count == seq.num_tokens for seq, count in chosen],
        )

    def _plan_out(self, budget: int) -> tuple[BlockRun, ...]:
        runs: list[BlockRun] = []
        for entry in self._entries:
            num = 0 if entry.is_returning else min(budget, entry.num_resident)
            if num:
                end = entry.num_resident
                entry.num_resident = end - num
                entry.num_leaving = num
                budget -= num
                runs.append(BlockRun(entry.seq.request_id, end - num, end))
        return tuple(runs)

    def _plan_back(self, budget: int) -> tuple[BlockRun, ...]:
        runs: list[BlockRun] = []
        for entry in self._entries:
            missing = entry.num_blocks - entry.num_resident
            num = min(budget, missing) if entry.is_returning else 0
            if num:
                first = entry.num_resident
                entry.num_resident = first + num
                budget -= num
                runs.append(BlockRun(entry.seq.request_id, first, first + num))
        return tuple(runs)

    def _find(self, seq: Sequence) -> _Swapped | None:
        return next((entry for entry in self._entries if entry.seq is seq), None)

    def _blocks_for(self, num_tokens: int) -> int:
        return self._blocks.holding(num_tokens)


def _key_of(entry: _Swapped) -> QueueKey:
    return entry.seq.key
