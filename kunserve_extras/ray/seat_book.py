"""Who is the front of a cluster over Ray, and what it leaves to the next one. No Ray in here."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from kunserve.cluster.processes.process_mark import mark_of
from kunserve.transport.wire.network import boot_id

SILENT_S = 3.0
"""A front that has said nothing for so long may be replaced by one that is started elsewhere."""
KEPT_S = 60.0
"""How much longer than its instances the book outlives a front."""
LOOK_S = 15.0
"""How often it looks whether it is so late."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One front."""

    token: str
    """Made by chance."""
    host: str
    """For people: where it is."""
    realm: str
    """Equal for processes that see each other's numbers."""
    mark: str
    """Of its process."""

    @classmethod
    def me(cls, token: str, host: str) -> "Holder":
        """The process that asks."""
        realm = f"{boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}"
        return cls(token, host, realm, mark_of(os.getpid()) or "")

    def is_dead_for(self, other: "Holder") -> bool:
        """Whether the other one, on the same machine, can see that this one has ended."""
        pid = int(self.mark.partition(":")[0] or 0)
        return self.realm == other.realm and mark_of(pid) != self.mark


@dataclass(frozen=True, slots=True)
class Taken:
    """What who asks for the seat is told."""

    holder: Holder
    """Whoever has it now."""
    state: bytes | None
    """What that one, or the one before it, has left."""


class SeatBook:
    """The account. Every method is asynchronous, because Ray calls it so."""

    def __init__(
        self, leave: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``leave`` ends the actor."""
        self._leave = leave
        self._clock = clock
        self._holder: Holder | None = None
        self._heard_s = 0.0
        self._state: bytes | None = None
        self._grace_s = 0.0
        self._watch: asyncio.Task[None] | None = None

    async def take(self, who: Holder, grace_s: float, dead: str | None = None) -> Taken:
        """Have the seat, if nobody has it, or who has it is silent or (by its token) ``dead``.

        Its instances outlive it by ``grace_s``.
        """
        now_s, holder = self._clock(), self._holder
        is_free = holder is None or holder.token in (who.token, dead)
        if holder is None or is_free or now_s - self._heard_s > SILENT_S:
            self._holder, self._heard_s, self._grace_s = who, now_s, grace_s
        if self._watch is None:
            self._watch = asyncio.create_task(self._leave_when_forgotten())
        assert self._holder is not None
        return Taken(self._holder, self._state)

    async def hold(self, token: str) -> str | None:
        """The front still lives; the token of the one that has the seat. None: nobody has."""
        if self._holder is None:
            return None
        if self._holder.token == token:
            self._heard_s = self._clock()
        return self._holder.token

    async def write(self, token: str, state: bytes | None) -> None:
        """Leave this to the next front; ignored from one that has lost the seat."""
        if self._holder is not None and self._holder.token == token:
            self._state = state

    async def give_up(self, token: str) -> None:
        """The cluster has ended."""
        if self._holder is not None and self._holder.token == token:
            self._leave()

    async def _leave_when_forgotten(self) -> None:
        while self._clock() - self._heard_s < self._grace_s + KEPT_S:
            await asyncio.sleep(LOOK_S)
        self._leave()
