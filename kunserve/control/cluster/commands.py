"""What the controller asks its driver to do, and the box in which its parts put it."""

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
    | LogTransition
    | LogReason
    | LogObserved
    | LogQuarantine
    | LogRerun
    | ScaleUp
    | ScaleDown
)


class Outbox:
    """Commands that the driver has not taken yet, in order."""

    def __init__(self) -> None:
        self._commands: list[ControlCommand] = []
        self._endings: list[ControlCommand] = []

    def add(self, command: ControlCommand) -> None:
        """One more command; ends of transitions are told after everything else."""
        (self._endings if isinstance(command, LogTransition) else self._commands).append(command)

    def send(self, instance_id: InstanceId, message: Message) -> None:
        """A message for an instance."""
        self._commands.append(Send(instance_id, message))

    def drain(self) -> list[ControlCommand]:
        """Everything since the last call."""
        commands = self._commands + self._endings
        self._commands, self._endings = [], []
        return commands
