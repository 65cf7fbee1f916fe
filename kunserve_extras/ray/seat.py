"""The seat of a cluster's front over Ray: an actor beside Ray's own head, which any node reaches.

It has the seat's book, so a front that is started on another node finds what its predecessor left.
A front says every half a second that it lives. One that learns that another one has its seat ends
at once, because the other one commands its instances.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError

from kunserve.cluster.processes.seat import RunState
from kunserve.core.errors import ConfigError
from kunserve_extras.ray.seat_book import SILENT_S, Holder, SeatBook, Taken
from kunserve_extras.ray.session import NAMESPACE, awaited, end_actor

logger = logging.getLogger(__name__)

HOLD_S = 0.5
"""Between two words of the front."""
ANSWER_S = 30.0
"""How long the actor may take to start and to answer the first question."""
GIVE_UP_S = 2.0
"""How long a front that ends waits until the actor knows."""
EXIT_SUPERSEDED = 73
"""Exit code of a front whose seat another one has taken."""
HEAD = {"node:__internal_head__": 0.001}
"""Ray's own mark of its head: where that dies, Ray is over."""


@ray.remote
class _Actor(SeatBook):
    """The book, told by Ray who it is."""

    def __init__(self) -> None:
        me = ray.get_runtime_context().current_actor
        super().__init__(lambda: end_actor(me))


class RaySeat:
    """Implements ``Seat``. Belongs to one event loop."""

    path: Path | None = None

    def __init__(self, name: str, me: Holder, grace_s: float, superseded: Callable[[], None]):
        """See ``take``."""
        self._name = name
        self._me = me
        self._grace_s = grace_s
        self._superseded = superseded
        self._actor: Any = None
        self._state: bytes | None = None
        self._holding: asyncio.Task[None] | None = None

    @classmethod
    async def take(
        cls,
        name: str,
        host: str,
        grace_s: float,
        superseded: Callable[[], None] | None = None,
    ) -> "RaySeat":
        """Be the front of the server of this name. Raises ConfigError when another one is.

        ``superseded`` is called when another front has taken the seat; it does not return.
        """
        me = Holder.me(secrets.token_hex(8), host)
        seat = cls(name, me, grace_s, superseded or _end)
        dead: str | None = None
        deadline_s = asyncio.get_running_loop().time() + ANSWER_S
        num_refused = 0
        while True:
            try:
                seat._actor = _actor(name)
                asked = seat._actor.take.remote(me, grace_s, dead)
                async with asyncio.timeout_at(deadline_s):
                    answer: Taken = await awaited(asked)
            except TimeoutError:
                raise ConfigError(
                    f"--cluster ray: Ray's head started no actor within {ANSWER_S:g} s; "
                    "`ray status` tells how it fares"
                ) from None
            except RayError as error:  # an earlier one is about to end
                if asyncio.get_running_loop().time() > deadline_s:
                    raise ConfigError(f"--cluster ray: no actor on Ray's head: {error}") from None
                await asyncio.sleep(HOLD_S)
                continue
            other = answer.holder
            if other.token == me.token:
                break
            dead = other.token if other.is_dead_for(me) else None
            num_refused += 1
            if dead is None and num_refused * HOLD_S > SILENT_S + 1.0:
                raise ConfigError(
                    f"a server named {name!r} runs in this Ray cluster already, its front on "
                    f"{other.host}: stop it, or give this one another --ray-name"
                )
            if dead is None:
                await asyncio.sleep(HOLD_S)
        seat._state = answer.state
        seat._holding = asyncio.create_task(seat._hold())
        return seat

    async def _hold(self) -> None:
        """Say that this front lives, and see whether it is the front still."""
        num_failed = 0
        while True:
            await asyncio.sleep(HOLD_S)
            try:
                holder = await awaited(self._actor.hold.remote(self._me.token))
                if holder is None:  # a new actor, which knows nobody
                    holder = await self._take_again()
            except Exception as error:  # Ray's, most likely: it has many
                num_failed += 1
                if num_failed & (num_failed - 1) == 0:
                    logger.error("the seat cannot be asked count=%d: %s", num_failed, error)
                with contextlib.suppress(Exception):  # it is asked again
                    self._actor = _actor(self._name)  # the one before is gone
                continue
            if holder != self._me.token:
                logger.error(
                    "leaving: another front has taken this server over name=%s", self._name
                )
                self._superseded()
                return

    async def _take_again(self) -> str:
        answer: Taken = await awaited(self._actor.take.remote(self._me, self._grace_s, None))
        if answer.holder.token == self._me.token:
            self._tell()
        return answer.holder.token

    def _tell(self) -> None:
        with contextlib.suppress(RayError):  # ``_hold`` sees to that
            self._actor.write.remote(self._me.token, self._state)

    def read(self) -> RunState | None:
        """See ``Seat``."""
        with contextlib.suppress(msgspec.MsgspecError):
            if self._state is not None:
                return msgspec.json.decode(self._state, type=RunState)
        return None

    def write(self, state: RunState) -> None:
        """See ``Seat``."""
        self._state = msgspec.json.encode(state)
        self._tell()

    def clear(self) -> None:
        """See ``Seat``."""
        self._state = None
        self._tell()

    def remove(self) -> None:
        """See ``Seat``."""
        if self._holding is None:
            return
        self._holding.cancel()
        self._holding = None
        with contextlib.suppress(RayError, GetTimeoutError):
            ray.get(self._actor.give_up.remote(self._me.token), timeout=GIVE_UP_S)


def seat_name(name: str) -> str:
    """Of the actor that keeps the seat of a server."""
    return f"{name}/seat"


def _actor(name: str) -> Any:
    """The seat's, which is made if there is none."""
    kind: Any = _Actor
    return kind.options(
        name=seat_name(name),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources=HEAD,
        max_restarts=0,
    ).remote()


def _end() -> None:
    # At once: whatever this process still did would be done to another front's instances.
    os._exit(EXIT_SUPERSEDED)
