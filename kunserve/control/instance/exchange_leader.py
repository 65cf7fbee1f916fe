"""The new leader's part in a coordinated exchange (paper 4.2).

It decides when a stalled request may run again, and how much KV memory new requests may use
meanwhile: all but what the members have reserved for the exchange.
"""

from dataclasses import replace

from kunserve.control.group.scheduler import Scheduler
from kunserve.control.instance.membership import Membership
from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.messages import ExchangeDone, ExchangeProgress, KvDropped, SequenceState
from kunserve.core.request import Request
from kunserve.policy.exchange import receivers
from kunserve.policy.moves import MovePlan


class ExchangeLeader:
    """Exists on a new group's leader from the switch until all its members have finished."""

    def __init__(
        self,
        state: InstanceState,
        membership: Membership,
        scheduler: Scheduler,
        transition_id: TransitionId,
        plan: MovePlan,
        sequences: list[SequenceState],
        now_s: float,
    ) -> None:
        self.transition_id = transition_id
        self._state = state
        self._capacity_blocks = membership.capacity_blocks
        self._layout = membership.layout
        self._scheduler = scheduler
        self._started_s = now_s
        self._moves = {m.request_id: m for m in plan.moves if m.new == self._layout}
        self._requests: dict[RequestId, Request] = {}
        """Stalled ones, to be run again should their KV get lost."""
        self._waits: dict[RequestId, set[InstanceId]] = {}
        for sequence in sequences:
            request_id = sequence.request.request_id
            move = self._moves.get(request_id)
            takers = () if move is None else receivers(move.old, move.new)
            if takers:
                self._waits[request_id] = set(takers)
                self._requests[request_id] = replace(
                    sequence.request, output_token_ids=sequence.output_token_ids
                )
        self._num_requests = len(self._waits)
        self._ended_blocks = 0
        """Of requests that ended while stalled: members may still hold or expect their KV."""
        self._extra: dict[InstanceId, int] = {}
        self._finished: set[InstanceId] = set()
        self._moved_bytes = 0
        self._max_stall_s = 0.0
        scheduler.may_preempt = False
        scheduler.adopt(sequences, frozenset(self._waits))
        self._narrow()

    def _narrow(self) -> None:
        """What may be used at this moment: less than the capacity while KV is under way."""
        stages, capacity = self._layout.stages, self._capacity_blocks
        if len(self._extra) < len(stages):
            capacity = min(capacity, self._scheduler.used_blocks)
        for stage in stages:
            units = self._state.specs[stage.instance_id].units_when_holding(stage.layers.num_layers)
            units -= self._extra.get(stage.instance_id, 0)
            capacity = min(capacity, units // stage.layers.num_layers)
        self._scheduler.set_capacity(max(0, capacity - self._ended_blocks))

    def read_progress(self, message: ExchangeProgress, now_s: float) -> bool:
        """Take a member's account; True when the exchange is over."""
        if self._layout.layers_of(message.instance_id) is None:
            return False
        self._extra[message.instance_id] = message.extra_units
        self._moved_bytes += message.moved_bytes
        if message.is_finished:
            self._finished.add(message.instance_id)
        for request_id in message.arrived:
            self._arrived(request_id, message.instance_id, now_s)
        for request_id in message.lost:
            self._lose(request_id)
        if self._waits or len(self._finished) < len(self._layout.stages):
            self._narrow()
            return False
        self._finish(now_s)
        return True

    def _arrived(self, request_id: RequestId, member: InstanceId, now_s: float) -> None:
        waits = self._waits.get(request_id)
        if waits is None:
            return
        waits.discard(member)
        if not waits:
            del self._waits[request_id]
            self._max_stall_s = max(self._max_stall_s, now_s - self._started_s)
            self._scheduler.resume(request_id)

    def _lose(self, request_id: RequestId) -> None:
        """A member could not get the KV: it is computed again."""
        if request_id not in self._waits:
            return
        self.abort(request_id)
        aborted = self._scheduler.abort(request_id)
        assert aborted, request_id
        self._scheduler.add(self._requests[request_id])
        tokens = self._moves[request_id].num_blocks * self._state.spec.block_size
        self._state.note_preemption(request_id, tokens)

    def abort(self, request_id: RequestId) -> None:
        """The request ends, as the scheduler is told too: nobody shall wait for its KV."""
        if self._waits.pop(request_id, None) is None:
            return
        move = self._moves[request_id]
        self._ended_blocks += move.num_blocks
        for member in move.old.members:
            # The next plan releases it on members of the group.
            if self._layout.layers_of(member) is None:
                self._state.send(member, KvDropped(self.transition_id, request_id))
        self._narrow()

    def _finish(self, now_s: float) -> None:
        self._scheduler.may_preempt = True
        self._scheduler.set_capacity(self._capacity_blocks)
        self._state.send(
            None,
            ExchangeDone(
                transition_id=self.transition_id,
                group_id=self._layout.group_id,
                num_requests=self._num_requests,
                moved_bytes=self._moved_bytes,
                seconds=now_s - self._started_s,
                max_stall_s=self._max_stall_s,
            ),
        )
