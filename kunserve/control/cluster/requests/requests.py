"""Requests that have not ended: where each one is, and what its client already has."""

from collections.abc import Iterable, Mapping, Set
from operator import attrgetter

from kunserve.control.cluster.commands import Client, Deliver, LogRerun, Outbox, Send
from kunserve.control.cluster.placement import Group, Placement
from kunserve.control.cluster.requests.backlog import Backlog, SentAhead
from kunserve.control.cluster.requests.live import Live
from kunserve.control.cluster.requests.open_groups import OpenGroups
from kunserve.control.cluster.requests.prefixes import Prefixes
from kunserve.control.cluster.requests.quarantine import NOBODY, Blame, Quarantine
from kunserve.control.cluster.requests.unplaceable import Unplaceable
from kunserve.control.cluster.standing import Act
from kunserve.core.config import DispatchPolicy
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.kv_blocks import KvBlocks
from kunserve.core.messages import Abort, Outputs, Returned, Submit, TokenOutput
from kunserve.core.request import FinishReason, Request
from kunserve.policy.dispatch.choice import choose_group
from kunserve.policy.dispatch.redispatch import may_leave
from kunserve.policy.dispatch.round_robin import RoundRobin

_place_of = attrgetter("place")

MAX_MOVES = 4
"""Groups between which a waiting request moves at most: its place in a queue is worth something."""


