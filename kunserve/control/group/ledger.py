"""How many KV blocks each request of a group may use. Counts only: instances place the blocks."""

from kunserve.core.ids import RequestId


class BlockCounts:
    """A group's block counts, for who only reads them.

    The capacity is the minimum over the group's stages of units over layers held. It may fall
    below what is used; then nothing grows until enough has been released.
    """

    def __init__(self, capacity_blocks: int, watermark: float = 0.0) -> None:
        """``watermark``: share of the capacity that admissions leave free, a block at least."""
        self.capacity_blocks = capacity_blocks
        self.version = 0
        """Counts what may give a plan something to do: releases, evictions, changes of the
        capacity."""
        self._watermark = watermark
        self._taken_blocks = 0
        self._used_blocks = 0
        self._blocks: dict[RequestId, int] = {}
        self._migrating: set[RequestId] = set()
        self._borrowed: dict[RequestId, int] = {}
        """Of each request's blocks, those that are the prefix cache's."""
        self.lent_blocks = 0
        """Of the cache's blocks, those that requests share: they count once."""
        self.cached_blocks = 0
        """Of the cache's blocks, those that nobody shares: they are free for whoever grows."""

    @property
    def watermark_blocks(self) -> int:
        """What admissions leave free."""
        return max(1, int(self._watermark * self.capacity_blocks))

    @property
    def used_blocks(self) -> int:
        """Blocks that requests may use now, shared ones once, and what an exchange brings."""
        return self._used_blocks

    @property
    def taken_blocks(self) -> int:
        """Blocks that requests have grown by so far, but for those of preempted ones."""
        return self._taken_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks left to grow into; 0 when the capacity has fallen below what is used."""
        return max(0, self.capacity_blocks - self._used_blocks)

    def blocks_of(self, request_id: RequestId) -> int:
        """The request's blocks; 0 if it is unknown."""
        return self._blocks.get(request_id, 0)

    @property
    def migrating_blocks(self) -> int:
        """Of requests that are on their way; part of what is used."""
        return sum(self._blocks[request_id] for request_id in self._migrating)

    @property
    def excess_blocks(self) -> int:
        """Blocks that the cache must give up, because requests may use their memory."""
        excess = self._used_blocks + self.cached_blocks - self.capacity_blocks
        return min(excess, self.cached_blocks) if excess > 0 else 0

    def borrowed_of(self, request_id: RequestId) -> int:
        """How many of the request's blocks are the cache's."""
        return self._borrowed.get(request_id, 0)

    def check(self) -> None:
        """Assert that the total is the sum of its parts and no part is empty."""
        own = sum(self._blocks.values()) - sum(self._borrowed.values())
        assert self._used_blocks == own + self.lent_blocks, (self._used_blocks, self._blocks)
        assert all(count > 0 for count in self._blocks.values()), self._blocks
        for request_id, count in self._borrowed.items():
            assert 0 < count <= self._blocks[request_id], (request_id, count)
        assert self.lent_blocks >= 0 and self.cached_blocks >= 0


