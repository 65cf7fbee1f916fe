"""Who of the waiting gets memory now: first come, first served."""

from kunserve.control.group.ledger import Ledger
from kunserve.control.group.sequence import QueueKey, Sequence, WaitingQueue
from kunserve.core.config import SchedulerConfig


def watermark_blocks(ledger: Ledger, own_blocks: int = 0) -> int:
    """Blocks that an admission leaves free; none where it has the memory for itself.

    ``own_blocks`` is what the admitted one holds already.
    """
    if ledger.used_blocks == own_blocks:
        return 0
    return ledger.watermark_blocks


class Admission:
    """Looks at a group's queue and its ledger."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_stages: int,
        block_size: int,
        waiting: WaitingQueue,
        ledger: Ledger,
    ) -> None:
        self._config = config
        self._num_stages = num_stages
        self._block_size = block_size
        self._waiting = waiting
        self._ledger = ledger
        self.lacks_memory = False
        """Somebody was turned away by the last ``candidates`` for want of memory."""

    def room(self, num_running: int) -> int:
        """How many more sequences may run: each stage's worth of ``max_num_seqs``."""
        return self._config.max_num_seqs * self._num_stages - num_running

    def admit(self, seq: Sequence) -> None:
        """Give a candidate blocks for all its known tokens."""
        fits = self._ledger.grow(seq.request_id, -(-len(seq.token_ids) // self._block_size))
        assert fits, (seq.request_id, self._ledger.free_blocks)
        self._waiting.remove(seq)

    def candidates(
        self, room: int, num_tokens_ahead: int, first_away: QueueKey | None = None
    ) -> list[Sequence]:
        """Up to ``room`` waiting sequences that memory admits.

        Enough of them to fill a microbatch behind ``num_tokens_ahead`` tokens of running prompts;
        all of them where formation looks ahead. None that came after ``first_away``, who waits
        for memory too.
        """
        ledger, config = self._ledger, self._config
        free = ledger.free_blocks
        watermark = watermark_blocks(ledger)
        wanted = config.max_num_batched_tokens - num_tokens_ahead
        if config.lookahead and self._num_stages > 1:
            wanted = self._waiting.num_tokens
        self.lacks_memory = False
        found: list[Sequence] = []
        for seq in self._waiting:
            if wanted <= 0 or len(found) >= room:
                break
            if first_away is not None and first_away < seq.key:
                break
            free -= -(-len(seq.token_ids) // self._block_size)
            if free < watermark:
                self.lacks_memory = True
                break
            watermark = ledger.watermark_blocks
            wanted -= len(seq.token_ids)
            found.append(seq)
        return found
