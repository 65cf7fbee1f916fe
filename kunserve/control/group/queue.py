"""The queue of a group's waiting sequences: by priority, then first come first."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from kunserve.control.group.ledger import BlockCounts
from kunserve.control.group.sequence import Progress, QueueKey, Sequence
from kunserve.core.kv_blocks import KvBlocks


class WaitingQueue:
    """Sequences without KV in the order of their places, with running totals for load reports."""

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
        """The sequence that is next."""
        return self._entries[0][1] if self._entries else None

    def add(self, seq: Sequence) -> None:
        """Put the sequence at its place."""
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


def watermark_blocks(ledger: BlockCounts, own_blocks: int = 0) -> int:
    """Blocks that an admission leaves free; none where it has the memory for itself.

    ``own_blocks`` is what the admitted one holds already.
    """
    if ledger.used_blocks == own_blocks:
        return 0
    return ledger.watermark_blocks


def _key_of(entry: tuple[QueueKey, Sequence]) -> QueueKey:
    return entry[0]
