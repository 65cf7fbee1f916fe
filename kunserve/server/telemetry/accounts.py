"""Where ``/metrics`` and the timeline come from: this front, or the server that it is a part of."""

from typing import Protocol

from kunserve.server.telemetry.metrics import FrontMetrics
from kunserve.server.telemetry.timeline import Timeline


class Accounts(Protocol):
    """Of the whole server, as bytes to be sent."""

    async def metrics(self) -> bytes:
        """The text of ``/metrics``."""
        ...

    async def timeline(self, since_s: float | None) -> bytes:
        """``/kunserve/timeline`` in JSON: what came after that moment, or all."""
        ...


class OwnAccounts:
    """Of the only front."""

    def __init__(self, metrics: FrontMetrics, timeline: Timeline) -> None:
        self._metrics = metrics
        self._timeline = timeline

    async def metrics(self) -> bytes:
        """See ``Accounts``."""
        return self._metrics.exposition()

    async def timeline(self, since_s: float | None) -> bytes:
        """See ``Accounts``."""
        return self._timeline.view(since_s)
