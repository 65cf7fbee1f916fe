"""Requests that have not ended: where each one is, and what its client already has."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kunserve.control.cluster.commands import Client, Deliver, Outbox
from kunserve.control.cluster.placement import Group, Placement
from kunserve.control.cluster.quarantine import Quarantine
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.messages import Abort, Outputs, Returned, Submit, TokenOutput
from kunserve.core.request import FinishReason, Request
from kunserve.core.tokens import TokenIds
from kunserve.policy.dispatch import choose_group

MAX_MOVES = 4
"""Groups between which a waiting request moves at most: its place in a queue is worth something."""


@dataclass(slots=True)
class _Live:
    number: int
    """Counts arrivals: the order in which requests are sent anew."""
    request: Request
    client: Client
    leader: InstanceId | None
    """None while no group has it."""
    output_token_ids: list[int]
    arrived_s: float
    early: dict[int, TokenOutput] = field(default_factory=dict)
    """By position: a new leader's word came before the last of the old one's."""
    is_rerun: bool = False
    """An instance died that ran it: its last words may still come."""
    unplaced_s: float | None = None
    """Since about when no group has it."""
    returned_by: InstanceId | None = None
    """The leader in whose queue it was last, while it is on its way to another."""
    num_moves: int = 0

    def so_far(self) -> Request:
        """The request with what its client has: a new run goes on from there."""
        return replace(self.request, output_token_ids=TokenIds(self.output_token_ids))


class Requests:
    """Dispatches requests, follows them through transitions, and runs them again after a death.

    Owns who waits for a request. A token reaches the client once: a re-run's repeats are known by
    their position.
    """

    def __init__(self, placement: Placement, block_size: int, outbox: Outbox) -> None:
        self._placement = placement
        self._block_size = block_size
        self._outbox = outbox
        self._num_arrived = 0
        self.quarantine = Quarantine(placement, outbox)
        self.num_moved = 0
        """Waiting requests that changed groups."""
        self._placed_version = -1
        self._live: dict[RequestId, _Live] = {}
        self._by_leader: dict[InstanceId | None, dict[RequestId, _Live]] = {None: {}}
        self._num_sent: dict[InstanceId, int] = {}
        """Submissions to each instance, to match ``LoadReport.num_received``."""

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_unplaced(self) -> int:
        """Requests that no group has."""
        return len(self._by_leader[None])

    def num_at(self, leader: InstanceId) -> int:
        """Requests that the instance leads."""
        return len(self._by_leader.get(leader, ()))

    def add(self, request: Request, client: Client, now_s: float) -> None:
        """Send a new request to a group; it is kept until a group can take it."""
        self._num_arrived += 1
        tokens = list(request.output_token_ids)
        live = _Live(self._num_arrived, request, client, None, tokens, now_s)
        self._live[request.request_id] = self._by_leader[None][request.request_id] = live
        self._dispatch(live)

    def cancel(self, request_id: RequestId) -> None:
        """Forget a request and have its leader free everything."""
        live = self._live.get(request_id)
        if live is None:
            return
        self._forget(live)
        if live.leader is not None:
            self._outbox.send(live.leader, Abort(request_id))

    def _forget(self, live: _Live) -> None:
        request_id = live.request.request_id
        del self._live[request_id], self._by_leader[live.leader][request_id]
        self.quarantine.ended(request_id)

    def _lead(self, live: _Live, leader: InstanceId | None) -> None:
        request_id = live.request.request_id
        del self._by_leader[live.leader][request_id]
        self._by_leader.setdefault(leader, {})[request_id] = live
        live.leader = leader
        live.unplaced_s = None

    def _dispatch(self, live: _Live) -> None:
        """Send the request where it starts soonest; it stays unplaced if that is nowhere yet."""
        groups = self._placement.candidates()
        expected = self._placement.expected
        loads = [group.load for group in (*groups, *expected.values())]
        blocks = self._blocks_of(live)
        group_id = choose_group(loads, blocks)
        if group_id is not None and group_id not in expected:
            self._send(live, self._placement.groups[group_id], blocks)

    def _blocks_of(self, live: _Live) -> int:
        tokens = len(live.request.prompt_token_ids) + len(live.output_token_ids)
        return -(-tokens // self._block_size)

    def _send(
        self, live: _Live, group: Group, blocks: int, migration_id: TransitionId | None = None
    ) -> None:
        leader = group.layout.leader
        number = self._num_sent.get(leader, 0) + 1
        self._num_sent[leader] = number
        group.sent(number, blocks)
        self._lead(live, leader)
        if live.returned_by not in (None, leader):
            live.num_moves += 1
            self.num_moved += 1
        live.returned_by = None
        self._outbox.send(leader, Submit(live.so_far(), migration_id=migration_id))

    def place(self) -> None:
        """Send what no group has, in order of arrival: other groups may take it than before."""
        self._placed_version = self._placement.version
        self._isolate()
        unplaced = self._by_leader[None]
        if not unplaced:
            return
        expected = self._placement.expected
        loads = {group.layout.group_id: group.load for group in self._placement.candidates()}
        loads |= {group_id: group.load for group_id, group in expected.items()}
        for live in _by_arrival(unplaced):
            if self.quarantine.holds(live.request.request_id):
                continue
            blocks = self._blocks_of(live)
            group_id = choose_group(loads.values(), blocks)
            if group_id is None:
                continue
            if group_id in expected:
                # It waits for this group, so the next ones find less room there.
                sent = loads[group_id].unreported_blocks + blocks
                loads[group_id] = replace(loads[group_id], unreported_blocks=sent)
            else:
                group = self._placement.groups[group_id]
                self._send(live, group, blocks)
                loads[group_id] = group.load

    def place_if_changed(self) -> None:
        """Called now and then: as ``place`` if other groups stand than at its last call."""
        if self._placement.version != self._placed_version:
            self.place()

    def _isolate(self) -> None:
        """Let the oldest request that must run alone run, if a group is empty."""
        quarantine = self.quarantine
        if quarantine.alone is not None:
            return
        held = {
            request_id: live
            for request_id, live in self._by_leader[None].items()
            if quarantine.holds(request_id)
        }
        if not held:
            quarantine.nobody()
            return
        live = _by_arrival(held)[0]
        blocks = self._blocks_of(live)
        num_at = {
            group.layout.group_id: self.num_at(group.layout.leader)
            for group in self._placement.groups.values()
        }
        group = quarantine.reserve(blocks, num_at)
        if group is not None:
            self._send(live, group, blocks)
            quarantine.isolate(live.request.request_id, len(live.output_token_ids))

    def waiting_at(self, group: Group) -> list[RequestId]:
        """The requests that wait there by the last report, oldest first.

        A leader admits in order of arrival, so those that wait arrived last of those it knew.
        """
        led = _by_arrival(self._by_leader.get(group.layout.leader, {}))
        known = led[: len(led) - len(group.unreported)]
        num_waiting = min(group.report.num_waiting, len(known))
        waiting = known[len(known) - num_waiting :]
        return [live.request.request_id for live in waiting if live.num_moves < MAX_MOVES]

    def returned(self, event: Returned) -> None:
        """A leader has taken requests out of its queue: they are sent where they start soonest."""
        group = self._placement.led_by(event.instance_id)
        if group is not None:
            group.is_returned = True
        for request_id in event.request_ids:
            live = self._live.get(request_id)
            if live is not None and live.leader == event.instance_id:
                self._lead(live, None)
                self.quarantine.interrupted(request_id)
                live.returned_by = event.instance_id
        self.place()

    def end_homeless(self) -> tuple[RequestId, ...]:
        """End what no group can take with an error, because none will stand soon."""
        homeless = _by_arrival(self._by_leader[None])
        for live in homeless:
            self._fail(live)
        return tuple(live.request.request_id for live in homeless)

    def expire(self, now_s: float, timeout_s: float | None, placing_s: float) -> None:
        """End what has not ended ``timeout_s`` after its arrival, or waits for a group too long."""
        for live in tuple(self._by_leader[None].values()):
            if live.unplaced_s is None:
                live.unplaced_s = now_s
            elif now_s - live.unplaced_s > placing_s:
                self._fail(live)
        if timeout_s is None:
            return
        while self._live:
            oldest = next(iter(self._live.values()))
            if now_s - oldest.arrived_s <= timeout_s:
                return
            self._fail(oldest)

    def _fail(self, live: _Live) -> None:
        """End a request with an error, wherever it is."""
        request_id = live.request.request_id
        end = TokenOutput(request_id, len(live.output_token_ids), None, None, FinishReason.ERROR)
        client, leader = live.client, live.leader
        self._forget(live)
        if leader is not None:
            self._outbox.send(leader, Abort(request_id))
        self._outbox.add(Deliver(end, client))

    def take(self, outputs: Outputs) -> None:
        """Deliver tokens that the client does not have yet, each when those before it are there.

        Mail of two leaders comes in any order.
        """
        live_by_id = self._live
        for token in outputs.tokens:
            live = live_by_id.get(token.request_id)
            if live is None:
                continue
            if token.position > len(live.output_token_ids):
                live.early[token.position] = token
                continue
            self._take_next(live, token, outputs.instance_id)
            while live.early and (early := live.early.pop(len(live.output_token_ids), None)):
                self._take_next(live, early, outputs.instance_id)
        self.place_if_changed()

    def _take_next(self, live: _Live, token: TokenOutput, src: InstanceId) -> None:
        """A token, or an end without one, that is next in order or a repeat."""
        if token.token_id is not None:
            if token.position != len(live.output_token_ids):
                return
            live.output_token_ids.append(token.token_id)
        self._outbox.add(Deliver(token, live.client))
        if token.finish_reason is not None:
            self._forget(live)
            if live.is_rerun and live.leader not in (None, src):
                # Its last words came late: where it was to run again it is not wanted any more.
                self._outbox.send(live.leader, Abort(token.request_id))
        elif token.request_id == self.quarantine.alone:
            self.quarantine.made_token(token.request_id, len(live.output_token_ids))

    def relead(
        self,
        old_leaders: Iterable[InstanceId],
        told: dict[RequestId, InstanceId],
        default: dict[InstanceId, InstanceId],
    ) -> None:
        """After a transition: whom the new leaders named is theirs; the rest was forwarded."""
        for old_leader in old_leaders:
            for request_id, live in tuple(self._by_leader.get(old_leader, {}).items()):
                self._lead(live, told.get(request_id, default[old_leader]))

    def migrate(
        self,
        request_id: RequestId,
        source: InstanceId,
        target: Group,
        migration_id: TransitionId,
    ) -> bool:
        """Give a request that has stopped at ``source`` to another group; False if it ended."""
        live = self._live.get(request_id)
        if live is None or live.leader != source:
            return False
        self._send(live, target, self._blocks_of(live), migration_id)
        return True

    def restarted(self, instance_id: InstanceId, num_received: int = 0) -> None:
        """A new process counts its submissions from zero, an earlier front's one goes on."""
        self._num_sent[instance_id] = num_received

    def rerun(self, leaders: set[InstanceId], num_suspects: Mapping[InstanceId, int]) -> None:
        """Run the requests of these leaders again, from prompt and tokens already delivered.

        The first so many of a leader may be why it died.
        """
        for leader in leaders:
            lost = _by_arrival(self._by_leader.get(leader, {}))
            for number, live in enumerate(lost):
                request_id = live.request.request_id
                live.early.clear()
                self._lead(live, None)
                if number >= num_suspects.get(leader, 0) or not self.quarantine.died(request_id):
                    self.quarantine.interrupted(request_id)
                    live.is_rerun = True
                else:
                    self._fail(live)
        self.place()

    def check(self, alive: Iterable[InstanceId]) -> None:
        """Assert that every request has a living leader, or none."""
        living = set(alive)
        for leader, led in self._by_leader.items():
            assert leader is None or not led or leader in living, (leader, led.keys())
            assert all(live.leader == leader for live in led.values()), leader
        assert sum(map(len, self._by_leader.values())) == len(self._live), self._by_leader.keys()


def _by_arrival(lives: dict[RequestId, _Live]) -> list[_Live]:
    return sorted(lives.values(), key=lambda live: live.number)
