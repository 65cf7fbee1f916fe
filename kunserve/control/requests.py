"""Requests that have not ended: where each one is, and what its client already has."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kunserve.control.placement import Group, Placement
from kunserve.core.ids import InstanceId, RequestId
from kunserve.core.messages import Abort, Message, Outputs, Submit, TokenOutput
from kunserve.core.request import Request
from kunserve.policy.dispatch import GroupView, choose_group

NOWHERE = InstanceId(-1)


@dataclass(slots=True)
class _Live:
    request: Request
    leader: InstanceId
    output_token_ids: list[int]


class Requests:
    """Dispatches requests, follows them through transitions, and runs them again after a death.

    A token reaches the client once: a re-run's repeats are known by their position.
    """

    def __init__(
        self,
        placement: Placement,
        block_size: int,
        tell: Callable[[InstanceId, Message], None],
        deliver: Callable[[TokenOutput], None],
    ) -> None:
        self._placement = placement
        self._block_size = block_size
        self._tell = tell
        self._deliver = deliver
        self._live: dict[RequestId, _Live] = {}
        self._homeless: list[Request] = []
        """Requests whose group died while no other stood."""
        self._num_sent: dict[InstanceId, int] = {}
        """Submissions to each instance, to match ``LoadReport.num_received``."""

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: Request) -> None:
        """Send a new request to a group; it is kept until a group stands if there is none."""
        self._live[request.request_id] = _Live(request, NOWHERE, list(request.output_token_ids))
        self._dispatch(request)

    def cancel(self, request_id: RequestId) -> None:
        """Forget a request and have its leader free everything."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self._homeless = [r for r in self._homeless if r.request_id != request_id]
        if live.leader != NOWHERE:
            self._tell(live.leader, Abort(request_id))

    def _dispatch(self, request: Request) -> None:
        tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        blocks = -(-tokens // self._block_size)
        views = [view_of(group) for group in self._placement.groups.values()]
        group_id = choose_group(views, blocks)
        if group_id is None:
            self._live[request.request_id].leader = NOWHERE
            self._homeless.append(request)
            return
        group = self._placement.groups[group_id]
        leader = group.layout.leader
        number = self._num_sent.get(leader, 0) + 1
        self._num_sent[leader] = number
        group.sent(number, blocks)
        self._live[request.request_id].leader = leader
        self._tell(leader, Submit(request))

    def rehome(self) -> None:
        """Dispatch what no group could take: one may stand again."""
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            self._dispatch(request)

    def take(self, outputs: Outputs) -> None:
        """Deliver tokens that the client does not have yet."""
        live_by_id = self._live
        for token in outputs.tokens:
            live = live_by_id.get(token.request_id)
            if live is None:
                continue
            if token.token_id is not None:
                if token.position != len(live.output_token_ids):
                    continue
                live.output_token_ids.append(token.token_id)
            self._deliver(token)
            if token.finish_reason is not None:
                del live_by_id[token.request_id]

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

    def restarted(self, instance_id: InstanceId) -> None:
        """A new process counts its submissions from zero."""
        self._num_sent.pop(instance_id, None)

    def rerun(self, leaders: set[InstanceId]) -> None:
        """Run the requests of these leaders again, from prompt and tokens already delivered."""
        for live in tuple(self._live.values()):
            if live.leader in leaders:
                self._dispatch(replace(live.request, output_token_ids=tuple(live.output_token_ids)))

    def check(self, alive: Iterable[InstanceId]) -> None:
        """Assert that every request has a living leader, or waits for one."""
        homeless = {request.request_id for request in self._homeless}
        living = set(alive)
        for request_id, live in self._live.items():
            assert live.leader in living or request_id in homeless, (request_id, live)


def view_of(group: Group) -> GroupView:
    """A group as the dispatcher sees it."""
    if group.load is not None:
        # In a transition the leader reports less room than the group will have.
        view = GroupView.of(group.load, group.unreported_blocks)
        return view._replace(capacity_blocks=group.capacity_blocks)
    return GroupView(
        group.layout.group_id, group.capacity_blocks, 0, 0, 0, 0, group.unreported_blocks
    )
