"""What can happen next in a world whose order is chosen, and what is on its way in it."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kunserve.core.ids import InstanceId
from kunserve.transport.wire.numbering import Stamp
from kunserve_lab.world.world import Address


class Letter(NamedTuple):
    """A message on a link: bytes, as between processes."""

    data: bytes
    hidden: bytes | None
    process: bytes = b""
    """Who sent it."""
    stamp: Stamp | None = None
    """Between instances: its number."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Deliver the first message of a link."""

    src: Address
    dst: Address


@dataclass(frozen=True, slots=True)
class StartStep:
    """Let an instance begin its next step."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class RunAhead:
    """Let an instance form the step behind the one that runs, if it can."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class FinishStep:
    """Let an instance's step end."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class MapMore:
    """Let an instance prepare one more piece of its memory."""

    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class CompletePull:
    """Let one of an instance's pulls end: copied, or refused."""

    instance_id: InstanceId
    index: int
    fails: bool = False


Action: TypeAlias = Delivery | StartStep | RunAhead | FinishStep | MapMore | CompletePull
