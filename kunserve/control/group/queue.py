"""The queue of a group's waiting sequences, and who of them gets memory now: first come first."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from kunserve.control.group.ledger import Ledger
from kunserve.control.group.prefix_cache import PrefixCache
from kunserve.control.group.sequence import Progress, QueueKey, Sequence
from kunserve.core.config import SchedulerConfig
from kunserve.core.kv_blocks import KvBlocks


class WaitingQueue:
    """Sequences without KV in order of arrival, with running totals for load reports."""

    def __init__(self, blocks: KvBlocks) -> None:
        self._blocks = blocks
        self._entries: list[tuple[QueueKey, Sequence]] = []
        self.num_tokens = 0
        """Known tokens of all waiting sequences together."""
        self.num_blocks = 0
        """Blocks that they need together."""
        self.version = 0
        """Counts the changes."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._entries)

    @property
    def head(self) -> Sequence | None:
        """The sequence that came first."""
        return self._entries[0][1] if self._entries else None

    def add(self, seq: Sequence) -> None:
        """Put the sequence at its place in order of arrival."""
        insort(self._entries, (seq.key, seq))
        self._count(seq, 1)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        index = bisect_left(self._entries, seq.key, key=_key_of)
        assert index < len(self._entries) and self._entries[index][1] is seq, seq.request_id
        del self._entries[index]
        self._count(seq, -1)

    def clear(self) -> None:
        """Nobody waits any more."""
        self._entries.clear()
        self.num_tokens = self.num_blocks = 0
        self.version += 1

    def check(self) -> None:
        """Assert order, totals, and that nobody here has KV."""
        keys = [key for key, _ in self._entries]
        assert keys == sorted(set(keys)), keys
        lengths = [seq.num_tokens for seq in self]
        assert self.num_tokens == sum(lengths), (self.num_tokens, lengths)
        assert self.num_blocks == sum(map(self._blocks.holding, lengths))
        for seq in self:
            assert seq.state is Progress.WAITING and seq.num_computed == 0, seq
            assert not seq.is_awaiting and not seq.is_started, seq

    def _count(self, seq: Sequence, sign: int) -> None:
        tokens = seq.num_tokens
        self.num_tokens += sign * tokens
        self.num_blocks += sign * self._blocks.holding(tokens)
        self.version += 1


class Admission:
    """Looks at a group's queue and its ledger."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_stages: int,
        blocks: KvBlocks,
        waiting: WaitingQueue,
        ledger: Ledger,
        cache: PrefixCache | None = None,
    ) -> None:
        self._cache = cache
        self._config = config
        self._num_stages = num_stages
        self._blocks = blocks
        self._waiting = waiting
        self._ledger = ledger
        self.missing_blocks = 0
        """What the first lacks whom the last ``candidates`` turned away for want of memory."""

    def room(self, num_running: int) -> int:
        """How many more sequences may run: each stage's worth of ``max_num_seqs``."""
        return self._config.max_num_seqs * self._num_stages - num_running

    def admit(self, seq: Sequence) -> None:
        """Give a candidate blocks for all its known tokens, those that the cache has included."""
        if self._cache is not None:
            self._cache.share(seq)
        fits = self._ledger.grow(seq.request_id, self._blocks.holding(seq.num_tokens))
        assert fits, (seq.request_id, self._ledger.free_blocks)
        self._waiting.remove(seq)

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
        coming = set() if cache is None else {cache.name_ahead(seq) for seq in prompts} - {None}
        for seq in self._waiting:
            if wanted <= 0 or len(found) >= room:
                break
            if first_away is not None and first_away < seq.key:
                break
            if cache is not None:
                num_shared = cache.look_up(seq)
                name = cache.name_ahead(seq)
                if name is not None and name in coming:
                    continue
                coming.add(name)
                free += num_shared
            free -= self._blocks.holding(seq.num_tokens)
            if free < watermark:
                self.missing_blocks = watermark - free
                break
            watermark = ledger.watermark_blocks
            wanted -= seq.num_tokens - seq.num_found
            found.append(seq)
        return found


def watermark_blocks(ledger: Ledger, own_blocks: int = 0) -> int:
    """Blocks that an admission leaves free; none where it has the memory for itself.

    ``own_blocks`` is what the admitted one holds already.
    """
    if ledger.used_blocks == own_blocks:
        return 0
    return ledger.watermark_blocks


def _key_of(entry: tuple[QueueKey, Sequence]) -> QueueKey:
    return entry[0]
