"""What a live migration asks of a scheduler's sequences and memory, on either side."""

from collections.abc import Mapping

from kunserve.control.group.ledger import Ledger
from kunserve.control.group.queue import WaitingQueue, watermark_blocks
from kunserve.control.group.sequence import Progress, Sequence
from kunserve.core.ids import RequestId
from kunserve.core.kv_blocks import KvBlocks
from kunserve.policy.dispatch.migrate import Movable


class MigrationAccess:
    """Looks at one group's requests; only those that decode may leave it.

    What it says of them holds while no step is in flight.
    """

    def __init__(
        self,
        blocks: KvBlocks,
        live: Mapping[RequestId, Sequence],
        waiting: WaitingQueue,
        ledger: Ledger,
    ) -> None:
        self._blocks = blocks
        self._live = live
        self._waiting = waiting
        self._ledger = ledger

    def knows(self, request_id: RequestId) -> bool:
        """Whether the request is one of the group's."""
        return request_id in self._live

    def movable(self) -> list[Movable]:
        """Requests that may leave, in order of arrival."""
        found = [seq for seq in self._live.values() if _is_decoding(seq)]
        found.sort(key=lambda seq: seq.key)
        return [Movable(seq.request_id, self._blocks_for(seq.num_computed)) for seq in found]

    @property
    def missing_blocks(self) -> int:
        """What the head of the queue lacks; 0 when nobody waits for memory."""
        head = self._waiting.head
        if head is None:
            return 0
        return max(0, self._blocks_for(head.num_tokens) - self._ledger.free_blocks)

    def written_tokens(self, request_id: RequestId) -> int | None:
        """Tokens whose KV exists; None unless the request may leave."""
        seq = self._live.get(request_id)
        return seq.num_computed if seq is not None and _is_decoding(seq) else None

    def largest_blocks(self, request_id: RequestId) -> int:
        """What the request may come to need."""
        return self._blocks_for(self._live[request_id].max_stored_tokens)

    def pause(self, request_id: RequestId) -> None:
        """Until ``Scheduler.resume`` the request keeps its KV and does not run."""
        seq = self._live[request_id]
        assert _is_decoding(seq), seq
        seq.move_to(Progress.STALLED)

    def reserve(self, request_id: RequestId, num_blocks: int) -> bool:
        """Set memory aside for a request that may come; False if others need it."""
        more = num_blocks - self._ledger.blocks_of(request_id)
        margin = watermark_blocks(self._ledger)
        if more > 0 and (self._waiting or self._ledger.free_blocks - more < margin):
            return False
        return self._ledger.reserve(request_id, num_blocks)

    def unreserve(self, request_id: RequestId) -> None:
        """The memory set aside for a request is free again."""
        self._ledger.release(request_id)

    def _blocks_for(self, num_tokens: int) -> int:
        return self._blocks.holding(num_tokens)


def _is_decoding(seq: Sequence) -> bool:
    return seq.state is Progress.RUNNING and seq.num_output > 0 and seq.num_left == 1
