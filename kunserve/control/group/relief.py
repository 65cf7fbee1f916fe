"""Who holds KV memory in a group, and who gives it up when a block is missing (relief)."""

import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from kunserve.control.group.in_flight import InFlight
from kunserve.control.group.ledger import Ledger
from kunserve.control.group.load import SchedulerTotals
from kunserve.control.group.parking import NoParking, Parking
from kunserve.control.group.prefix_cache import PrefixCache
from kunserve.control.group.queue import WaitingQueue
from kunserve.control.group.sequence import Progress, QueueKey, Sequence
from kunserve.control.group.swap import SwapSpace
from kunserve.core.config import SchedulerConfig
from kunserve.core.ids import RequestId
from kunserve.core.kv_blocks import KvBlocks
from kunserve.core.plan import Measured
from kunserve.core.step import BlockRun
from kunserve.policy.batch.cost import batch_cost
from kunserve.policy.batch.relief import NO_HOST, HostLink, Preemptible, choose_victim
from kunserve.policy.batch.reserve import reserved_tokens

_key_of = attrgetter("key")


class Runnable(NamedTuple):
    """What the running sequences could do in the next step."""

    decodes: list[Sequence]
    prompts: list[Sequence]
    """With known tokens to compute. The last token of a prompt is no decode: it keeps its place
    before later prompts."""
    num_awaiting: int
    """Sequences whose next token is being computed."""
    num_context_awaiting: int
    """Their tokens of context, all together, as far as they are seen (``core.cost.Windows``)."""


_NOBODY = Runnable([], [], 0, 0)


