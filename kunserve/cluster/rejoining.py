"""Instances of an earlier front that come back: those that come together may stand in one group."""

from collections.abc import Iterable

from kunserve.cluster.processes import Processes
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Rejoin

REJOIN_S = 5.0
"""How long they are waited for before those that are back serve."""


class Rejoining:
    """Collects what they say until all are back, or it is late. The others come one by one."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._events: dict[InstanceId, Rejoin | None] = {}
        """None: not back yet."""
        self._until_s = 0.0

    def begin(self, found: Iterable[InstanceId], now_s: float) -> None:
        """These run, as an earlier front has left them."""
        self._events = dict.fromkeys(found)
        self._until_s = now_s + REJOIN_S

    def take(self, event: Rejoin) -> bool:
        """Keep what one of them says for ``end``; False if it is not waited for."""
        instance_id = event.ready.spec.instance_id
        if instance_id not in self._events:
            return False
        self._events[instance_id] = event
        return True

    def are_back(self, now_s: float) -> bool:
        """Whether all that run are back, or it is late."""
        gone = [i for i in self._events if not self._processes.was_found(i)]
        is_late = now_s > self._until_s
        return is_late or all(self._events[i] or i in gone for i in self._events)

    def end(self) -> list[Rejoin]:
        """What those said that are back. Nobody is waited for from now on."""
        back = [event for event in self._events.values() if event is not None]
        self._events = {}
        return back