class Ledger(BlockCounts):
    """Owner of a group's block counts: only its own methods change them.

    Each change is asked for by who owns what it tells of, at the moment when that comes true:

    * ``Holders`` for the requests that have KV, and its ``SwapSpace`` for those of them whose KV
      goes to host memory or comes back;
    * ``MigrationAccess`` for requests on their way to this group;
    * ``PrefixCache`` for the blocks that are the cache's;
    * ``Scheduler`` for the group's memory as a whole.

    A single caller would be told the same by each of these, and only pass it on.
    """

    def resize(self, capacity_blocks: int) -> None:
        """The group's memory is so many blocks from now on."""
        self.capacity_blocks = capacity_blocks
        self.version += 1

    def grow(self, request_id: RequestId, num_blocks: int) -> bool:
        """Let the request use ``num_blocks`` in total; False (nothing changed) on a shortage."""
        more = num_blocks - self._blocks.get(request_id, 0)
        if more > 0:
            if self._used_blocks + more > self.capacity_blocks:
                return False
            self._used_blocks += more
            self._taken_blocks += more
            self._blocks[request_id] = num_blocks
        return True

    def give_back(self, num_blocks: int) -> None:
        """Of what was taken, so much was for nothing: it will be computed again."""
        self._taken_blocks -= num_blocks

    def hold(self, request_id: RequestId, num_blocks: int, num_borrowed: int = 0) -> None:
        """Count KV that exists already (it was handed over), whatever the capacity.

        The first ``num_borrowed`` blocks are the cache's, and are lent already.
        """
        assert request_id not in self._blocks and num_blocks > 0, (request_id, num_blocks)
        self._blocks[request_id] = num_blocks
        self._borrow(request_id, num_borrowed)
        self._used_blocks += num_blocks - num_borrowed

    def hold_lent(self, num_blocks: int) -> None:
        """The cache has so many blocks that were handed over, and are lent."""
        self.lent_blocks += num_blocks
        self._used_blocks += num_blocks

    def shrink(self, request_id: RequestId, num_blocks: int) -> None:
        """The request uses only ``num_blocks`` from now on: no more than it did."""
        have = self._blocks.get(request_id, 0)
        assert 0 <= num_blocks <= have, (request_id, num_blocks, have)
        borrowed = self._borrowed.get(request_id, 0)
        if borrowed > num_blocks:
            self._used_blocks -= have - borrowed
            self._borrow(request_id, num_blocks)
        else:
            self._used_blocks -= have - num_blocks
        self.version += 1
        if num_blocks:
            self._blocks[request_id] = num_blocks
        else:
            self._blocks.pop(request_id, None)

    def reserve(self, request_id: RequestId, num_blocks: int) -> bool:
        """Like ``grow``, for a request on its way to this group."""
        fits = self.grow(request_id, num_blocks)
        if fits and num_blocks > 0:
            self._migrating.add(request_id)
            self.version += 1
        return fits

    def release(self, request_id: RequestId) -> int:
        """Free the request's own blocks and return how many; unknown ids have none."""
        freed = self._blocks.pop(request_id, 0) - self._borrowed.pop(request_id, 0)
        self._migrating.discard(request_id)
        self._used_blocks -= freed
        self.version += 1
        return freed

    def clear(self) -> None:
        """Nobody uses anything any more."""
        self._used_blocks = 0
        self.version += 1
        self._blocks.clear()
        self._migrating.clear()
        self._borrowed.clear()
        self.lent_blocks = self.cached_blocks = 0

    # The prefix cache's blocks

    def borrow(self, request_id: RequestId, num_blocks: int) -> None:
        """A request without blocks begins with ``num_blocks`` of the cache, which are lent."""
        assert request_id not in self._blocks and num_blocks > 0, (request_id, num_blocks)
        self._blocks[request_id] = self._borrowed[request_id] = num_blocks

    def lend(self, request_id: RequestId, num_blocks: int) -> None:
        """The request's first ``num_blocks`` are the cache's from now on, and lent to it."""
        more = num_blocks - self._borrowed.get(request_id, 0)
        assert more > 0 and num_blocks <= self._blocks[request_id], (request_id, num_blocks)
        self._borrowed[request_id] = num_blocks
        self.lent_blocks += more

    def use_cached(self, num_blocks: int) -> None:
        """So many blocks of the cache are lent that were not."""
        self.cached_blocks -= num_blocks
        self.lent_blocks += num_blocks
        self._used_blocks += num_blocks

    def leave_cached(self, num_blocks: int) -> None:
        """So many blocks of the cache are lent to nobody any more."""
        self.use_cached(-num_blocks)
        self.version += 1

    def keep(self, num_blocks: int) -> None:
        """The cache keeps so many blocks of a request that is about to be released."""
        self.cached_blocks += num_blocks

    def evict(self, num_blocks: int) -> None:
        """The cache gives so many blocks up that it lends to nobody."""
        self.cached_blocks -= num_blocks
        self.version += 1

    def _borrow(self, request_id: RequestId, num_blocks: int) -> None:
        if num_blocks:
            self._borrowed[request_id] = num_blocks
        else:
            self._borrowed.pop(request_id, None)
