"""Whoever writes down what a cluster does, where ``--trace-out`` asks for it: an extra."""

from collections.abc import Iterable
from typing import Protocol

from kunserve.cluster.instance.beside_clock import Beside
from kunserve.control.instance.body import AnyWork
from kunserve.core.extras import find_extra
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Message
from kunserve.core.snapshots import TransitionRecord
from kunserve.core.transfer import KvPull, LayerLoad, LayerPull


class InstanceTrace(Protocol):
    """What one instance tells. Times are the machine's monotonic clock."""

    def computed(
        self, step: AnyWork, start_s: float, end_s: float, cpu_s: float, beside: Beside | None
    ) -> None:
        """The stage ran a microbatch; ``beside`` is what its thread did since the last one."""
        ...

    def sent(self, dst: InstanceId, message: Message, num_bytes: int, now_s: float) -> None:
        """Activations went to the next stage."""
        ...

    def pulled(self, what: KvPull | LayerPull | LayerLoad, ok: bool, now_s: float) -> None:
        """A run of KV blocks, or layers, came from a peer or disk (or did not)."""
        ...

    def flush(self) -> None:
        """Called with every report."""
        ...

    def close(self) -> None:
        """The instance leaves."""
        ...


class ClusterTrace:
    """What the front tells; this one is nobody's."""

    def begin(self, started: Iterable[InstanceId], found: Iterable[InstanceId]) -> None:
        """Of instances that are about to start, and of those that an earlier front has left."""

    def grew(self, ids: Iterable[InstanceId]) -> None:
        """These tell, too."""

    def end(self, transitions: Iterable[TransitionRecord]) -> None:
        """All instances have ended."""


def cluster_trace(file: str | None) -> ClusterTrace:
    """Raises ConfigError if no installed package writes traces."""
    if file is None:
        return ClusterTrace()
    made: ClusterTrace = find_extra("traces", "chrome", "--trace-out").FileTrace(file)
    return made


def instance_trace(file: str | None, me: InstanceId) -> InstanceTrace | None:
    """As the cluster's, of one instance."""
    if file is None:
        return None
    made: InstanceTrace = find_extra("traces", "chrome", "--trace-out").InstanceTrace(file, me)
    return made
