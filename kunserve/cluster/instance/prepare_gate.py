"""On a network: no word on a transition or a migration before its members are connected.

A transition that is committed between hosts that do not reach each other would fail, and all its
requests would run again. One that is not prepared has changed nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from kunserve.core.ids import InstanceId, TransitionId
from kunserve.core.messages import (
    EndMigration,
    Migrate,
    MigrationOver,
    Prepare,
    Prepared,
    Rollback,
)

Order: TypeAlias = Prepare | Migrate
Answer: TypeAlias = Prepared | MigrationOver


@dataclass(slots=True)
class _Held:
    order: Order
    since_s: float


class PrepareGate:
    """Holds ``Prepare`` and ``Migrate`` back for a while. Belongs to the loop's thread."""

    def __init__(
        self,
        me: InstanceId,
        unreached: Callable[[Iterable[InstanceId]], list[InstanceId]],
        patience_s: Callable[[Iterable[InstanceId]], float],
    ) -> None:
        """``unreached``: those of the instances to whom no connection stands; ``patience_s``: how
        long to wait for it.
        """
        self._me = me
        self._unreached = unreached
        self._patience_s = patience_s
        self._held: dict[TransitionId, _Held] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether connections are waited for, mostly a matter of milliseconds."""
        return bool(self._held)

    def passes(self, message: Order | Rollback | EndMigration, now_s: float) -> bool:
        """Whether the agent shall have the message now; else it is kept, or has become void."""
        match message:
            case Rollback(held_id) | EndMigration(held_id):
                held = self._held.pop(held_id, None)
                return held is None or _has_begun(held.order)
            case Prepare(held_id) | Migrate(held_id) if self._missing(message):
                self._held[held_id] = _Held(message, now_s)
                return False
        return True

    def clear(self) -> None:
        """A group is formed from nothing: what was kept is void."""
        self._held.clear()

    def turn(self, now_s: float) -> tuple[list[Order], list[Answer]]:
        """What the agent shall have now, and what the front is answered without it."""
        passed: list[Order] = []
        refused: list[Answer] = []
        for held_id, held in tuple(self._held.items()):
            missing = self._missing(held.order)
            if not missing:
                passed.append(held.order)
            elif now_s - held.since_s > self._patience_s(missing):
                reason = f"no connection to instances {missing}"
                if isinstance(held.order, Migrate):
                    refused.append(MigrationOver(held_id, self._me, reason))
                else:
                    refused.append(Prepared(held_id, self._me, reason, tuple(missing)))
            else:
                continue
            del self._held[held_id]
        return passed, refused

    def _missing(self, order: Order) -> list[InstanceId]:
        if isinstance(order, Migrate):
            return self._unreached([order.target])
        layouts = order.old + order.new
        return self._unreached(sorted({i for layout in layouts for i in layout.members}))


def _has_begun(order: Order) -> bool:
    """Whether the agent has changed something for it before: a restore's layers are loaded."""
    return isinstance(order, Prepare) and len(order.new) > 1
