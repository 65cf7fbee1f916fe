"""Drops and restores that somebody asked for, who waits for their outcome."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kunserve.cluster.driver.transition_log import describe
from kunserve.control.cluster.controller import Controller
from kunserve.control.cluster.transition import Transition
from kunserve.core.errors import InvalidRequest
from kunserve.core.ids import TransitionId
from kunserve.core.snapshots import Outcome
from kunserve.policy.drop.restore import Postponed
from kunserve.policy.exchange.moves import weights_obstacle

logger = logging.getLogger(__name__)

SETTLE_S = 10.0
"""How long a restore by hand waits for transitions under way and for leaders' first reports."""


class ForcedTransitions:
    """Begins transitions and waits for them, in the driver's event loop."""

    def __init__(
        self,
        controller: Controller,
        now_s: Callable[[], float],
        flush: Callable[[], None],
        until: Callable[[Callable[[], bool]], Awaitable[None]],
    ) -> None:
        """``flush`` carries out the controller's commands; ``until`` waits for a condition."""
        self._controller = controller
        self._now_s = now_s
        self._flush = flush
        self._until = until

    async def drop(self, num_bytes: int | None) -> str:
        """See ``EngineClient.drop``."""
        ids = self._controller.force_drop(num_bytes, self._now_s())
        self._flush()
        if not ids and weights_obstacle(self._controller.placement.specs.values()):
            raise InvalidRequest(
                "weights are shared, nothing to drop: --weights private gives each instance its own"
            )
        if not ids:
            raise InvalidRequest(
                "nothing can be dropped: one group is left, or all are changing, or the layers are "
                "too small beside their KV for a merge to add any"
            )
        return await self._outcome(ids, lambda transition: transition.is_committed)

    async def restore(self) -> str:
        """See ``EngineClient.restore``. Says too which pipelines do not part now, and why."""
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._until(lambda: self._controller.is_settled)
        except TimeoutError:
            logger.warning("restore asked for while groups still change")
        begun = self._controller.force_restore(self._now_s())
        self._flush()
        ids = [item for item in begun if not isinstance(item, Postponed)]
        reasons = [item.reason for item in begun if isinstance(item, Postponed)]
        if not ids:
            why = "; ".join(reasons) or "no group is dropped"
            raise InvalidRequest(f"nothing was restored: {why}")
        said = await self._outcome(ids, lambda transition: False)
        return "; ".join((said, *(f"not restored: {reason}" for reason in reasons)))

    async def _outcome(
        self, ids: list[TransitionId], is_enough: Callable[[Transition], bool]
    ) -> str:
        """Wait until each has ended, or is far enough; what became of them."""
        active = self._controller.transitions.active

        def is_over() -> bool:
            return all(i not in active or is_enough(active[i]) for i in ids)

        await self._until(is_over)
        records = [r for r in self._controller.transitions.latest() if r.transition_id in ids]
        failed = [r.ending for r in records if r.outcome in (Outcome.ROLLED_BACK, Outcome.FAILED)]
        if failed:
            raise InvalidRequest("; ".join(failed))
        return "; ".join(describe(record) for record in records)
