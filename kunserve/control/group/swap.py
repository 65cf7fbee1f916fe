"""Sequences whose KV is in host memory, or on its way there or back (pipelined swapping).

A sequence's KV has one edge: the blocks before it are in KV memory, those behind it in host
memory. Leaving moves the edge down and coming back moves it up, a run of blocks with every plan,
no more than the plan's step hides; a sequence may turn round half-way.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from kunserve.control.group.ledger import Ledger
from kunserve.control.group.queue import watermark_blocks
from kunserve.control.group.sequence import QueueKey, Sequence
from kunserve.core.cost import CostCoefficients
from kunserve.core.step import BlockRun
from kunserve.policy.cost import batch_cost
from kunserve.policy.relief import HostLink, Relief, VictimView, choose_relief, hidden_blocks

IDLE_STEP_S = 0.05
"""A step in which nobody computes copies what this time holds: others may come meanwhile."""


@dataclass(slots=True, eq=False)
class _Swapped:
    """One sequence and the edge of its KV."""

    seq: Sequence
    num_blocks: int
    """Of its KV."""
    num_resident: int
    """The edge: blocks [0, num_resident) are in KV memory once the plans in flight have run."""
    num_leaving: int = 0
    """Blocks behind the edge that the last plan copies out: in KV memory until the next."""
    is_returning: bool = False
    """Coming back: the group's memory is reserved for all its known tokens."""


class SwapSpace:
    """Owner of the swapped sequences, in order of arrival, and of the host memory they use.

    Whoever left comes back before anybody who arrived later is admitted.
    """

    def __init__(
        self,
        link: HostLink | None,
        cost: CostCoefficients | None,
        block_size: int,
        ledger: Ledger,
    ) -> None:
        """``link`` None: nobody is ever swapped. Otherwise ``cost`` tells how long steps take."""
        assert link is None or cost is not None, "swapping is paced by the time of steps"
        self._link = link
        self._cost = cost
        self._block_size = block_size
        self._ledger = ledger
        self._entries: list[_Swapped] = []
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
        """Whether a plan could move anything."""
        return any(
            entry.num_resident < entry.num_blocks if entry.is_returning else entry.num_resident
            for entry in self._entries
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
            entry = _Swapped(seq, num_blocks, num_blocks)
            insort(self._entries, entry, key=_key_of)
        entry.is_returning = False
        self._ledger.shrink(seq.request_id, entry.num_resident)
        return True

    def makes_room(self, grower: Sequence, num_blocks: int) -> bool:
        """Whether enough is on its way out for the grower to have ``num_blocks``: it shall wait.

        What it waits for is nobody else's until the next plan.
        """
        ledger = self._ledger
        missing = num_blocks - ledger.blocks_of(grower.request_id) - ledger.free_blocks
        leaving = sum(e.num_resident + e.num_leaving for e in self._entries if not e.is_returning)
        if leaving - self._promised_blocks < missing:
            return False
        self._promised_blocks += missing
        return True

    def finish_copies(self) -> list[Sequence]:
        """The last plan is on its way: free what it copied out; those that may run again."""
        self._promised_blocks = 0
        back: list[Sequence] = []
        for entry in self._entries:
            if entry.num_leaving:
                entry.num_leaving = 0
                self._ledger.shrink(entry.seq.request_id, entry.num_resident)
            elif entry.is_returning and entry.num_resident == entry.num_blocks:
                back.append(entry.seq)
        for seq in back:
            self.remove(seq)
        return back

    def swap_in(self, first_waiting: QueueKey | None, room: int) -> int:
        """Let up to ``room`` come back, first come first served, as memory allows.

        The number that have a place kept now.

        ``first_waiting`` is the place of the first without KV, who goes before those behind it.
        """
        ledger = self._ledger
        num_returning = len(self.returning)
        for entry in self._entries:
            seq = entry.seq
            if entry.is_returning:
                continue
            if num_returning >= room:
                break
            if first_waiting is not None and first_waiting < seq.key:
                break
            held = ledger.blocks_of(seq.request_id)
            needed = self._blocks_for(seq.num_tokens)
            if ledger.free_blocks - (needed - held) < watermark_blocks(ledger, held):
                break
            fits = ledger.grow(seq.request_id, needed)
            assert fits, (seq.request_id, needed, ledger.free_blocks)
            entry.is_returning = True
            num_returning += 1
        return num_returning

    def plan_copies(
        self, chosen: list[tuple[Sequence, int]]
    ) -> tuple[tuple[BlockRun, ...], tuple[BlockRun, ...]]:
        """What the plan of these chunks copies out and back: as much as its step hides."""
        if not self._entries:
            return (), ()
        assert self._link is not None
        budget = hidden_blocks(self._link, self._step_s(chosen))
        return self._plan_out(budget), self._plan_back(budget)

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
        if self._link is not None and self._link.capacity_blocks is not None:
            assert self.host_blocks <= self._link.capacity_blocks, self.host_blocks

    def _takes(self, seq: Sequence) -> bool:
        link, cost = self._link, self._cost
        if link is None or cost is None:
            return False
        own = self._ledger.blocks_of(seq.request_id)
        victim = VictimView(
            num_blocks=self._blocks_for(seq.num_computed),
            other_blocks=self._ledger.used_blocks - own,
            recompute_s=batch_cost(cost, [0], [seq.num_computed]),
        )
        return choose_relief(victim, link, self.host_blocks) is Relief.SWAP

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
        return -(-num_tokens // self._block_size)


def _key_of(entry: _Swapped) -> QueueKey:
    return entry.seq.key
