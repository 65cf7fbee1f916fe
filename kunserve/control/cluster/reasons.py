"""Why nothing is done about a group whose load asks for something: told once per change."""

from collections.abc import Iterable

from kunserve.control.cluster.commands import LogReason, Outbox
from kunserve.core.ids import GroupId
from kunserve.policy.drop.monitor import Excuse

REPEAT_AFTER_S = 10.0
"""A reason that came and went is not told again within this time: loads swing."""


class Reasons:
    """Knows which reason holds for which group at the moment."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._now: dict[GroupId, Excuse] = {}
        self._told: dict[tuple[GroupId, str], float] = {}

    @property
    def texts(self) -> tuple[str, ...]:
        """For people, by group."""
        return tuple(
            f"group {group}: {excuse.reason}" for group, excuse in sorted(self._now.items())
        )

    def replace(self, excuses: Iterable[Excuse], now_s: float) -> None:
        """All that hold now. Called after every look at the load."""
        self._now = {excuse.group_id: excuse for excuse in excuses}
        for excuse in self._now.values():
            key = (excuse.group_id, excuse.cause)
            if now_s - self._told.get(key, -REPEAT_AFTER_S) >= REPEAT_AFTER_S:
                self._outbox.append(LogReason(excuse.group_id, excuse.reason))
            self._told[key] = now_s
        if len(self._told) > 2 * len(self._now):
            self._told = {
                key: told_s for key, told_s in self._told.items() if now_s - told_s < REPEAT_AFTER_S
            }
