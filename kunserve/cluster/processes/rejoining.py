"""Instances of an earlier front that come back: those that come together may stand in one group."""

from collections.abc import Iterable

from kunserve.cluster.processes.processes import Processes
from kunserve.core.ids import InstanceId
from kunserve.core.messages import Ready, Rejoin

REJOIN_S = 5.0
"""How long they are waited for before those that are back serve."""
REJOIN_STEPS = 2
"""Of one that is not back, its longest steps that it is waited for beside: it may be in one."""


class Rejoining:
    """Collects what they say until all are back, or it is late. The others come one by one."""

    def __init__(self, processes: Processes, front: str) -> None:
        """``front``: the name of this one."""
        self._processes = processes
        self._front = front
        self._events: dict[InstanceId, Rejoin | None] = {}
        """None: not back yet."""
        self._until_s = 0.0

    def begin(self, found: Iterable[InstanceId], now_s: float) -> None:
        """These run, as an earlier front has left them."""
        self._events = dict.fromkeys(found)
        self._until_s = now_s + REJOIN_S

    def is_meant(self, event: Ready | Rejoin) -> bool:
        """Whether this word is for this front to act on.

        Who was found has said ``Ready`` to an earlier front, and ``Rejoin`` to each one since; this
        front may be the first one to read it. Nobody else says ``Rejoin``, but the last words of a
        process may be read when it is over.
        """
        if isinstance(event, Ready):
            return not self._processes.was_found(event.spec.instance_id)
        was_found = self._processes.was_found(event.ready.spec.instance_id)
        return was_found and event.front == self._front

    def take(self, event: Rejoin) -> bool:
        """Keep what one of them says for ``end``; False if it is not waited for."""
        instance_id = event.ready.spec.instance_id
        if instance_id not in self._events:
            return False
        self._events[instance_id] = event
        return True

    def are_back(self, now_s: float) -> bool:
        """Whether all that run are back, or it is late."""
        processes = self._processes
        missing = [i for i, event in self._events.items() if event is None]
        return all(
            now_s > self._until_s + REJOIN_STEPS * processes.longest_step_s(instance_id)
            for instance_id in missing
            if processes.was_found(instance_id)
        )

    def end(self) -> list[Rejoin]:
        """What those said that are back and have not died since. Nobody is waited for from now on.

        A death tells the controller nothing before this, because it knows none of them yet.
        """
        back = [
            event
            for instance_id, event in self._events.items()
            if event is not None and self._processes.was_found(instance_id)
        ]
        self._events = {}
        return back
