"""Who is a cluster's front: one at a time. And what it leaves to the next one."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kunserve.core.ids import InstanceId


@dataclass(frozen=True, slots=True)
class WiresState:
    """What the next front must have, so that instances of this one believe it and it them."""

    address: str
    public_key: str
    secret_key: str | None
    """None where others might read it: the next front has a key of its own, and tells."""
    instance_keys: dict[InstanceId, str] = field(default_factory=dict)
    """Public ones, of the processes that run."""


@dataclass(frozen=True, slots=True)
class RunState:
    """What a front leaves to the next one."""

    front: str
    """The front's own name, made by chance."""
    epoch: int
    """Counts fronts: each one's ids of groups and transitions lie above the last one's."""
    settings: str
    """A digest of everything that instances depend on; another one makes them useless."""
    socket_folder: str
    """Where the front and the instances listen."""
    marks: dict[InstanceId, str]
    """By which the launcher finds each process again."""
    wires: WiresState | None = None
    """None: sockets are files of the socket folder."""
    ids: tuple[InstanceId, ...] = ()
    """Of all instances that there are to be, also of those between two processes."""
    loaded: tuple[InstanceId, ...] = ()
    """Of those whose processes have been ready. The others may load still, and say nothing."""
    max_model_len: int | None = None
    """What all of them can serve, in tokens. None: not known yet."""


class Seat(Protocol):
    """Taken by one front. Whoever has it may command the cluster's instances."""

    @property
    def path(self) -> Path | None:
        """The folder where instances of this machine look after their front, and where sockets
        are. None: they ask their front over the network.
        """
        ...

    def read(self) -> RunState | None:
        """What the front before this one left; None if it left nothing that can be read."""
        ...

    def write(self, state: RunState) -> None:
        """Replace the state as a whole, so that nobody reads half of it."""
        ...

    def clear(self) -> None:
        """Forget the front before this one, and its sockets."""
        ...

    def remove(self) -> None:
        """The cluster is gone. Callable twice."""
        ...
