"""KV of equal beginnings is computed once: a group's prefix cache.

Full blocks are found by names that tell all tokens before them (``core.prefix``). Blocks count
once, however many sequences share them. What no sequence shares any more stays, and counts as
free: the least recently used goes when a plan needs its memory, the end of a beginning first.
"""

from collections import OrderedDict
from collections.abc import Iterable
from sys import maxsize
from typing import NamedTuple

from kunserve.control.group.block_names import most_blocks, names_of
from kunserve.control.group.cache_journal import CacheJournal
from kunserve.control.group.ledger import Ledger
from kunserve.control.group.prefix_index import PrefixIndex
from kunserve.control.group.prompt_prefix import Prefix, PromptPrefix
from kunserve.control.group.residency import Residency
from kunserve.control.group.sequence import Sequence
from kunserve.core.ids import GroupId, PrefixId, RequestId
from kunserve.core.messages import PrefixPart, PrefixState
from kunserve.core.prefix import PrefixHash
from kunserve.core.step import EvictedPrefix, KeptPrefix, SharedPrefix

NEVER_FULL = maxsize
"""Tokens of a block where there shall be no cache: none is ever full, so none gets a name."""
WORTH_WAITING_TOKENS = 128
"""Of a prompt that others are about to compute: for so many it waits until it can share them."""


class CacheOrders(NamedTuple):
    """What a plan tells the stages of the cache."""

    kept: tuple[KeptPrefix, ...] = ()
    evicted: tuple[EvictedPrefix, ...] = ()
    shared: tuple[SharedPrefix, ...] = ()


NO_ORDERS = CacheOrders()

MAX_TABLE_ENTRIES = 1 << 22
"""Prefixes that no sequence shares, times the blocks of the longest: each has a row in the stages'
block tables, 13 bytes an entry."""
LEAST_PREFIXES = 512
"""However long they are."""


