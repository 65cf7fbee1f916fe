"""Requests that have not ended: where each one is, and what its client already has."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kunserve.control.cluster.commands import Client, Deliver, Outbox
from kunserve.control.cluster.placement import Group, Placement
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.messages import Abort, Outputs, Submit, TokenOutput
from kunserve.core.request import FinishReason, Request
from kunserve.policy.dispatch import choose_group


@dataclass(slots=True)
class _Live:
    number: int
    """Counts arrivals: the order in which requests are sent anew."""
    request: Request
    client: Client
    leader: InstanceId | None
    """None while no group has it."""
    output_token_ids: list[int]
    early: dict[int, TokenOutput] = field(default_factory=dict)
    """By position: a new leader's word came before the last of the old one's."""

    def so_far(self) -> Request:
        """The request with what its client has: a new run goes on from there."""
        return replace(self.request, output_token_ids=tuple(self.output_token_ids))


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

    def add(self, request: Request, client: Client) -> None:
        """Send a new request to a group; it is kept until a group stands if there is none."""
        self._num_arrived += 1
        live = _Live(self._num_arrived, request, client, None, list(request.output_token_ids))
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

    def _lead(self, live: _Live, leader: InstanceId | None) -> None:
        request_id = live.request.request_id
        del self._by_leader[live.leader][request_id]
        self._by_leader.setdefault(leader, {})[request_id] = live
        live.leader = leader

    def _dispatch(self, live: _Live) -> None:
        request = live.so_far()
        blocks = self._blocks_of(request)
        leaving = self._placement.leaving
        loads = [
            group.load
            for group_id, group in self._placement.groups.items()
            if group_id not in leaving
        ]
        group_id = choose_group(loads, blocks)
        if group_id is None:
            self._lead(live, None)
        else:
            self._send(live, self._placement.groups[group_id], Submit(request), blocks)

    def _blocks_of(self, request: Request) -> int:
        tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        return -(-tokens // self._block_size)

    def _send(self, live: _Live, group: Group, message: Submit, blocks: int) -> None:
        leader = group.layout.leader
        number = self._num_sent.get(leader, 0) + 1
        self._num_sent[leader] = number
        group.sent(number, blocks)
        self._lead(live, leader)
        self._outbox.send(leader, message)

    def rehome(self) -> None:
        """Dispatch what no group could take: one may stand again."""
        for live in _by_arrival(self._by_leader[None]):
            self._dispatch(live)

    def end_homeless(self) -> tuple[RequestId, ...]:
        """End what no group can take with an error, because none will stand soon."""
        homeless = _by_arrival(self._by_leader[None])
        for live in homeless:
            position = len(live.output_token_ids)
            end = TokenOutput(live.request.request_id, position, None, None, FinishReason.ERROR)
            self._forget(live)
            self._outbox.add(Deliver(end, live.client))
        return tuple(live.request.request_id for live in homeless)

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
            self._take_next(live, token)
            while live.early and (early := live.early.pop(len(live.output_token_ids), None)):
                self._take_next(live, early)

    def _take_next(self, live: _Live, token: TokenOutput) -> None:
        """A token, or an end without one, that is next in order or a repeat."""
        if token.token_id is not None:
            if token.position != len(live.output_token_ids):
                return
            live.output_token_ids.append(token.token_id)
        self._outbox.add(Deliver(token, live.client))
        if token.finish_reason is not None:
            self._forget(live)

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
        request = live.so_far()
        message = Submit(request, migration_id=migration_id)
        self._send(live, target, message, self._blocks_of(request))
        return True

    def restarted(self, instance_id: InstanceId, num_received: int = 0) -> None:
        """A new process counts its submissions from zero, an earlier front's one goes on."""
        self._num_sent[instance_id] = num_received

    def rerun(self, leaders: set[InstanceId]) -> None:
        """Run the requests of these leaders again, from prompt and tokens already delivered."""
        lost = {
            request_id: live
            for leader in leaders
            for request_id, live in self._by_leader.get(leader, {}).items()
        }
        for live in _by_arrival(lost):
            live.early.clear()
            self._dispatch(live)

    def check(self, alive: Iterable[InstanceId]) -> None:
        """Assert that every request has a living leader, or none."""
        living = set(alive)
        for leader, led in self._by_leader.items():
            assert leader is None or not led or leader in living, (leader, led.keys())
            assert all(live.leader == leader for live in led.values()), leader
        assert sum(map(len, self._by_leader.values())) == len(self._live), self._by_leader.keys()


def _by_arrival(lives: dict[RequestId, _Live]) -> list[_Live]:
    return sorted(lives.values(), key=lambda live: live.number)
