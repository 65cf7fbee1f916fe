"""Requests as they come to an instance, and where each of them belongs.

The leader's scheduler runs them. What comes to another member, or after its request has changed
groups, is sent on to the leader. A request whose KV is on its way here waits in the migration.
"""

from dataclasses import replace
from typing import TypeAlias

from kunserve.control.instance.changes.change_slot import ChangeSlot
from kunserve.control.instance.membership import Membership
from kunserve.control.instance.state import InstanceState
from kunserve.core.ids import RequestId
from kunserve.core.messages import Abort, Returned, ReturnWaiting, Submit

RequestMessage: TypeAlias = Submit | Abort | ReturnWaiting
"""Says something about requests."""


class Intake:
    """Owner of the count of requests that the controller has sent here."""

    def __init__(self, state: InstanceState, changes: ChangeSlot) -> None:
        self._state = state
        self._changes = changes
        self.num_received = 0

    def read(self, message: RequestMessage, membership: Membership) -> None:
        """Take a message to where its requests are."""
        match message:
            case Submit() as submit:
                self._submit(submit, membership)
            case Abort() as abort:
                self._abort(abort, membership)
            case ReturnWaiting(request_ids):
                scheduler = membership.scheduler
                found = () if scheduler is None else scheduler.give_back(request_ids)
                self._state.send(None, Returned(self._state.me, found))

    def knows(self, membership: Membership | None, request_id: RequestId) -> bool:
        """Whether an abort of the request finds it, here or by forwarding."""
        return membership is not None and (
            membership.scheduler is None
            or request_id in membership.former_requests
            or membership.scheduler.migration.knows(request_id)
            or self._changes.change.awaits(request_id)
        )

    def _submit(self, message: Submit, membership: Membership) -> None:
        if message.group_id is None:
            self.num_received += 1
        if membership.scheduler is None:
            layout = membership.layout
            self._state.send(layout.leader, replace(message, group_id=layout.group_id))
        elif not self._changes.change.accept(message):
            membership.scheduler.add(message.request)

    def _abort(self, message: Abort, membership: Membership) -> None:
        request_id, scheduler = message.request_id, membership.scheduler
        if scheduler is not None and self._changes.change.abort(request_id):
            return
        if scheduler is not None and scheduler.abort(request_id):
            return
        leader = membership.former_requests.get(request_id, membership.layout.leader)
        if leader != self._state.me:
            self._state.send(leader, message)