class Holders:
    """Owner of the sequences that have KV: running and stalled ones, in the order of their places.

    When one of them lacks a block the last of them is preempted, keeping its place and its
    output. It is computed again later, or its KV is swapped (``SwapSpace``). Where there is
    ``Parking``, sequences that decode make way too.
    """

    def __init__(
        self,
        blocks: KvBlocks,
        ledger: Ledger,
        waiting: WaitingQueue,
        in_flight: InFlight,
        totals: SchedulerTotals,
        config: SchedulerConfig,
        measured: Measured,
        host_link: HostLink,
        cache: PrefixCache,
    ) -> None:
        """``host_link`` ``NO_HOST``: nobody is swapped or parked."""
        self._cache = cache
        self._config = config
        self._blocks = blocks
        self._ledger = ledger
        self._waiting = waiting
        self._in_flight = in_flight
        self._totals = totals
        self._may_swap_until_s = math.inf
        swap, cost = measured.swap, measured.cost
        if swap is not None and swap.is_second_line:
            self._may_swap_until_s = -math.inf
        max_park_s = None if swap is None else swap.max_park_s
        parks = max_park_s is not None
        self._swap = SwapSpace(host_link, cost, blocks, ledger, totals, cache, parks=parks)
        self._parking: Parking | NoParking = NoParking(waiting, self._swap)
        if host_link is not NO_HOST and max_park_s is not None:
            assert cost is not None, measured
            step_s = batch_cost(cost, [0], [config.max_num_batched_tokens])
            self._parking = Parking(
                max_park_s, step_s, host_link, blocks, ledger, waiting, self._swap, cache
            )
        self._windows = measured.windows
        self._running: list[Sequence] = []
        self.released: list[RequestId] = []
        """For the next plan: what the stages hold and may free."""
        self.preemptions: list[tuple[RequestId, int]] = []
        """(request, tokens of KV lost) of each, for the log."""
        self.version = 0
        """Counts who came, and who may run again."""
        self._now_s = 0.0
        """Of the schedule under way."""

    def __len__(self) -> int:
        return len(self._running) + len(self._swap)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._running, self._swap)

    @property
    def num_running(self) -> int:
        """Running and stalled ones."""
        return len(self._running)

    @property
    def parks(self) -> bool:
        """Whether sequences that decode make way for those that wait."""
        return isinstance(self._parking, Parking)

    @property
    def have_work(self) -> bool:
        """Whether any runs, is swapped or must be released (stalled ones have none)."""
        running = Progress.RUNNING
        for seq in self._running:
            if seq.state is running:
                return True
        return bool(self._swap or self.released)

    @property
    def may_copy(self) -> bool:
        """Whether a plan could move swapped KV."""
        return self._swap.may_copy

    # They come and go

    def admit(self, seq: Sequence, now_s: float) -> None:
        """A waiting sequence, which fits, has the memory that it begins with from now on.

        With what the cache has of it.
        """
        self._waiting.remove(seq)
        if seq.admit(self._cache.share(seq), now_s):
            self._totals.note_first_admission(seq)
        fits = self._ledger.grow(seq.request_id, self._blocks_to_run(seq))
        assert fits, (seq.request_id, self._ledger.free_blocks)
        self._add(seq)

    def adopt(self, seq: Sequence, num_shared: int) -> None:
        """The sequence has come with KV, whose first blocks are the cache's."""
        self._ledger.hold(seq.request_id, self._blocks.holding(seq.num_computed), num_shared)
        self._add(seq)

    def _add(self, seq: Sequence) -> None:
        insort(self._running, seq, key=_key_of)
        self.version += 1

    def resume(self, seq: Sequence) -> None:
        """A stalled one may run."""
        seq.move_to(Progress.RUNNING)
        self.version += 1

    def remove(self, seq: Sequence, *, keeps: bool = True) -> None:
        """Forget the sequence: its memory is free, and a token still in flight is ignored.

        ``keeps``: its KV may go to the prefix cache.
        """
        self._take_out(seq)
        self._free(seq, keeps=keeps and seq.state is Progress.RUNNING)

    def end(self, seq: Sequence, *, keeps: bool) -> None:
        """The sequence has its last token. Call ``drop_ended`` after the last of a step.

        ``keeps``: its KV may go to the prefix cache, because nothing was wrong with it.
        """
        if seq.state is Progress.SWAPPED:
            self._swap.remove(seq)
        self._free(seq, keeps=keeps and seq.state is Progress.RUNNING)
        seq.move_to(Progress.ENDED)

    def drop_ended(self) -> None:
        """Forget those that ended."""
        ended = Progress.ENDED
        self._running = [seq for seq in self._running if seq.state is not ended]

    def lose_swapped(self) -> None:
        """Give all swapped KV up: its requests wait to be computed again."""
        for seq in self._swap.clear():
            self._cache.leave(seq, keeps=False)
            self._ledger.release(seq.request_id)
            self._lose_kv(seq, self._blocks.holding(seq.num_tokens))

    def clear(self) -> None:
        """Nobody has KV any more."""
        self._running.clear()
        self.released.clear()

    def take_released(self) -> list[RequestId]:
        """What the next plan releases."""
        released, self.released = self.released, []
        return released

    # In a step

    def end_copies(self, now_s: float, *, is_copying: bool = False) -> None:
        """The last plan is on its way: whoever is back from host memory runs."""
        self._now_s = now_s
        for seq in self._swap.finish_copies(now_s, is_copying=is_copying):
            seq.come_back()
            insort(self._running, seq, key=_key_of)

    def runnable(self) -> Runnable:
        """Who could run."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        num_awaiting = context = 0
        runs, seen_keys = Progress.RUNNING, self._windows.seen_keys
        sees_all = not self._windows.share
        for seq in self._running:
            if seq.is_awaiting:
                num_awaiting += 1
                context += seq.num_computed if sees_all else seen_keys(seq.num_computed)
            elif seq.state is runs:
                computed = seq.num_computed
                if seq.is_late or (computed >= seq.num_prompt and seq.num_tokens - computed == 1):
                    decodes.append(seq)
                else:
                    prompts.append(seq)
        return Runnable(decodes, prompts, num_awaiting, context)

    def secure(
        self, decodes: Iterable[Sequence], prompts: list[Sequence], *, may_preempt: bool
    ) -> set[Sequence] | None:
        """Get these the blocks that they run with; who could not, or None if memory sufficed.

        Only a decode at a block's edge, and a prompt that is adopted half-way or has memory for one
        chunk only, ever lacks one.
        """
        block_size, ledger = self._blocks.block_size, self._ledger
        edge = [s for s in decodes if s.num_computed % block_size == 0]
        if not (edge or prompts):
            return None
        unfit: set[Sequence] | None = None
        for seq in sorted([*edge, *prompts], key=_key_of):
            needed = self._blocks_to_run(seq)
            if seq.state is not Progress.RUNNING or ledger.grow(seq.request_id, needed):
                continue
            unfit = set() if unfit is None else unfit
            if not (may_preempt and self._relieve(seq, needed)):
                unfit.add(seq)
        return unfit

    def who_goes_on(self, pool_tokens: int, may_go: Callable[[Sequence], bool]) -> Runnable:
        """As ``runnable`` once the oldest step is complete, if nobody ends in it, and with the
        memory for one more step.

        Not those whose next token is their last, whatever it is. Nobody where memory is to be freed
        or one of all may not go.
        """
        if self._swap or self.released:
            return _NOBODY
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        blocks = []
        num_awaiting = context = 0
        oldest = self._in_flight.oldest
        for seq in self._running:
            if seq.state is not Progress.RUNNING or not may_go(seq):
                return _NOBODY
            if seq.is_awaiting and seq.last_step != oldest:
                num_awaiting += 1
                context += self._windows.seen_keys(seq.num_computed)
            elif seq.is_awaiting:
                if seq.num_tokens + 1 >= seq.max_total_tokens or seq.num_tokens >= pool_tokens:
                    continue
                decodes.append(seq)
                if seq.num_tokens % self._blocks.block_size == 0:
                    blocks.append((seq.request_id, self._blocks.holding(seq.num_tokens + 1)))
            else:
                is_decode = seq.num_computed >= seq.num_prompt and seq.num_left == 1
                (decodes if is_decode else prompts).append(seq)
                blocks.append((seq.request_id, self._blocks_to_run(seq)))
        if sum(max(0, n - self._ledger.blocks_of(i)) for i, n in blocks) > self._ledger.free_blocks:
            return _NOBODY
        for request_id, num_blocks in blocks:
            self._ledger.grow(request_id, num_blocks)
        return Runnable(decodes, prompts, num_awaiting, context)

    def swap_in(self, room: int, *, may_preempt: bool) -> tuple[int, QueueKey | None]:
        """Let swapped ones come back before whoever waits behind them; the parked when it is time.

        How many of the ``room`` among the running are kept for them, and the place of the first
        that must stay away: nobody behind it may be admitted.
        """
        if not self._swap:
            return 0, None
        back = self._parking.bring_back(self._running, room, self._now_s)
        if may_preempt:
            self._park(back.victims)
        return back.num_kept, back.first_away

    def allow_parking(self, now_s: float) -> None:
        """As a second line: sequences may go to host memory for as long as a pause may be."""
        if isinstance(self._parking, Parking):
            until_s = now_s + self._parking.max_park_s
            self._may_swap_until_s = max(self._may_swap_until_s, until_s)
            self.version += 1

    def park_for_head(self, missing_blocks: int) -> bool:
        """The queue's head lacks so much: let decodes make way; whether any do."""
        if not self._may_swap:
            return False
        victims = self._parking.for_head(self._running, missing_blocks, self._now_s)
        self._park(victims)
        return bool(victims)

    def plan_copies(
        self, chosen: list[tuple[Sequence, int]]
    ) -> tuple[tuple[BlockRun, ...], tuple[BlockRun, ...]]:
        """What the plan of these chunks swaps out, and back in."""
        return self._swap.plan_copies(chosen)

    def check(self) -> None:
        """Assert order, states, and that everybody has the memory that its KV takes."""
        self._swap.check()
        keys = [seq.key for seq in self._running]
        assert keys == sorted(set(keys)), keys
        self._in_flight.check(self)
        reserved = self._ledger.migrating_blocks + self._ledger.lent_blocks
        for seq in self:
            blocks = self._ledger.blocks_of(seq.request_id)
            reserved += blocks - self._ledger.borrowed_of(seq.request_id)
            is_swapped = seq.state is Progress.SWAPPED
            assert is_swapped or seq.state in (Progress.RUNNING, Progress.STALLED), seq
            assert is_swapped or blocks >= self._blocks.holding(seq.num_computed), (
                seq,
                blocks,
            )
            assert 0 <= seq.num_computed <= seq.num_tokens, seq
            assert (seq.num_left > 0) + seq.is_awaiting + seq.is_late == 1, seq
        assert reserved == self._ledger.used_blocks, (reserved, self._ledger.used_blocks)

    def _blocks_to_run(self, seq: Sequence) -> int:
        return self._blocks.holding(reserved_tokens(seq.num_tokens, seq.num_computed, self._config))

    # Relief

    @property
    def _may_swap(self) -> bool:
        """Whether sequences may go to host memory now: others may be due while some are there."""
        return self._now_s < self._may_swap_until_s or bool(self._swap)

    def _relieve(self, grower: Sequence, num_blocks: int) -> bool:
        """Preempt until the grower fits; False if it must wait."""
        while True:
            if self._swap.makes_room(grower, num_blocks):
                return False
            if self._make_way(grower, num_blocks):
                return False
            running = [seq for seq in self._running if seq.state is Progress.RUNNING]
            if not self.parks:
                running += self._swap.returning
            victim = choose_victim([Preemptible(*s.key) for s in running], running.index(grower))
            if victim is None:
                return False
            self._preempt(running[victim])
            if self._ledger.grow(grower.request_id, num_blocks):
                return True

    def _make_way(self, grower: Sequence, num_blocks: int) -> bool:
        """Park decodes for the grower, who waits for what they hold; False if none may go."""
        if not self._may_swap:
            return False
        victims = self._parking.for_grower(self._running, grower, num_blocks, self._now_s)
        self._park(victims)
        return bool(victims) and self._swap.makes_room(grower, num_blocks)

    def _park(self, victims: Iterable[Sequence]) -> None:
        for seq in victims:
            if self._swap.has_room_for(seq):
                self._preempt(seq)

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's memory: all at once, or as fast as it can be swapped."""
        if not (self._may_swap and self._swap.swap_out(seq)):
            num_taken = self._ledger.blocks_of(seq.request_id)
            self.remove(seq)
            self._lose_kv(seq, num_taken)
        elif seq.state is Progress.RUNNING:
            self._note_preemption(seq, 0)
            self._running.remove(seq)
            seq.park()

    def _lose_kv(self, seq: Sequence, num_taken: int) -> None:
        """The sequence, in no list any more, took so many blocks and must be computed again."""
        self._note_preemption(seq, seq.num_computed)
        self._ledger.give_back(num_taken)
        seq.lose_kv()
        self._waiting.add(seq)

    def _note_preemption(self, seq: Sequence, lost_tokens: int) -> None:
        self.preemptions.append((seq.request_id, lost_tokens))
        self._totals.note_preemption(lost_tokens)

    def _take_out(self, seq: Sequence) -> None:
        if seq.state is Progress.SWAPPED:
            self._swap.remove(seq)
        else:
            self._running.remove(seq)

    def _free(self, seq: Sequence, *, keeps: bool) -> None:
        self._cache.leave(seq, keeps=keeps)
        self._ledger.release(seq.request_id)
        self.released.append(seq.request_id)
        self._in_flight.ignore(seq)
