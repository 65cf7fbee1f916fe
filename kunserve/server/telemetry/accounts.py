"""Where ``/metrics`` comes from: this front, or the server that it is a part of."""

from typing import Protocol

from kunserve.server.telemetry.metrics import FrontMetrics


class Accounts(Protocol):
    """Of the whole server, as bytes to be sent."""

    async def metrics(self) -> bytes:
        """The text of ``/metrics``."""
        ...


class OwnAccounts:
    """Of the only front."""

    def __init__(self, metrics: FrontMetrics) -> None:
        self._metrics = metrics

    async def metrics(self) -> bytes:
        """See ``Accounts``."""
        return self._metrics.exposition()
