"""Requests that have not ended: where each one is, and what its client already has."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kunserve.control.cluster.commands import Client, Deliver, Outbox
from kunserve.control.cluster.placement import Group, Placement
from kunserve.core.ids import InstanceId, RequestId, TransitionId
from kunserve.core.messages import Abort, Outputs, Submit, TokenOutput
from kunserve.core.request import FinishReason, Request
from kunserve.policy.dispatch import choose_group

NOWHERE = InstanceId(-1)


@dataclass(slots=True)
class _Live:
    request: Request
    client: Client
    leader: InstanceId
    output_token_ids: list[int]
    early: dict[int, TokenOutput] = field(default_factory=dict)
    """By position: a new leader's word came before the last of the old one's."""


class Requests:
    """Dispatches requests, follows them through transitions, and runs them again after a death.

    Owns who waits for a request. A token reaches the client once: a re-run's repeats are known by
    their position.
    """

    def __init__(self, placement: Placement, block_size: int, outbox: Outbox) -> None:
        self._placement = placement
        self._block_size = block_size
        self._outbox = outbox
        self._live: dict[RequestId, _Live] = {}
        self._homeless: list[Request] = []
        """Requests whose group died while no other stood."""
        self._num_sent: dict[InstanceId, int] = {}
        """Submissions to each instance, to match ``LoadReport.num_received``."""

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: Request, client: Client) -> None:
        """Send a new request to a group; it is kept until a group stands if there is none."""
        output_token_ids = list(request.output_token_ids)
        self._live[request.request_id] = _Live(request, client, NOWHERE, output_token_ids)
        self._dispatch(request)

    def cancel(self, request_id: RequestId) -> None:
        """Forget a request and have its leader free everything."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self._homeless = [r for r in self._homeless if r.request_id != request_id]
        if live.leader != NOWHERE:
            self._outbox.send(live.leader, Abort(request_id))

    def _dispatch(self, request: Request) -> None:
        tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        blocks = -(-tokens // self._block_size)
        leaving = self._placement.leaving
        loads = [
            group.load
            for group_id, group in self._placement.groups.items()
            if group_id not in leaving
        ]
        group_id = choose_group(loads, blocks)
        if group_id is None:
            self._live[request.request_id].leader = NOWHERE
            self._homeless.append(request)
            return
        self._send(self._placement.groups[group_id], Submit(request), blocks)

    def _send(self, group: Group, message: Submit, blocks: int) -> None:
        leader = group.layout.leader
        number = self._num_sent.get(leader, 0) + 1
        self._num_sent[leader] = number
        group.sent(number, blocks)
        self._live[message.request.request_id].leader = leader
        self._outbox.send(leader, message)

    def rehome(self) -> None:
        """Dispatch what no group could take: one may stand again."""
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            self._dispatch(request)

    def end_homeless(self) -> tuple[RequestId, ...]:
        """End what no group can take with an error, because none will stand soon."""
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            live = self._live.pop(request.request_id)
            position = len(live.output_token_ids)
            end = TokenOutput(request.request_id, position, None, None, FinishReason.ERROR)
            self._outbox.add(Deliver(end, live.client))
        return tuple(request.request_id for request in homeless)

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
            del self._live[token.request_id]

    def relead(
        self,
        old_leaders: Iterable[InstanceId],
        told: dict[RequestId, InstanceId],
        default: dict[InstanceId, InstanceId],
    ) -> None:
        """After a transition: whom the new leaders named is theirs; the rest was forwarded."""
        leaders = set(old_leaders)
        for request_id, live in self._live.items():
            if live.leader in leaders:
                live.leader = told.get(request_id, default[live.leader])

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
        request = replace(live.request, output_token_ids=tuple(live.output_token_ids))
        tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        blocks = -(-tokens // self._block_size)
        self._send(target, Submit(request, migration_id=migration_id), blocks)
        return True

    def num_at(self, leader: InstanceId) -> int:
        """Requests that the instance leads."""
        return sum(live.leader == leader for live in self._live.values())

    def restarted(self, instance_id: InstanceId) -> None:
        """A new process counts its submissions from zero."""
        self._num_sent.pop(instance_id, None)

    def rerun(self, leaders: set[InstanceId]) -> None:
        """Run the requests of these leaders again, from prompt and tokens already delivered."""
        for live in tuple(self._live.values()):
            if live.leader in leaders:
                live.early.clear()
                self._dispatch(replace(live.request, output_token_ids=tuple(live.output_token_ids)))

    def check(self, alive: Iterable[InstanceId]) -> None:
        """Assert that every request has a living leader, or waits for one."""
        homeless = {request.request_id for request in self._homeless}
        living = set(alive)
        for request_id, live in self._live.items():
            assert live.leader in living or request_id in homeless, (request_id, live)
