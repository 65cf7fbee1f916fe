"""What the controller's parts ask its driver to do."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from kunserve.core.ids import GroupId, InstanceId, RequestId
from kunserve.core.messages import Message, TokenOutput
from kunserve.core.snapshots import TransitionRecord

Client: TypeAlias = Callable[[TokenOutput], None]
"""Whoever waits for a request: called with every token, and last with a finish reason."""


class Send(NamedTuple):
    """Send a message to an instance."""

    instance_id: InstanceId
    message: Message


class Deliver(NamedTuple):
    """Call the client with the token. The controller calls nobody itself."""

    token: TokenOutput
    client: Client


class Respawn(NamedTuple):
    """Start a process in the place of a dead instance."""

    instance_id: InstanceId


class Condemn(NamedTuple):
    """Kill an instance's process, for this reason; no request is to blame."""

    instance_id: InstanceId
    reason: str


class LogTransition(NamedTuple):
    """A transition ended: one line for the log."""

    record: TransitionRecord


class LogReason(NamedTuple):
    """Why nothing is done about a group's load: one line for the log, at each change."""

    group_id: GroupId
    reason: str


class LogObserved(NamedTuple):
    """A drop or a restore that would have been made: one line for the log."""

    text: str


class LogQuarantine(NamedTuple):
    """What becomes of a request that may be what killed instances: one line for the log."""

    request_id: RequestId
    reason: str


class LogRerun(NamedTuple):
    """A request's instance is gone, and it runs again from these tokens: one line for the log."""

    request_id: RequestId
    num_tokens: int
    """Tokens that its client has."""


class ScaleUp(NamedTuple):
    """One more instance is needed: nothing is left to drop, or somebody asked for it."""

    reason: str
    is_wish: bool = False
    """The cluster may not grow: one line for the log."""


class ScaleDown(NamedTuple):
    """The instance serves nobody and is not needed: it goes, or if it has died it stays away."""

    instance_id: InstanceId


ControlCommand: TypeAlias = (
    Send
    | Deliver
    | Respawn
    | Condemn
    | LogTransition
    | LogReason
    | LogObserved
    | LogQuarantine
    | LogRerun
    | ScaleUp
    | ScaleDown
)


class Outbox(list[ControlCommand]):
    """Commands that the driver has not taken yet, in order."""