class Requests:
    """Dispatches requests, follows them through transitions, and runs them again after a death.

    Owns who waits for a request.
    """

    def __init__(
        self,
        placement: Placement,
        blocks: KvBlocks,
        step_tokens: int,
        dispatch_policy: DispatchPolicy,
        outbox: Outbox,
        knows_prefixes: bool = False,
    ) -> None:
        """``step_tokens``: computed in one step at most. ``knows_prefixes``: a request goes where
        its beginning lies.
        """
        self._placement = placement
        self._blocks = blocks
        self._outbox = outbox
        self._num_arrived = 0
        self.quarantine = Quarantine(placement, outbox)
        self.num_moved = 0
        """Waiting requests that changed groups."""
        self.num_rerun = 0
        """Times that a request began anew after a death."""
        self.backlog = Backlog(blocks)
        self._ahead = SentAhead(step_tokens)
        at_once, in_turn = dispatch_policy != "soonest", dispatch_policy == "round-robin"
        self._groups = OpenGroups(placement, self._ahead, are_all_roomy=at_once)
        self._choose_group = RoundRobin().choose if in_turn else choose_group
        knows_prefixes = knows_prefixes and not at_once
        self._prefixes = Prefixes(placement, self._ahead, blocks.block_size, knows_prefixes)
        self._placed_version = -1
        self._live: dict[RequestId, Live] = {}
        self._by_leader: dict[InstanceId, dict[RequestId, Live]] = {}
        self._unplaceable = Unplaceable(placement, self.quarantine, self.backlog, self._live)

    def __len__(self) -> int:
        return len(self._live)

    def num_at(self, leader: InstanceId) -> int:
        """Requests that the instance leads."""
        return len(self._by_leader.get(leader, ()))

    def add(self, request: Request, client: Client, now_s: float) -> None:
        """Send a new request to a group; it is kept until a group can take it."""
        self._num_arrived += 1
        tokens = list(request.output_token_ids)
        live = Live(self._num_arrived, request, client, tokens, now_s)
        live.names = self._prefixes.name(request)
        self._live[request.request_id] = live
        if not self._dispatch(live):
            self.backlog.add(live)

    def cancel(self, request_id: RequestId) -> None:
        """Forget a request and have its leader free everything."""
        live = self._live.get(request_id)
        if live is None:
            return
        leader = live.leader
        self._forget(live)
        if leader is not None:
            self._outbox.append(Send(leader, Abort(request_id)))
        self._refill()

    def _forget(self, live: Live) -> None:
        request_id = live.request.request_id
        del self._live[request_id]
        self._take_away(live)
        self.quarantine.ended(request_id)

    def _take_away(self, live: Live) -> None:
        """Wherever the request is, it is there no more."""
        if live.leader is None:
            self.backlog.remove(live)
            return
        if live.tokens_ahead:
            self._ahead.remove(live)
        del self._by_leader[live.leader][live.request.request_id]

    def _lead(self, live: Live, leader: InstanceId | None) -> None:
        is_ahead = live.tokens_ahead > 0
        self._take_away(live)
        live.leader = leader
        if leader is None:
            live.saved_tokens = 0
            self.backlog.add(live)
            return
        self._by_leader.setdefault(leader, {})[live.request.request_id] = live
        if is_ahead:
            self._ahead.add(live)

    def _leave_backlog(self, live: Live) -> None:
        """It is about to be sent, with what its client has by now: late words count until then."""
        self.backlog.remove(live)
        live.request = live.so_far()

    def _dispatch(self, live: Live) -> bool:
        """Send a new request where it starts soonest; False if that is nowhere now.

        Those in the backlog found no room, so whoever finds some passes only who is less urgent.
        """
        blocks, saved = self._blocks_of(live), self._prefixes.saved_tokens(live)
        self._groups.look_at(live.request.priority)
        loads, saved_blocks = self._groups.loads.values(), self._prefixes.in_blocks(saved)
        group_id = self._choose_group(loads, blocks, saved_blocks)
        if group_id is None or group_id in self._placement.expected:
            return False
        group = self._placement.groups[group_id]
        if self._prefixes.holds(live, saved, group, blocks):
            return False
        self._send(live, group, blocks, saved_tokens=saved.get(group_id, 0))
        return True

    def _blocks_of(self, live: Live) -> int:
        return self._blocks.holding(live.num_tokens)

    def _send(
        self,
        live: Live,
        group: Group,
        blocks: int,
        migration_id: TransitionId | None = None,
        saved_tokens: int = 0,
    ) -> None:
        """The group gets a request that no group has, or, as a migration, from another."""
        leader = group.layout.leader
        self._placement.sent(group, blocks)
        if migration_id is None:
            live.leader, live.saved_tokens = leader, saved_tokens
            self._by_leader.setdefault(leader, {})[live.request.request_id] = live
            self._ahead.add(live)
        else:
            self._lead(live, leader)
            live.saved_tokens = 0
            live.request = live.so_far()
        if live.returned_by not in (None, leader):
            live.num_moves += 1
            self.num_moved += 1
        live.returned_by = live.lost_by = None
        self._outbox.append(Send(leader, Submit(live.request, migration_id=migration_id)))

    def place(self) -> None:
        """Send what the backlog has, in order: other groups may take it than before."""
        self._placed_version = self._placement.version
        self._isolate()
        self._ahead.roomier.clear()
        if self.backlog:
            self._fill()

    def place_if_changed(self) -> None:
        """Called often: as ``place`` if other groups stand than at its last call.

        Otherwise leaders that have come to the end of what they were sent are sent more.
        """
        if self._placement.version != self._placed_version:
            self.place()
        else:
            self._refill()

    def _refill(self) -> None:
        roomier = self._ahead.roomier
        if not roomier:
            return
        if self.backlog:
            self._fill(roomier)
        roomier.clear()

    def _fill(self, leaders: Set[InstanceId] | None = None) -> None:
        """Send from the backlog to groups that have room: to all, or to those that these lead.

        What starts sooner in a group that is about to stand waits for that, as much of it as may
        be sent there then.
        """
        if not self.backlog:
            self._prefixes.begin_round()
            return
        groups, placement = self._groups, self._placement
        if not groups.look_at(self.backlog.first_priority, leaders):
            return
        self._prefixes.begin_round()
        for live, num_tokens, blocks, _ in self.backlog:
            groups.narrow(live.request.priority)
            if not groups.has_room:
                return
            if self.quarantine.holds(live.request.request_id):
                continue
            saved = self._prefixes.saved_tokens(live)
            saved_blocks = self._prefixes.in_blocks(saved)
            group_id = self._choose_group(groups.loads.values(), blocks, saved_blocks)
            if group_id is None:
                continue
            if group_id in placement.expected:
                groups.promise(group_id, blocks, num_tokens)
                continue
            group = placement.groups[group_id]
            if not self._prefixes.holds(live, saved, group, blocks):
                self._leave_backlog(live)
                self._send(live, group, blocks, saved_tokens=saved.get(group_id, 0))
                groups.sent(group)

    def _isolate(self) -> None:
        """Let the suspects that are to be tested next run, if a group is empty."""
        quarantine = self.quarantine
        if quarantine.tested:
            return
        held: list[Live] = []
        if quarantine.held:
            testable = self._placement.that_may(Act.TEST)
            largest_blocks = max((group.capacity_blocks for group in testable), default=0)
            suspects = [self._live[request_id] for request_id in quarantine.held]
            held = [
                live
                for live in sorted(suspects, key=_place_of)
                if live.leader is None and self._blocks_of(live) <= largest_blocks
            ]
        if not held:
            quarantine.nobody()
            return
        chosen = quarantine.choose(held)
        blocks = max(map(self._blocks_of, chosen))
        num_at = {
            group.layout.group_id: self.num_at(group.layout.leader)
            for group in self._placement.groups.values()
        }
        group = quarantine.reserve(blocks, num_at)
        if group is not None:
            for live in chosen:
                self._leave_backlog(live)
                self._send(live, group, self._blocks_of(live))
            quarantine.isolate({x.request.request_id: len(x.output_token_ids) for x in chosen})

    def led_by(self, leader: InstanceId) -> list[RequestId]:
        """The requests that an instance leads, in order."""
        return [live.request.request_id for live in self._in_order(leader)]

    def waiting_at(self, group: Group) -> list[RequestId]:
        """The requests that wait there by the last report, in order.

        A leader admits in that order, so those that wait come last of those it knew.
        """
        led = self._in_order(group.layout.leader)
        known = led[: len(led) - len(group.unreported)]
        num_waiting = min(group.report.num_waiting, len(known))
        waiting = known[len(known) - num_waiting :]
        return [
            live.request.request_id
            for live in waiting
            if live.num_moves < MAX_MOVES and may_leave(group.load, live.saved_tokens)
        ]

    def _in_order(self, leader: InstanceId) -> list[Live]:
        return sorted(self._by_leader.get(leader, {}).values(), key=_place_of)

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
        """End what no group has with an error, because none will stand soon."""
        homeless = [entry.live for entry in self.backlog]
        for live in homeless:
            self._fail(live)
        return tuple(live.request.request_id for live in homeless)

    def expire(self, now_s: float, timeout_s: float | None, placing_s: float) -> None:
        """End what has not ended ``timeout_s`` after its arrival, or cannot run for too long."""
        for live in self._unplaceable.overdue(now_s, placing_s):
            self._fail(live)
        while timeout_s is not None and self._live:
            oldest = next(iter(self._live.values()))
            if now_s - oldest.arrived_s <= timeout_s:
                break
            self._fail(oldest)
        self.place_if_changed()
        if self.quarantine.held:
            self._isolate()  # a group may have become empty, and no group has changed by that
        if self._prefixes.holds_any:
            # A group that stands still makes no room, and nobody looks at who waits for it.
            self._fill()

    def _fail(self, live: Live) -> None:
        """End a request with an error, wherever it is."""
        request_id = live.request.request_id
        end = TokenOutput(request_id, len(live.output_token_ids), None, None, FinishReason.ERROR)
        client, leader = live.client, live.leader
        self._forget(live)
        if leader is not None:
            self._outbox.append(Send(leader, Abort(request_id)))
        self._outbox.append(Deliver(end, client))

    def deliver(self, outputs: Outputs) -> None:
        """Deliver tokens that the client does not have yet, each when those before it are there."""
        live_by_id, src = self._live, outputs.instance_id
        is_late = self._placement.has_lost(src)
        for scores in outputs.scores:
            live = live_by_id.get(scores.request_id)
            if live is not None and (not is_late or live.lost_by == src):
                self._deliver(live, live.take_scores(scores))
        for token in outputs.tokens:
            live = live_by_id.get(token.request_id)
            if live is None or (is_late and live.lost_by != src):
                continue
            self._deliver(live, live.in_turn(token))
            if live.tokens_ahead and live.leader == src:
                self._ahead.remove(live)
                self._prefixes.computed(live)
        self.place_if_changed()

    def _deliver(self, live: Live, tokens: Iterable[TokenOutput]) -> None:
        for token in tokens:
            self._outbox.append(Deliver(token, live.client))
            if token.finish_reason is not None:
                self._prefixes.ended(live)
                self._forget(live)
                return
            if token.request_id in self.quarantine.tested:
                self.quarantine.made_token(token.request_id, token.position + 1)

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
                self._prefixes.computed(live)

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

    def rerun(
        self,
        leaders: set[InstanceId],
        num_suspects: Mapping[InstanceId, int],
        blame: Blame = NOBODY,
    ) -> None:
        """Run the requests of these leaders again, from prompt and tokens already delivered.

        The first so many of a leader may be why it died.
        """
        for leader in leaders:
            lost = self._in_order(leader)
            first = lost[: num_suspects.get(leader, 0)]
            guilty = self.quarantine.died([live.request.request_id for live in first], blame)
            for live in lost:
                request_id = live.request.request_id
                live.forget_early()
                self._lead(live, None)
                if request_id in guilty:
                    self._fail(live)
                else:
                    self.quarantine.interrupted(request_id)
                    live.lost_by = leader
                    self.num_rerun += 1
                    self._outbox.append(LogRerun(request_id, len(live.output_token_ids)))
        self.place()

    def prefixes_reset(self) -> None:
        """No group has beginnings of requests that have ended any more."""
        self._prefixes.forget_all()

    def check(self, alive: Iterable[InstanceId]) -> None:
        """Assert that every request has a living leader, or is in the backlog."""
        living = set(alive)
        self.backlog.check()
        self.quarantine.check()
        for leader, led in self._by_leader.items():
            assert not led or leader in living, (leader, led.keys())
            assert all(live.leader == leader for live in led.values()), leader
            self._ahead.check(leader, list(led.values()))
        self._prefixes.check(self._live.values())
        num_live = len(self.backlog) + sum(map(len, self._by_leader.values()))
        assert num_live == len(self._live), (num_live, len(self._live))
