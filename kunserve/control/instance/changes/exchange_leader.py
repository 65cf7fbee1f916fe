"""The new leader's part in a coordinated exchange (paper 4.2).

It decides when a stalled request may run again, and how much KV memory new requests may use
meanwhile: all but what the members have reserved for the exchange.
"""

from dataclasses import replace

from kunserve.control.group.scheduler import Scheduler
from kunserve.control.instance.membership import Membership
from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import InstanceId, PrefixId, RequestId, TransitionId
from kunserve.core.messages import ExchangeDone, ExchangeProgress, KvDropped, SequenceState
from kunserve.core.request import Request
from kunserve.policy.exchange.moves import MovePlan
from kunserve.policy.exchange.order import receivers


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
        self._missing: dict[RequestId, set[InstanceId]] = {}
        """Members that lack KV of a holder, request or prefix."""
        for move in self._moves.values():
            takers = receivers(move.old, move.new)
            if takers and move.num_own:
                self._missing[move.request_id] = set(takers)
        self._waits: dict[RequestId, set[RequestId]] = {}
        """What a stalled request waits for: its own KV, and prefixes that it shares."""
        self._waiting_for: dict[RequestId, list[RequestId]] = {}
        """The other way round; some of them may have ended."""
        for sequence in sequences:
            request_id = sequence.request.request_id
            holders = {request_id, *(part.prefix_id for part in sequence.shared)}
            missing = holders & self._missing.keys()
            if missing:
                self._waits[request_id] = missing
                for holder in missing:
                    self._waiting_for.setdefault(holder, []).append(request_id)
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
        self._cache = scheduler.cache
        here = [p for p in plan.prefixes if p.new_group == self._layout.group_id]
        self._prefix_ids: set[RequestId] = {prefix.prefix_id for prefix in here}
        self._cache.adopt(replace(p.old, prefix_id=p.prefix_id) for p in here)
        for prefix in here:
            if prefix.prefix_id not in self._missing:
                self._cache.arrived(prefix.prefix_id)
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
        if self._missing or len(self._finished) < len(self._layout.stages):
            self._narrow()
            return False
        self._finish(now_s)
        return True

    def _arrived(self, request_id: RequestId, member: InstanceId, now_s: float) -> None:
        missing = self._missing.get(request_id)
        if missing is None:
            return
        missing.discard(member)
        if missing:
            return
        del self._missing[request_id]
        if request_id in self._prefix_ids:
            self._cache.arrived(PrefixId(request_id))
        for waiting in self._waiting_for.pop(request_id, ()):
            holders = self._waits.get(waiting, set())
            holders.discard(request_id)
            if waiting in self._waits and not holders:
                del self._waits[waiting]
                self._max_stall_s = max(self._max_stall_s, now_s - self._started_s)
                self._scheduler.resume(waiting)

    def _lose(self, request_id: RequestId) -> None:
        """A member could not get the KV: it is computed again."""
        if request_id in self._prefix_ids:
            self._lose_prefix(PrefixId(request_id))
            return
        if request_id not in self._waits:
            return
        self.abort(request_id)
        aborted = self._scheduler.abort(request_id)
        assert aborted, request_id
        self._scheduler.add(self._requests[request_id])
        tokens = self._state.spec.blocks.tokens_in(self._moves[request_id].num_blocks)
        self._state.note_preemption(request_id, tokens)

    def _lose_prefix(self, prefix_id: PrefixId) -> None:
        """A member could not get a prefix: whoever shares it is computed again."""
        if prefix_id not in self._missing:
            return
        for waiting in self._waiting_for.pop(prefix_id, ()):
            self._lose(waiting)
        self._cache.lost(prefix_id)
        self._forget(prefix_id)

    def abort(self, request_id: RequestId) -> None:
        """The request ends, as the scheduler is told too: nobody shall wait for its KV."""
        if self._waits.pop(request_id, None) is not None:
            self._forget(request_id)

    def _forget(self, request_id: RequestId) -> None:
        """Nobody wants the holder's KV any more: whoever has it may free it."""
        self._missing.pop(request_id, None)
        move = self._moves[request_id]
        self._ended_blocks += move.num_own
        for member in move.old.members if move.num_own else ():
            # The next plan releases it on members of the group.
            if self._layout.layers_of(member) is None:
                self._state.send(member, KvDropped(self.transition_id, request_id))
        self._narrow()

    def _finish(self, now_s: float) -> None:
        self._scheduler.may_preempt = True
        self._cache.end_exchange()
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

    def check(self) -> None:
        """Assert that whoever waits does so for KV that members lack."""
        members = set(self._layout.members)
        for holder, lacking in self._missing.items():
            assert holder in self._moves and lacking and lacking <= members, (holder, lacking)
        for request_id, holders in self._waits.items():
            assert holders and holders <= self._missing.keys(), (request_id, holders)
        assert self._finished <= self._extra.keys() <= members, (self._finished, self._extra)
