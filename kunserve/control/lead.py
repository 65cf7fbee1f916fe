"""The new leader's part in an exchange: who still waits for KV, and what memory may be used."""

from kunserve.control.exchange import PIECES_IN_FLIGHT, Move
from kunserve.control.seat import Seat
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.layout import GroupLayout
from kunserve.core.messages import Abort, ExchangeDone, ExchangeProgress, SequenceState
from kunserve.policy.capacity import stage_units
from kunserve.policy.exchange import receivers


class Lead:
    """The new leader's view of an exchange: who still waits, and how much memory there is."""

    def __init__(
        self,
        seat: Seat,
        transition_id: TransitionId,
        piece_blocks: int,
        new: GroupLayout,
        moves: list[Move],
        states: list[SequenceState],
        now_s: float,
    ) -> None:
        self._seat = seat
        self._transition_id = transition_id
        self._layout = new
        self._started_s = now_s
        self._float_blocks = PIECES_IN_FLIGHT * piece_blocks
        self._moves = {m.request_id: m for m in moves if m.new == new}
        self._waits: dict[RequestId, set[InstanceId]] = {}
        for move in self._moves.values():
            takers = receivers(move.old, move.new)
            if takers:
                self._waits[move.request_id] = set(takers)
        self._num_requests = len(self._waits)
        self._extra: dict[InstanceId, int] = {}
        self._finished: set[InstanceId] = set()
        self._moved_bytes = 0
        self._max_stall_s = 0.0
        assert seat.scheduler is not None
        seat.scheduler.may_preempt = False
        seat.scheduler.adopt(states, frozenset(self._waits))
        self._narrow()

    def _narrow(self) -> None:
        """What may be used at this moment: less than the capacity while KV is under way."""
        seat, layout = self._seat, self._layout
        assert seat.scheduler is not None
        capacity = seat.capacity_blocks()
        if len(self._extra) < len(layout.stages):
            seat.scheduler.set_capacity(min(capacity, seat.scheduler.used_blocks))
            return
        for stage in layout.stages:
            held = stage.layers.num_layers
            units = stage_units(seat.specs[stage.instance_id], stage.layers)
            now = (units - self._extra[stage.instance_id]) // held - self._float_blocks
            capacity = min(capacity, now)
        seat.scheduler.set_capacity(max(0, capacity))

    def on_progress(self, message: ExchangeProgress, now_s: float) -> bool:
        """Take a member's account; True when the exchange is over."""
        if message.transition_id != self._transition_id:
            return False
        seat = self._seat
        assert seat.scheduler is not None
        self._extra[message.instance_id] = message.extra_units
        self._moved_bytes += message.moved_bytes
        if message.is_finished:
            self._finished.add(message.instance_id)
        for request_id in message.arrived:
            waits = self._waits.get(request_id)
            if waits is None:
                continue
            waits.discard(message.instance_id)
            if not waits:
                del self._waits[request_id]
                self._max_stall_s = max(self._max_stall_s, now_s - self._started_s)
                seat.scheduler.resume(request_id)
        if self._waits or len(self._finished) < len(self._layout.stages):
            self._narrow()
            return False
        seat.scheduler.may_preempt = True
        seat.scheduler.set_capacity(seat.capacity_blocks())
        seat.send(
            None,
            ExchangeDone(
                transition_id=self._transition_id,
                group_id=self._layout.group_id,
                num_requests=self._num_requests,
                moved_bytes=self._moved_bytes,
                seconds=now_s - self._started_s,
                max_stall_s=self._max_stall_s,
            ),
        )
        return True

    def on_abort(self, request_id: RequestId) -> None:
        """Old members outside the group free the request's KV too."""
        if self._waits.pop(request_id, None) is None:
            return
        move = self._moves[request_id]
        for member in move.old.members:
            if member not in self._layout.members:
                self._seat.send(member, Abort(request_id))
