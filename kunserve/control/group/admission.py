"""Who of a group's waiting sequences gets memory now."""

from collections.abc import Iterable

from kunserve.control.group.ledger import BlockCounts
from kunserve.control.group.prefix_cache import PrefixCache
from kunserve.control.group.queue import WaitingQueue, watermark_blocks
from kunserve.control.group.relief import Holders
from kunserve.control.group.sequence import QueueKey, Sequence
from kunserve.core.config import SchedulerConfig
from kunserve.core.kv_blocks import KvBlocks
from kunserve.policy.batch.reserve import reserved_tokens


class Admission:
    """Looks at a group's queue and its ledger, and finds who may become a holder of KV."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_stages: int,
        blocks: KvBlocks,
        waiting: WaitingQueue,
        ledger: BlockCounts,
        holders: Holders,
        cache: PrefixCache,
    ) -> None:
        self._cache = cache
        self._config = config
        self._num_stages = num_stages
        self._blocks = blocks
        self._waiting = waiting
        self._ledger = ledger
        self._holders = holders
        self.missing_blocks = 0
        """What the first lacks whom the last ``candidates`` turned away for want of memory."""

    def room(self, num_running: int) -> int:
        """How many more sequences may run: each stage's worth of ``max_num_seqs``."""
        return self._config.max_num_seqs * self._num_stages - num_running

    def choose(self, prompts: list[Sequence], *, may_preempt: bool) -> list[Sequence]:
        """Who may be admitted now behind these running prompts; the swapped come back in turn."""
        holders = self._holders
        room = self.room(holders.num_running)
        num_kept, first_away = holders.swap_in(room, may_preempt=may_preempt)
        found = self.candidates(room - num_kept, prompts, first_away)
        missing = self.missing_blocks if may_preempt else 0
        if missing and holders.park_for_head(missing):
            # Those that were found may have counted on the KV of who leaves.
            found = self.candidates(room - num_kept, prompts, first_away)
        return found

    def candidates(
        self, room: int, prompts: Iterable[Sequence], first_away: QueueKey | None = None
    ) -> list[Sequence]:
        """Up to ``room`` waiting sequences that memory admits.

        Enough of them to fill a microbatch behind these running prompts; all of them where
        formation looks ahead. None that came after ``first_away``, who waits for memory too. Nor
        those that begin as one of the others does, which is about to be computed: they wait until
        they can share it.
        """
        self.missing_blocks = 0
        if not self._waiting.num_tokens:
            return []
        ledger, config, cache = self._ledger, self._config, self._cache
        free = ledger.free_blocks
        watermark = watermark_blocks(ledger)
        wanted = config.max_num_batched_tokens - sum(seq.num_left for seq in prompts)
        if config.lookahead and self._num_stages > 1:
            wanted = self._waiting.num_tokens
        found: list[Sequence] = []
        coming = {cache.name_ahead(seq) for seq in prompts} - {None}
        for seq in self._waiting:
            if wanted <= 0 or len(found) >= room:
                break
            if first_away is not None and first_away < seq.key:
                break
            num_shared = cache.look_up(seq)
            name = cache.name_ahead(seq)
            if name is not None:
                if name in coming:
                    continue
                coming.add(name)
            free += num_shared
            tokens = reserved_tokens(seq.num_tokens, seq.beginning.found_tokens, config)
            free -= self._blocks.holding(tokens)
            if free < watermark:
                self.missing_blocks = watermark - free
                break
            watermark = ledger.watermark_blocks
            wanted -= seq.num_tokens - seq.beginning.found_tokens
            found.append(seq)
        return found