class PrefixCache:
    """Owner of the names of a group's blocks, and of the blocks that are the cache's.

    It decides; the stages follow the orders of each plan, in the plans' order. So what one plan
    computes the next may share, though it has not run yet.
    """

    def __init__(
        self,
        group_id: GroupId,
        block_size: int,
        ledger: Ledger,
        residency: Residency,
        journal: CacheJournal | None = None,
    ) -> None:
        """``block_size``: ``NEVER_FULL`` where nothing shall be shared."""
        self._group_id = group_id
        self._block_size = block_size
        self._ledger = ledger
        self._residency = residency
        self._index = PrefixIndex(block_size, journal)
        self._prefixes: dict[PrefixId, Prefix] = {}
        """Those that are the cache's."""
        self._unused: OrderedDict[PrefixId, Prefix] = OrderedDict()
        """Those with blocks that no sequence shares, least recently used first. Whoever shares a
        beginning uses all of it, so that what follows a prefix always stands before it."""
        self._num_made = 0
        self._longest_blocks = 1
        """A prefix has ended behind so many blocks."""
        self._kept: list[KeptPrefix] = []
        self._evicted: dict[PrefixId, int] = {}
        self._shared: list[SharedPrefix] = []
        self._arriving: dict[PrefixId, Prefix] | None = None
        """During an exchange: what came in it, and stays until it is over."""
        self._is_reset = False
        """What has come and no sequence shares goes with the exchange's end."""

    # Sequences

    def look_up(self, seq: Sequence) -> int:
        """Find a waiting sequence's beginning; how many blocks fewer than all of its own it needs.

        One token at least is left to be computed, because it gives the next; as are the tokens
        whose scores are to come.
        """
        beginning = seq.beginning
        parts = self._index.find(seq, most_blocks(seq, self._block_size))
        beginning.num_found = parts[-1][1] if parts else 0
        beginning.found_tokens = beginning.num_found * self._block_size
        num_unused = 0
        for prefix, end in parts:
            if prefix.owner is None:
                num_unused += max(0, end - prefix.used_end)
        return beginning.num_found - num_unused

    def name_ahead(self, seq: Sequence) -> PrefixHash | None:
        """A name that sequences have in common if their next ``WORTH_WAITING_TOKENS`` are equal.

        Next to what a running one has computed, and a waiting one has found. None where not so
        many are left to be shared.
        """
        first = (seq.num_computed + seq.beginning.found_tokens) // self._block_size
        index = first + max(1, WORTH_WAITING_TOKENS // self._block_size) - 1
        if index >= most_blocks(seq, self._block_size):
            return None
        return names_of(seq, index + 1, self._block_size)[index]

    def share(self, seq: Sequence) -> int:
        """Give a sequence, which is admitted now, the beginning that was found for it: its tokens.

        It may have become shorter, where others were admitted meanwhile.
        """
        beginning = seq.beginning
        assert not beginning.shared, seq.request_id
        for prefix, end in self._index.find(seq, beginning.num_found):
            if prefix.owner is not None:
                self._take_over(prefix)
            assert prefix.prefix_id is not None, prefix
            self._ledger.use_cached(prefix.use(end))
            if not prefix.num_unused:
                self._unused.pop(prefix.prefix_id, None)
            self._residency.reused(prefix, end - beginning.shared_end)
            beginning.shared.append((prefix, end))
            self._shared.append(SharedPrefix(seq.request_id, prefix.prefix_id, end))
        num_blocks = beginning.shared_end
        beginning.own = Prefix(num_blocks, beginning)
        beginning.num_found = beginning.found_tokens = 0
        beginning.names_at = (num_blocks + 1) * self._block_size
        if num_blocks:
            self._ledger.borrow(seq.request_id, num_blocks)
        return num_blocks * self._block_size

    def note_computed(self, sequences: Iterable[Sequence]) -> None:
        """The plan just made fills blocks of these: later plans may share them."""
        for seq in sequences:
            self._name_own(seq)
            seq.beginning.names_at = (seq.num_computed // self._block_size + 1) * self._block_size

    def leave(self, seq: Sequence, *, keeps: bool) -> None:
        """A sequence ends or loses its KV: its full blocks stay here if they may.

        Called before the ledger forgets it.
        """
        beginning = seq.beginning
        own = beginning.own
        is_moving = self._arriving is not None and beginning.names_at == maxsize
        if keeps and not is_moving:
            self._name_own(seq)
            self._keep(seq, own)
        else:
            self._forget_names(own, own.first)
        self._leave_shared(beginning, 0)
        beginning.own = Prefix(0, beginning)
        beginning.names_at = self._block_size

    def shared_blocks(self, seq: Sequence) -> int:
        """Blocks that the sequence has together with others: they stay when it leaves."""
        num_blocks = start = 0
        for prefix, end in seq.beginning.shared:
            num_blocks += max(0, min(end, prefix.used_end_without(end)) - start)
            start = end
        return num_blocks

    def depart(self, seq: Sequence) -> None:
        """The sequence's KV begins to leave for host memory: its own blocks are found no more."""
        self._forget_names(seq.beginning.own, seq.beginning.own.first)
        seq.beginning.names_at = maxsize

    def shrink(self, seq: Sequence, num_blocks: int) -> None:
        """Only the first ``num_blocks`` of the sequence are in KV memory from now on."""
        if seq.beginning.shared_end > num_blocks:
            self._leave_shared(seq.beginning, num_blocks)

    def arrive(self, seq: Sequence) -> None:
        """The sequence's KV is back from host memory, and all but what it still shares its own."""
        seq.beginning.own = Prefix(seq.beginning.shared_end, seq.beginning)
        seq.beginning.names_at = 0

    # Changes of groups

    def export(self) -> tuple[PrefixState, ...]:
        """What the sequences share, when the group ends."""
        return tuple(
            PrefixState(prefix_id, p.first, tuple(p.names[: p.used_end - p.first]))
            for prefix_id, p in self._prefixes.items()
            if p.used_end > p.first
        )

    def adopt(self, prefixes: Iterable[PrefixState]) -> None:
        """An exchange begins, in which these come: they stay, shared or not, until it is over."""
        self._arriving = {}
        for state in prefixes:
            prefix = Prefix(state.first_block, None, state.prefix_id, list(state.names))
            self._residency.used(prefix)
            self._ledger.hold_lent(prefix.use(prefix.end))
            self._prefixes[state.prefix_id] = self._arriving[state.prefix_id] = prefix

    def adopt_shares(self, seq: Sequence, shared: Iterable[PrefixPart]) -> None:
        """A sequence has come with KV: it shares this, and the rest is named when it leaves."""
        beginning = seq.beginning
        for prefix_id, end in shared:
            prefix, start = self._prefixes[prefix_id], beginning.shared_end
            prefix.use(end)
            beginning.shared.append((prefix, end))
            beginning.names += prefix.names[start - prefix.first : end - prefix.first]
        beginning.own = Prefix(beginning.shared_end, beginning)
        beginning.names_at = maxsize

    def arrived(self, prefix_id: PrefixId) -> None:
        """All stages have all of the prefix: it is found from now on."""
        prefix = self._prefixes[prefix_id]
        end = prefix.used_end_without(prefix.end) if self._is_reset else prefix.end
        self._index.show_moved(prefix, end)

    def lost(self, prefix_id: PrefixId) -> None:
        """A stage could not get the prefix. Nobody shares it any more."""
        assert self._arriving is not None, prefix_id
        prefix = self._arriving.pop(prefix_id)
        self._ledger.leave_cached(prefix.leave(prefix.end))
        assert not prefix.users, prefix
        self._ledger.evict(prefix.num_unused)
        self._evicted[prefix_id] = prefix.first
        del self._prefixes[prefix_id]

    def end_exchange(self) -> None:
        """Everything is where it belongs."""
        assert self._arriving is not None
        arriving, self._arriving = self._arriving, None
        for prefix_id, prefix in arriving.items():
            self._ledger.leave_cached(prefix.leave(prefix.end))
            if prefix.num_unused:
                self._unused[prefix_id] = prefix
                if self._is_reset:
                    self._evict_end(prefix, prefix.num_unused)
        self._is_reset = False

    # Memory

    def take_orders(self) -> CacheOrders:
        """What the next plan tells the stages; evicts what stands in the way of the group's use."""
        self._evict(self._ledger.excess_blocks)
        most = max(LEAST_PREFIXES, MAX_TABLE_ENTRIES // self._longest_blocks)
        while len(self._unused) > most:
            self._evict(next(iter(self._unused.values())).num_unused)
        if not (self._kept or self._evicted or self._shared):
            return NO_ORDERS
        evicted = tuple(EvictedPrefix(*item) for item in self._evicted.items())
        orders = CacheOrders(tuple(self._kept), evicted, tuple(self._shared))
        self._kept, self._evicted, self._shared = [], {}, []
        return orders

    def reset(self) -> None:
        """Forget all blocks that no sequence shares; the next plan frees them.

        Of what an exchange brings they are found no more, and are freed when it is over.
        """
        self._evict(self._ledger.cached_blocks)
        if self._arriving is not None:
            self._is_reset = True
            for prefix in self._arriving.values():
                self._index.hide(prefix, prefix.used_end_without(prefix.end))

    @property
    def has_orders(self) -> bool:
        """Whether the next plan frees blocks of the cache."""
        return bool(self._evicted or self._ledger.excess_blocks)

    def clear(self) -> None:
        """The group has ended: whoever takes over frees what is left."""
        self._index.clear()
        self._prefixes.clear()
        self._unused.clear()
        self._kept, self._evicted, self._shared = [], {}, []
        self._arriving, self._is_reset = None, False

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that names, shares and the ledger agree."""
        arriving = self._arriving or {}
        users = {(prefix_id, prefix.end): 1 for prefix_id, prefix in arriving.items()}
        owned: list[Prefix] = []
        for seq in holders:
            owned.append(seq.beginning.own)
            start = 0
            for prefix, end in seq.beginning.shared:
                assert prefix.prefix_id is not None and self._prefixes[prefix.prefix_id] is prefix
                assert prefix.first <= start < end <= prefix.end, (seq.request_id, prefix)
                key = (prefix.prefix_id, end)
                users[key] = users.get(key, 0) + 1
                names = prefix.names[start - prefix.first : end - prefix.first]
                assert names == seq.beginning.names[start:end], seq.request_id
                start = end
            assert self._ledger.borrowed_of(seq.request_id) == start, seq.request_id
            assert not seq.beginning.own.names or seq.beginning.own.first == start
        num_used = num_unused = 0
        for prefix_id, prefix in self._prefixes.items():
            assert prefix.prefix_id == prefix_id and prefix.names and prefix.owner is None, prefix
            for end, count in prefix.users.items():
                assert users.pop((prefix_id, end)) == count, prefix
            assert prefix.used_end == max(prefix.users, default=prefix.first), prefix
            assert (prefix_id in self._unused) == (prefix.num_unused > 0), prefix
            num_used += prefix.used_end - prefix.first
            num_unused += prefix.num_unused
        assert not users, users
        assert num_used == self._ledger.lent_blocks, (num_used, self._ledger.lent_blocks)
        assert num_unused == self._ledger.cached_blocks, (num_unused, self._ledger.cached_blocks)
        for name, prefix in self._index:
            assert name in prefix.names, prefix
            is_known = prefix.prefix_id in self._prefixes or prefix in owned
            assert is_known, f"blocks that nobody has: {prefix}"

    # Inside

    def _name_own(self, seq: Sequence) -> None:
        """Let the sequence's own full blocks be found, unless equal ones are found already."""
        own, num_full = seq.beginning.own, seq.num_computed // self._block_size
        first = own.end
        own.names += names_of(seq, num_full, self._block_size)[first:num_full]
        self._index.show(seq, own, first)
        self._residency.used(own)

    def _take_over(self, prefix: Prefix) -> None:
        """A running sequence's own blocks become the cache's; it shares them itself."""
        owner = prefix.owner
        assert owner is not None and owner.own is prefix, prefix
        self._make(prefix, owner.request_id)
        prefix.use(prefix.end)
        owner.shared.append((prefix, prefix.end))
        owner.own = Prefix(prefix.end, owner)
        self._ledger.lend(owner.request_id, prefix.end)

    def _keep(self, seq: Sequence, own: Prefix) -> None:
        """The blocks of a sequence that leaves become the cache's, unless it has equal ones."""
        index = self._index
        self._index.show(seq, own, own.first)
        while own.names and not index.finds(own.names[-1], own):
            own.names.pop()
        num_double = 0
        while num_double < len(own.names) and not index.finds(own.names[num_double], own):
            num_double += 1
        if num_double:
            own.first = own.used_end = own.first + num_double
            del own.names[:num_double]
        if own.names:
            assert own.owner is not None, own
            prefix_id = self._make(own, own.owner.request_id)
            self._unused[prefix_id] = own
            self._ledger.keep(len(own.names))

    def _make(self, prefix: Prefix, owner: RequestId) -> PrefixId:
        prefix_id = PrefixId(RequestId(f"prefix-{self._group_id}-{self._num_made}"))
        self._num_made += 1
        self._longest_blocks = max(self._longest_blocks, prefix.end)
        prefix.prefix_id, prefix.owner = prefix_id, None
        self._prefixes[prefix_id] = prefix
        self._kept.append(KeptPrefix(owner, prefix_id, prefix.first, prefix.end))
        return prefix_id

    def _leave_shared(self, beginning: PromptPrefix, num_blocks: int) -> None:
        """The sequence shares only its first ``num_blocks``; the last ones are least recent."""
        shared = beginning.shared
        while shared and shared[-1][1] > num_blocks:
            prefix, end = shared.pop()
            num_unused = prefix.leave(end)
            self._residency.used(prefix)
            start = shared[-1][1] if shared else 0
            if start < num_blocks:
                num_unused -= prefix.use(num_blocks)
                shared.append((prefix, num_blocks))
            self._ledger.leave_cached(num_unused)
            assert prefix.prefix_id is not None, prefix
            if prefix.num_unused:
                self._unused[prefix.prefix_id] = prefix
                self._unused.move_to_end(prefix.prefix_id)

    def _evict(self, num_blocks: int) -> None:
        """Free so many blocks that no sequence shares."""
        while num_blocks > 0:
            prefix = next(iter(self._unused.values()))
            num = min(num_blocks, prefix.num_unused)
            self._evict_end(prefix, num)
            num_blocks -= num

    def _evict_end(self, prefix: Prefix, num_blocks: int) -> None:
        """Free the last blocks of a prefix, which no sequence shares."""
        prefix_id, end = prefix.prefix_id, prefix.end - num_blocks
        assert prefix_id is not None, prefix
        self._forget_names(prefix, end)
        self._ledger.evict(num_blocks)
        self._residency.evicted(prefix, num_blocks)
        self._evicted[prefix_id] = end
        if not prefix.num_unused:
            del self._unused[prefix_id]
        if not prefix.names:
            del self._prefixes[prefix_id]

    def _forget_names(self, prefix: Prefix, end: int) -> None:
        """Blocks of the prefix at ``end`` and behind have no names any more."""
        self._index.hide(prefix, end)
        del prefix.names[end - prefix.first :]
